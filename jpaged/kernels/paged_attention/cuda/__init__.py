"""Paged attention on GPUs since Ampere, in CUDA C++ that XLA calls as a foreign function.

attention.py  the call, and the list of work items
kernel.cu     the kernels, of the library of `jpaged/kernels/cuda_library.py`
"""
