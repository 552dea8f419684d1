"""Attention of rows of several queries, chunks of prompts, on TPUs.

kernel.py  the kernel: segments, their chunks of keys, and the pipeline
stages.py  a chunk's blocks, fetched into a buffer and unpacked, and the pipeline's three stages
plan.py    the kernel's arguments and scratch memory
sizes.py   sizes of the work
"""
