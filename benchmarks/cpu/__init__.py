"""Kernels of CPUs against what XLA makes of the same.

attention.py  paged attention
sampling.py   tokens of logits
products.py   products with quantised matrices, beside those with bfloat16
streams.py    tokens a second of one stream, of weights of bfloat16 and fewer bits
"""
