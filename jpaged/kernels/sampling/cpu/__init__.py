"""The CPU kernel of sampling: core.cc samples a row, kernel.cc says which thread samples which rows.

sampling.py  the call, and whether there is a library for it
feed.py      masks that a program which runs is given by the host; feed.h is its side of it
row.h        a row and the pass over it
floors.h     what truncation leaves of it
noise.h      what is drawn of that
"""
