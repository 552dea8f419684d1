"""Quantised checkpoints: as others publish them, and made here.

config.py              config.json -> which of the following it is
scheme.py              what a layout is, and what is read of it
patterns.py            what configs call modules -> rules
compressed_tensors.py  integers and float8 in many forms, of llm-compressor
awq.py                 4 bits in AWQ's order
gptq.py                4 and 8 bits, groups that may be listed
fp8.py                 float8 with scales of blocks, columns and tensors
mxfp4.py               gpt-oss's experts
rounding.py            weights -> fewer bits, while they are loaded
writing.py             weights -> a quantised checkpoint
leaf.py                tensors -> a leaf of the tree
weights.py             tensors -> the weights that they stand for
"""
