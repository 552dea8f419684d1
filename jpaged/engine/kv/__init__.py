"""KV memory as the engine sees it: blocks by number; their contents are the device's.

interface.py     what the scheduler asks of any memory
block_pool.py    which blocks are free, and who holds the others
prefix_cache.py  which blocks hold which prefix
paged.py         paged memory: blocks on demand, shared, found again, swapped
contiguous.py    the baselines that reserve a run of blocks
pinned.py        prefixes that stay, by name
transfers.py     what the device has to move before a step
"""
