"""Matmuls of groups of rows with a matrix each on GPUs since Ampere, in Pallas Triton.

form.py     compile-time form of a matmul: a matrix, its rows, and sizes of the work
tiles.py    rows sorted by matrix in tiles of one matrix each
grouped.py  the calls: rows of several matrices, and of one whose numbers share scales in groups
kernel.py   the kernel
"""
