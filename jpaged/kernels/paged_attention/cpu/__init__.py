"""Paged attention on CPUs: a C++ kernel that XLA calls as a foreign function.

attention.py  the call; core.cc has the arithmetic, kernel.cc distributes the work
"""
