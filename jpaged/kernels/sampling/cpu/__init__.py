"""The CPU kernel of sampling: core.cc samples a row, kernel.cc says which thread samples which rows.

row.h     a row and the pass over it
floors.h  what truncation leaves of it
noise.h   what is drawn of that
"""
