"""Paged attention on TPUs, in Pallas Mosaic.

attention.py  the calls, for rows that decode and for chunks of prompts
lists.py      lists of queries and their keys, built once per step
decode/       the kernel for rows that decode
chunks/       the kernel for chunks of prompts
tables.py     block tables, of which pages are copied into scalar memory
words.py      a buffer of blocks as words, and the numbers in them
sizes.py      sizes of both kernels; tuned/ has measured ones
"""
