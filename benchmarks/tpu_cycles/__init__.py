"""Counts the cycles of the TPU attention kernels off the programs that libtpu compiles, without a TPU.

__main__.py    the command: the table beside the memory's cycles, and what is recorded
cases.py       which calls are counted, and on which memory
count.py       the process that compiles and counts them
experts.py     the same for the kernel of experts: its cases, counts and table
counting.py    starts that process with a libtpu
operands.py    what a kernel is called with
program.py     libtpu's final bundles, and the jumps between them
machine.py     runs a program's scalar side: how often which bundles run, and when blocks arrive
regions.py     what a part of a program does
recorded.py    what was counted before, and what is worse or better now
table.py       the results in words
"""
