"""Paged attention on GPUs of any generation since Ampere, in Pallas Triton.

attention.py  the call
work.py       sizes and list of the work
kernel.py     the kernels
"""
