"""Kernels of CPUs against what XLA makes of the same.

attention.py  paged attention
sampling.py   tokens of logits
products.py   products with quantized matrices, beside those with bfloat16
experts.py    bytes of weights that a row of a mixture of experts reads
lora.py       tokens a second of rows with adapters, and without
streams.py    tokens a second of one stream, of weights of bfloat16 and fewer bits
"""
