"""Kernels of CPUs against what XLA makes of the same.

attention.py  paged attention
sampling.py   tokens of logits
"""
