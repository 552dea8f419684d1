"""What somebody who watches the pool is shown. Costs nothing while nobody does.

eyes.py   what any thread may ask
watch.py  notes what happens to blocks, and takes pictures between two steps
"""
