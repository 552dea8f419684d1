"""Paged attention on TPUs, in Pallas Mosaic.

attention.py  the calls, for rows that decode and for chunks of prompts
kernel.py     the kernel
sizes.py      how its work is cut; tuned/ has measured sizes
"""
