"""The kernel for TPUs: rows times matrices whose numbers share scales in groups.

grouped.py  the calls: rows of several matrices, and rows of one
form.py     supported matrices, and block sizes
kernel.py   the kernel
"""
