"""Eviction order of free blocks in each memory tier: one policy per file.

policy.py      protocol of an eviction policy
free_list.py   free list of a tier: empty slots first, then in the order of a policy
policies.py    registry from policy name to free list
lru.py         least recently used
lfu.py         least frequently used
two_queues.py  2Q: blocks seen once pass through a short queue
worth.py       cost-aware: expected seconds saved per slot, learned and measured
reuse.py       reuse probability of blocks, by class and age
lots.py        buckets of free blocks with about the same worth
costs.py       cost of getting a block back
"""
