"""Quantized checkpoints: published ones, and those written by jpaged.

scheme.py              interface of a scheme, the matrix that it reads, and module patterns -> rules
compressed_tensors.py  integers and float8 in many forms, of llm-compressor
awq.py                 4 bits in AWQ's order
gptq.py                4 and 8 bits, groups that may be listed
fp8.py                 float8 with scales of blocks, columns and tensors
mxfp4.py               gpt-oss's experts
leaf.py                tensors -> a leaf of the tree, quantized or dequantized
quantizer.py           quantization of weights at loading, and of a checkpoint
"""
