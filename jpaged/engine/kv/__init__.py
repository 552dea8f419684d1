"""KV memory as the engine sees it: blocks by number; their contents are the device's.

interface.py     what the scheduler asks of any memory
paged.py         paged memory: blocks on demand, shared, copied when written
needs.py         how many blocks groups need
blocks.py        which blocks are free, who holds the others, what has to be moved
eviction/        which free block is given up first: a policy is a file
prefixes.py      which blocks hold which prefix, here and in host memory
tiers/           where prefixes go that the device's pool gives up
prefix_cache.py  key -> block, and the longest prefix that can be used
changes.py       what blocks begin and cease to hold, for directories
outgrowing.py   sequences that outgrow their keys, and begin again
aside.py         blocks that nobody may have
windows.py       takes back what no later query of a sequence sees
swapping.py      groups in host memory
pinned.py        prefixes that stay, by name
contiguous.py    the baselines that reserve a run of blocks
"""
