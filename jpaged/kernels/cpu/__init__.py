"""The C++ library of the CPU kernels, which XLA calls as foreign functions.

build.py     compilation
library.py   loading and registration
numbers.h    conversion of stored numbers
vector.h     vectors of the width that a core is compiled for
processor.h  detection of processor features
merges.cc    pairs of tokens that form tokens
tasks.h      distribution of a call's tasks over the caller and XLA's threads
recurrence/  matrices of recurrent states, for kernels/recurrence.py
"""
