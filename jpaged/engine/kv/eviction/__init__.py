"""Which free block is given up first, in each tier of memory: a policy is a file.

policy.py      what a policy is told and asked
free_list.py   the free list of a tier: what holds nothing goes first, then as a policy says
policies.py    the name of a policy -> a free list by it
lru.py         least recently used
lfu.py         least frequently used
two_queues.py  what was seen once passes through a short queue
worth.py       what a block's place would save, by what is learnt and measured
reuse.py       how likely blocks are needed again, by class and age
lots.py        free blocks that are worth the same
costs.py       what it costs to have a block again
"""
