"""Which kernel samples, if any."""

from __future__ import annotations

from jpaged.config import Backend
from jpaged.kernels.sampling.cpu import sampling as cpu
from jpaged.kernels.sampling.rows import SamplingKernel
from jpaged.kernels.sampling.tpu import sampling as tpu


def choose_kernel(attention_backend: Backend, num_devices: int, vocab_size: int) -> SamplingKernel | None:
    """The kernel for logits that lie on so many devices; None where XLA samples.

    It goes with the attention: where that runs for CPUs or TPUs, so does this.
    """
    if num_devices > 1:
        return None
    if attention_backend == "cpu":
        found = cpu.kernel()
        return None if isinstance(found, str) else found
    if attention_backend == "pallas-tpu" and tpu.unsupported_reason(vocab_size) is None:
        return tpu.TpuSampling()
    return None
