"""Quantized checkpoints: published ones, and those written by jpaged.

scheme.py              interface of a scheme, the matrix that it reads, and module patterns -> rules
compressed_tensors.py  integers and float8 in many forms, of llm-compressor
gptq.py                GPTQ: 4 and 8 bits, groups that may be listed; AWQ: 4 bits in its order
floats.py              float8 with scales of blocks, columns and tensors; MXFP4 experts of gpt-oss
leaf.py                tensors -> a leaf of the tree, quantized or dequantized
quantizer.py           quantization of weights at loading, and of a checkpoint
"""
