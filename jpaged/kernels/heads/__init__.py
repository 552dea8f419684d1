"""Splitting of the QKV projection into queries, keys and values, and their rotation.

tpu.py   the kernel for TPUs; elsewhere `jpaged.models.rope` in XLA, or the matmul kernel on CPUs
"""
