"""Eviction order of free blocks in each memory tier: one policy per file.

free_list.py   free list of a tier: empty slots first, then in the order of a policy
policies.py    registry from policy name to free list
cost_aware.py  cost-aware: expected seconds saved per slot, learned and measured
"""
