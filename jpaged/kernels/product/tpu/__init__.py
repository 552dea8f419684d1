"""The kernel of TPUs: rows times matrices whose numbers share scales in groups.

grouped.py  the calls: rows of several matrices, and rows of one
form.py     which matrices it takes, in which blocks
kernel.py   the kernel
"""
