"""How many proposed tokens are accepted, and what proposing costs the host.

streams.py   prompts and outputs: stories of the demo model, edits of code
replay.py    a proposer beside streams that are known, and what it would have spared
__main__.py  the table: `python -m benchmarks.speculation`
"""
