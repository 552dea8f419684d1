"""Paged attention on GPUs of any generation since Ampere, in Pallas Triton.

attention.py  the call
work.py       how its work is cut
kernel.py     the kernels
"""
