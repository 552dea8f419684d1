"""Attention of rows of several queries, chunks of prompts, on TPUs.

call.py    what the kernel reads, made by XLA, and where its results go
kernel.py  the kernel: segments, their chunks of keys, and the pipeline
keys.py    a chunk's blocks, fetched into a buffer and taken apart
stages.py  the pipeline's three stages
plan.py    what the kernel is given and keeps
sizes.py   how its work is cut
"""
