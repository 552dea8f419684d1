"""Paged attention on CPUs: a C++ kernel behind XLA's foreign functions.

attention.py  the call; core.cc has the arithmetic, kernel.cc what is computed where
"""
