"""The CPU kernel of experts: core.cc gates and sums rows, kernel.cc says what is multiplied where.

experts.py  the call, and whether there is a library for it

The products are those of `jpaged.kernels.product`, whose cores it calls.
"""
