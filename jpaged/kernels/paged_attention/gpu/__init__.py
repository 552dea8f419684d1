"""Paged attention on Hopper GPUs, in Pallas Mosaic GPU.

attention.py  the call
kernel.py     the kernel
tiling.py     how its work is cut
"""
