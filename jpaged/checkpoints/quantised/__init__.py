"""Quantized checkpoints: published ones, and those written by jpaged.

config.py              config.json -> one of the following schemes
scheme.py              interface of a scheme, and the matrix that it reads
patterns.py            module patterns of configs -> rules
compressed_tensors.py  integers and float8 in many forms, of llm-compressor
awq.py                 4 bits in AWQ's order
gptq.py                4 and 8 bits, groups that may be listed
fp8.py                 float8 with scales of blocks, columns and tensors
mxfp4.py               gpt-oss's experts
rounding.py            quantization of weights at loading
writing.py             quantization of a checkpoint
leaf.py                tensors -> a leaf of the tree
weights.py             tensors -> dequantized weights
"""
