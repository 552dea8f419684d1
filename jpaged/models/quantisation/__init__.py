"""Which of a model's matrices are quantised.

rules.py    a description, by the names of modules in a checkpoint
formats.py  the format of each leaf
tree.py     what becomes of the tree of parameters
"""
