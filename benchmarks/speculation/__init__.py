"""How many proposed tokens are accepted, what proposing costs the host, and what it is worth.

streams.py   prompts and outputs: stories of the demo model, edits of code
replay.py    a proposer beside streams that are known, and what it would have spared
__main__.py  the table: `python -m benchmarks.speculation`
draft.py     the demo with its draft model, beside plain decoding: `python -m benchmarks.speculation.draft`
"""
