"""Quantization of a model's matrices.

rules.py    rules over the names of modules in a checkpoint
formats.py  the format of each leaf
tree.py     the parameter tree with quantized matrices
"""
