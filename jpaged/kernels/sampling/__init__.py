"""Sampling of tokens in one call, where one device has all logits.

rows.py     what sampling takes and gives
choose.py   whether there is one for a device
noise.py    random numbers as a function of seed, sequence and position
cpu/        the kernel of CPUs: one row after the other, in one or two passes over its logits
tpu/        the kernel of TPUs: groups of rows, which are read once and stay on the chip

`jpaged.device.step.sampling` is the specification, and what runs everywhere else.
"""

from jpaged.kernels.sampling.choose import choose_kernel
from jpaged.kernels.sampling.rows import FedSamplingKernel, RowSampling, Sampled, SamplingKernel

__all__ = ["FedSamplingKernel", "RowSampling", "Sampled", "SamplingKernel", "choose_kernel"]
