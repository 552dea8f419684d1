"""Paged attention on Hopper GPUs, in Pallas Mosaic GPU.

attention.py  the call
kernel.py     the kernel
work.py       the list of work items, and sizes of tiles, chunks and parts
"""
