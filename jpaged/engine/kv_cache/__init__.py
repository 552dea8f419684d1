"""KV memory of the engine: block ids and their bookkeeping; the contents are on the device.

interface.py     protocol that the scheduler requires of any KV memory
paged.py         paged memory: blocks on demand, shared, copied on write
blocks.py        free blocks, reference counts, block tables, and pending copies
eviction/        eviction order of free blocks: one policy per file
prefix_cache.py  prefix cache over the device pool and host memory
connector.py     KV connectors: protocol for third parties, and the guard around them
offload/         offload of cached prefixes: host memory, connectors, other servers
events.py        KV cache events: blocks stored and removed
swapper.py       preemption by swapping groups to host memory; prefetch from it for a waiting prompt
pinned.py        named prefixes that are never evicted
contiguous.py    baselines that reserve a contiguous run of blocks
"""
