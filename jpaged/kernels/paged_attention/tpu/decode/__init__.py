"""Attention of rows that decode, one query a row, on TPUs.

call.py    what the kernel reads, made by XLA, and where its results go
kernel.py  the kernel: one loop over all rows' chunks of keys
tokens.py  queries of a tile of tokens taken apart, outputs put together
items.py   a chunk's blocks, fetched into a buffer
stages.py  a chunk's arithmetic
plan.py    what the kernel is given and keeps
sizes.py   how its work is cut
"""
