"""Paged attention on TPUs, in Pallas Mosaic.

attention.py  the calls, for rows that decode and for chunks of prompts
lists.py      which queries meet which keys, once a step
decode/       the kernel for rows that decode
chunks/       the kernel for chunks of prompts
store.py      new keys and values, stored by a kernel
tables.py     block tables, of which pages come into scalar memory
words.py      a buffer of blocks as words, and the numbers in them
sizes.py      what both kernels' sizes come from; tuned/ has measured ones
"""
