"""Queries, keys and values out of their one projection, turned by their angles.

tpu.py   the kernel for TPUs; elsewhere `jpaged.models.rope` in XLA, or the kernel of products on CPUs
"""
