"""Compiles the GPU programs for an H200 on a machine without a GPU, and reads off what the compiler made of them.

`make aot-gpu`, or `python -m benchmarks.aot_gpu` where jax has its CUDA packages (about 5 GB; no GPU is needed).
"""
