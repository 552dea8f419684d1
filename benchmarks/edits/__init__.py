"""What rows cost whose logits are changed before sampling, and what they cost a batch that has none.

worker.py    one process: decodes the demo model in the ways that it is told to, with the code of one tree
ways.py      what is asked for in each way
__main__.py  trees take turns, and the table: `python -m benchmarks.edits`
"""
