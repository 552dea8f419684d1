"""Matmuls of groups of rows with a matrix each on GPUs since Ampere, in Pallas Triton or in CUDA C++.

form.py     compile-time form of a matmul: a matrix, its rows in tiles, and sizes of the work
grouped.py  the calls: rows of several matrices, and of one whose numbers share scales in groups
kernel.py   the kernel of Pallas Triton
"""
