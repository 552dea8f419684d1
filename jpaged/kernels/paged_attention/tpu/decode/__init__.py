"""Attention of rows that decode, one query per row, on TPUs.

kernel.py  the kernel: one loop over all rows' chunks of keys
items.py   a chunk's blocks, fetched into a buffer; new keys and values, stored in the pool
stages.py  a chunk's arithmetic; conversion of queries and outputs between a tile of tokens and rows of heads
plan.py    the kernel's arguments and scratch memory
sizes.py   sizes of the work
"""
