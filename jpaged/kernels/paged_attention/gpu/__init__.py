"""Paged attention on Hopper GPUs, in Pallas Mosaic GPU.

attention.py  the call
kernel.py     the kernel
work.py       the list of what it does
tiling.py     how its work is cut
"""
