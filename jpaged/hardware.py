"""Table of accelerators, used by plans, simulations and the sizing of a server, and the features of this processor.

| | HBM | for programs | bandwidth | peak | host link | other devices | source |
|---|---|---|---|---|---|---|---|
| a100-40gb | 40 GB | 30 GB | 1555 GB/s | 312 TFLOP/s | 32 GB/s (PCIe 4 x16) | 300 GB/s | NVIDIA A100 data sheet |
| a100-80gb | 80 GB | 60 GB | 2039 GB/s | 312 TFLOP/s | 32 GB/s | 300 GB/s | NVIDIA A100 data sheet (SXM) |
| b200 | 180 GB | 142.5 GB | 8000 GB/s | 2250 TFLOP/s | 64 GB/s | 900 GB/s | NVIDIA HGX B200 data sheet, an eighth |
| h100 | 80 GB | 63.75 GB | 3350 GB/s | 989 TFLOP/s | 64 GB/s | 450 GB/s | NVIDIA H100 data sheet (SXM) |
| h200 | 141 GB | 112.5 GB | 4800 GB/s | 989 TFLOP/s | 64 GB/s (PCIe 5 x16) | 450 GB/s | NVIDIA H200 data sheet (SXM) |
| l4 | 24 GB | 18 GB | 300 GB/s | 121 TFLOP/s | 32 GB/s | 32 GB/s (PCIe) | NVIDIA L4 data sheet |
| rtx3090 | 24 GB | 19 GB | 936 GB/s | 71 TFLOP/s | 32 GB/s | 32 GB/s (PCIe) | NVIDIA GA102 white paper |
| rtx5090 | 32 GB | 25.5 GB | 1792 GB/s | 209.5 TFLOP/s | 64 GB/s | 64 GB/s (PCIe) | NVIDIA RTX Blackwell white paper |
| tpu-v5e | 16 GB | 15.75 GiB | 819 GB/s | 197 TFLOP/s | 16 GB/s, assumed | 200 GB/s | Cloud TPU documentation |
| tpu-v5p | 95 GB | 95.74 GiB | 2765 GB/s | 459 TFLOP/s | 32 GB/s, assumed | 600 GB/s | Cloud TPU documentation |
| tpu-v6e | 32 GB | 31.25 GiB | 1638 GB/s | 918 TFLOP/s | 64 GB/s (PCIe 5) | 400 GB/s | Cloud TPU documentation |
| tpu7x | 96 GB | 94.75 GiB | 3690 GB/s | 1153.5 TFLOP/s | 32 GB/s, assumed | 300 GB/s | Cloud TPU documentation |

All numbers are per device as jax counts them: a TPU7x chip is two. Peaks are of bfloat16 without sparsity. Link
bandwidths are one way: half of the sheets' numbers for both (a v5e chip has 400 GB/s).

Memory has two numbers. Simulations use the data sheet's, like the paper. Plans use the memory that programs may use.
For a TPU it is the limit in libtpu's out-of-memory error, which is more than the sheet's number if that is in GiB. For
a GPU it is three quarters (jax's default) of what the driver reports (`device/aot/*.txtpb`; 150 GB of an H200), or of
the sheet's number.

Cycles of a TPU are converted to time by the clock. Those of v5e (1.5 GHz), v5p and v6e (1.75 GHz) follow from their
peaks and the multiplications per cycle of their matrix units. That of tpu7x (2.2 GHz) assumes the same number per cycle
as for v6e.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_GIB = 1 << 30
_CPU_INFO = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator; every number is of one device, in bytes, bytes per second and FLOP per second.

    Attributes:
        hbm_bytes: memory by the data sheet.
        usable_bytes: memory that programs may use.
        hbm_bytes_per_s: peak memory bandwidth.
        flops: peak of bfloat16 matrix multiplication; GPUs multiply float16 as fast.
        host_bytes_per_s: bandwidth to host memory, one way.
        link_bytes_per_s: bandwidth to other devices over all links together, one way.
        kinds: jax's names of the device.
        clock_hz: clock for cycle counts; None if nothing is counted in cycles.
        multiplies_fp8: its matrix units support 8-bit floats (NVIDIA's since Ada, TPUs since Ironwood).
    """

    name: str
    hbm_bytes: float
    usable_bytes: int
    hbm_bytes_per_s: float
    flops: float
    host_bytes_per_s: float
    link_bytes_per_s: float
    kinds: tuple[str, ...] = ()
    clock_hz: float | None = None
    multiplies_fp8: bool = False

    @property
    def ridge_tokens(self) -> float:
        """Tokens per step at which 16-bit matrix multiplication takes as long as reading the weights."""
        return self.flops / self.hbm_bytes_per_s


HARDWARE: Mapping[str, Hardware] = {
    device.name: device
    for device in (
        Hardware("a100-40gb", 40e9, 30_000_000_000, 1555e9, 312e12, 32e9, 300e9, ("NVIDIA A100-SXM4-40GB",)),
        Hardware("a100-80gb", 80e9, 60_000_000_000, 2039e9, 312e12, 32e9, 300e9, ("NVIDIA A100-SXM4-80GB",)),
        Hardware("b200", 180e9, 142_500_000_000, 8000e9, 2250e12, 64e9, 900e9, ("NVIDIA B200",), None, True),
        Hardware(
            "h100", 80e9, 63_750_000_000, 3350e9, 989e12, 64e9, 450e9, ("NVIDIA H100 80GB HBM3",), multiplies_fp8=True
        ),
        Hardware("h200", 141e9, 112_500_000_000, 4800e9, 989e12, 64e9, 450e9, ("NVIDIA H200",), None, True),
        Hardware("l4", 24e9, 18_000_000_000, 300e9, 121e12, 32e9, 32e9, ("NVIDIA L4",), None, True),
        Hardware("rtx3090", 24e9, 19_000_000_000, 936e9, 71e12, 32e9, 32e9, ("NVIDIA GeForce RTX 3090",)),
        Hardware(
            "rtx5090",
            32e9,
            25_500_000_000,
            1792e9,
            209.5e12,
            64e9,
            64e9,
            ("NVIDIA GeForce RTX 5090",),
            multiplies_fp8=True,
        ),
        Hardware("tpu-v5e", 16e9, int(15.75 * _GIB), 819e9, 197e12, 16e9, 200e9, ("TPU v5 lite", "TPU v5e"), 1.5e9),
        Hardware("tpu-v5p", 95e9, int(95.74 * _GIB), 2765e9, 459e12, 32e9, 600e9, ("TPU v5", "TPU v5p"), 1.75e9),
        Hardware("tpu-v6e", 32e9, int(31.25 * _GIB), 1638e9, 918e12, 64e9, 400e9, ("TPU v6 lite", "TPU v6e"), 1.75e9),
        Hardware("tpu7x", 96e9, int(94.75 * _GIB), 7380e9 / 2, 2307e12 / 2, 32e9, 600e9 / 2, ("TPU7x",), 2.2e9, True),
    )
}


def find_hardware(device_kind: str) -> Hardware | None:
    """Return the properties of a device by jax's name for it; None if it is not in the table."""
    return next((device for device in HARDWARE.values() if device_kind in device.kinds), None)


def multiplies_bfloat16(cpu_info: Path = _CPU_INFO) -> bool:
    """Return True if this machine's processor has instructions that multiply bfloat16 (AVX512_BF16 or AMX).

    Args:
        cpu_info: Linux's list of processors; other systems have none.
    """
    try:
        lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return not _BFLOAT16_FLAGS.isdisjoint(flags.split())
