"""Sampling of tokens on CPUs, one row after the other in one or two passes over its logits.

kernel.py  the call, and whether there is a kernel for it
cpu/       the kernel

`jpaged.device.step.sampling` is the specification, and what runs everywhere else.
"""

from jpaged.kernels.sampling.kernel import RowInputs, RowOutputs, SamplingKernel, choose_kernel, kernel

__all__ = ["RowInputs", "RowOutputs", "SamplingKernel", "choose_kernel", "kernel"]
