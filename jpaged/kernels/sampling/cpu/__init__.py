"""The CPU kernel of sampling: core.cc samples a row, kernel.cc distributes rows over threads.

sampling.py  the call, and the check for a library
feed.py      masks that the host supplies to a running program; feed.h is the program's side
row.h        a row and the pass over it
floors.h     truncation of a row
noise.h      the draw from the remaining tokens
"""
