"""Choice of the sampling kernel."""

from __future__ import annotations

from jpaged.config import Backend
from jpaged.kernels.sampling.cpu import sampling as cpu
from jpaged.kernels.sampling.rows import SamplingKernel


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
