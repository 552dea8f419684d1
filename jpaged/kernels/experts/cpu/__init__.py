"""The CPU kernel of experts: core.cc gates and sums rows, kernel.cc distributes the matmuls.

experts.py  the call, and the check for a library

The matmuls are those of `jpaged.kernels.matmul`, whose cores it calls.
"""
