"""Sampling of tokens in one call, if one device has all logits.

rows.py     inputs and outputs of sampling
choose.py   choice of the kernel for a device
noise.py    random numbers as a function of seed, sequence and position
cpu/        the kernel for CPUs: one row after the other, in one or two passes over its logits
tpu/        the kernel for TPUs: groups of rows, which are read once and stay on the chip

`jpaged.device.sampling` is the specification, and the fallback.
"""

from jpaged.kernels.sampling.choose import choose_kernel
from jpaged.kernels.sampling.rows import FedSamplingKernel, RowSampling, SampledTokens, SamplingKernel

__all__ = ["FedSamplingKernel", "RowSampling", "SampledTokens", "SamplingKernel", "choose_kernel"]
