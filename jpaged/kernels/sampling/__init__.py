"""Sampling of tokens in one call, if one device has all logits.

rows.py     inputs and outputs of sampling; random numbers as a function of seed, sequence and position
cpu/        the kernel for CPUs: one row after the other, in one or two passes over its logits
tpu/        the kernel for TPUs: groups of rows, which are read once and stay on the chip

`jpaged.device.sampling` is the specification, and the fallback.
"""

from __future__ import annotations

from jpaged.config import Backend
from jpaged.kernels.sampling import cpu
from jpaged.kernels.sampling.rows import FedSamplingKernel, RowSampling, SampledTokens, SamplingKernel

__all__ = ["FedSamplingKernel", "RowSampling", "SampledTokens", "SamplingKernel", "choose_kernel"]


def choose_kernel(attention_backend: Backend, num_devices: int, vocab_size: int) -> SamplingKernel | None:
    """Return the kernel for logits on `num_devices` devices; None if XLA samples.

    It matches the attention backend: the CPU or TPU sampling kernel goes with that of attention.
    """
    if num_devices > 1:
        return None
    if attention_backend == "cpu":
        found = cpu.kernel()
        return None if isinstance(found, str) else found
    if attention_backend == "pallas-tpu":
        from jpaged.kernels.sampling.tpu import sampling as tpu  # imports Pallas

        return tpu.TpuSampling() if tpu.unsupported_reason(vocab_size) is None else None
    return None
