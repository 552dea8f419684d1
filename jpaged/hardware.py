"""Table of accelerators, used by plans, simulations and the sizing of a server, and the features of this processor.

| | HBM | for programs | bandwidth | peak | host link | other devices | source |
|---|---|---|---|---|---|---|---|
| a100-40gb | 40 GB | 38 GB | 1555 GB/s | 312 TFLOP/s | 32 GB/s (PCIe 4 x16) | 300 GB/s | NVIDIA A100 data sheet |
| a100-80gb | 80 GB | 76 GB | 2039 GB/s | 312 TFLOP/s | 32 GB/s | 300 GB/s | NVIDIA A100 data sheet (SXM) |
| b200 | 180 GB | 180.5 GB | 8000 GB/s | 2250 TFLOP/s | 64 GB/s | 900 GB/s | NVIDIA HGX B200 data sheet, an eighth |
| h100 | 80 GB | 80.75 GB | 3350 GB/s | 989 TFLOP/s | 64 GB/s | 450 GB/s | NVIDIA H100 data sheet (SXM) |
| h200 | 141 GB | 142.5 GB | 4800 GB/s | 989 TFLOP/s | 64 GB/s (PCIe 5 x16) | 450 GB/s | NVIDIA H200 data sheet (SXM) |
| l4 | 24 GB | 22.9 GB | 300 GB/s | 121 TFLOP/s | 32 GB/s | 32 GB/s (PCIe) | NVIDIA L4 data sheet |
| rtx3090 | 24 GB | 24.1 GB | 936 GB/s | 71 TFLOP/s | 32 GB/s | 32 GB/s (PCIe) | NVIDIA GA102 white paper |
| rtx5090 | 32 GB | 32.3 GB | 1792 GB/s | 209.5 TFLOP/s | 64 GB/s | 64 GB/s (PCIe) | NVIDIA RTX Blackwell white paper |
| tpu-v5e | 16 GB | 15.75 GiB | 819 GB/s | 197 TFLOP/s | 16 GB/s, assumed | 200 GB/s | Cloud TPU documentation |
| tpu-v5p | 95 GB | 95.74 GiB | 2765 GB/s | 459 TFLOP/s | 32 GB/s, assumed | 600 GB/s | Cloud TPU documentation |
| tpu-v6e | 32 GB | 31.25 GiB | 1638 GB/s | 918 TFLOP/s | 64 GB/s (PCIe 5) | 400 GB/s | Cloud TPU documentation |
| tpu7x | 96 GB | 94.75 GiB | 3690 GB/s | 1153.5 TFLOP/s | 32 GB/s, assumed | 300 GB/s | Cloud TPU documentation |

All numbers are per device as jax counts them: a TPU7x chip is two. Peaks are of bfloat16 without sparsity. Link
bandwidths are one way: half of the sheets' numbers for both (a v5e chip has 400 GB/s).

Memory has two numbers. Simulations use the data sheet's, like the paper. Plans use the memory that programs may use.
For a TPU it is the limit in libtpu's out-of-memory error, which is more than the sheet's number if that is in GiB. For
a GPU it is 0.95 (`GPU_MEMORY_SHARE`) of what the driver reports (`device/aot/*.txtpb`; 150 GB of an H200), or of the
sheet's number.

A GPU that is not in the table is estimated from what its client reports: multiprocessors and compute capability, with
the operations per cycle and the bandwidth per multiprocessor of `_GPU_GENERATIONS`, at 1.7 GHz. For the GPUs of the
table this differs by up to a factor of two.

Cycles of a TPU are converted to time by the clock. Those of v5e (1.5 GHz), v5p and v6e (1.75 GHz) follow from their
peaks and the multiplications per cycle of their matrix units. That of tpu7x (2.2 GHz) assumes the same number per cycle
as for v6e.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_GIB = 1 << 30
GPU_MEMORY_SHARE = 0.95
"""Share of a GPU's memory for JAX's allocator, unless the environment sets one. CUDA, code and graphs take the rest."""
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
        Hardware(
            *("a100-40gb", 40e9, 38_000_000_000, 1555e9, 312e12, 32e9, 300e9),
            kinds=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        ),
        Hardware("a100-80gb", 80e9, 76_000_000_000, 2039e9, 312e12, 32e9, 300e9, ("NVIDIA A100-SXM4-80GB",)),
        Hardware("b200", 180e9, 180_500_000_000, 8000e9, 2250e12, 64e9, 900e9, ("NVIDIA B200",), None, True),
        Hardware(
            "h100", 80e9, 80_750_000_000, 3350e9, 989e12, 64e9, 450e9, ("NVIDIA H100 80GB HBM3",), multiplies_fp8=True
        ),
        Hardware("h200", 141e9, 142_500_000_000, 4800e9, 989e12, 64e9, 450e9, ("NVIDIA H200",), None, True),
        Hardware("l4", 24e9, 22_895_000_000, 300e9, 121e12, 32e9, 32e9, ("NVIDIA L4",), None, True),
        Hardware("rtx3090", 24e9, 24_130_000_000, 936e9, 71e12, 32e9, 32e9, ("NVIDIA GeForce RTX 3090",)),
        Hardware(
            "rtx5090",
            32e9,
            32_300_000_000,
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


OTHER_HARDWARE: Mapping[str, Hardware] = {
    device.name: device
    for device in (
        Hardware("a10", 24e9, 22_800_000_000, 600e9, 125e12, 32e9, 32e9, ("NVIDIA A10",)),
        Hardware("a100-80gb-pcie", 80e9, 76_000_000_000, 1935e9, 312e12, 32e9, 32e9, ("NVIDIA A100 80GB PCIe",)),
        Hardware("b300", 288e9, 273_600_000_000, 8000e9, 2250e12, 64e9, 900e9, ("NVIDIA B300 SXM6 AC",), None, True),
        Hardware("gb200", 186e9, 176_700_000_000, 8000e9, 2500e12, 450e9, 900e9, ("NVIDIA GB200",), None, True),
        Hardware(
            *("gh200", 96e9, 91_200_000_000, 4000e9, 989e12, 450e9, 450e9),
            kinds=("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"),
            multiplies_fp8=True,
        ),
        Hardware("h100-nvl", 94e9, 89_300_000_000, 3900e9, 835e12, 64e9, 300e9, ("NVIDIA H100 NVL",), None, True),
        Hardware("h100-pcie", 80e9, 76_000_000_000, 2000e9, 756e12, 64e9, 64e9, ("NVIDIA H100 PCIe",), None, True),
        Hardware("h20", 96e9, 91_200_000_000, 4000e9, 148e12, 64e9, 450e9, ("NVIDIA H20",), None, True),
        Hardware("l40s", 48e9, 45_600_000_000, 864e9, 362e12, 32e9, 32e9, ("NVIDIA L40S",), None, True),
        Hardware("t4", 16e9, 15_200_000_000, 320e9, 65e12, 16e9, 16e9, ("Tesla T4",)),
        Hardware("tpu-v4", 32e9, 32_000_000_000, 1228e9, 275e12, 16e9, 300e9, ("TPU v4",)),
    )
}
"""Devices that nothing compiles for without them, so they have no plans. Numbers are those of data sheets."""


def find_hardware(device_kind: str) -> Hardware | None:
    """Return the properties of a device by jax's name for it; None if it is unknown."""
    return next(
        (device for device in (*HARDWARE.values(), *OTHER_HARDWARE.values()) if device_kind in device.kinds), None
    )


_GPU_GENERATIONS: Mapping[tuple[int, int], tuple[int, float]] = {
    (7, 0): (1024, 11e9),
    (7, 5): (1024, 8e9),
    (8, 0): (2048, 17e9),
    (8, 6): (1024, 9e9),
    (8, 9): (1024, 6e9),
    (9, 0): (4096, 28e9),
    (10, 0): (8192, 54e9),
    (12, 0): (1024, 10e9),
}
"""FLOP per cycle (16 bits) and bytes per second of memory, both per multiprocessor, by compute capability.

The tensor cores of GeForce cards sum in 32 bits at half of the rate.
"""
_GPU_CLOCK_HZ = 1.7e9
_FIRST_FP8 = (8, 9)
_FIRST_PCIE_5 = (9, 0)


def identify_hardware(device: object, usable_bytes: int = 0) -> Hardware | None:
    """Return the properties of a JAX device: those of the table, or an estimate for an unknown GPU.

    Args:
        device: one of JAX's, or an abstract one, which has no compute capability and so no estimate.
        usable_bytes: memory of an unknown GPU that programs may use, if it matters.

    Returns:
        None if the device is unknown, and reports no compute capability or no multiprocessors.
    """
    kind = str(getattr(device, "device_kind", ""))
    known = find_hardware(kind)
    if known is not None:
        return known
    capability = _parse_capability(getattr(device, "compute_capability", None))
    num_cores = getattr(device, "core_count", None)
    generation = max((one for one in _GPU_GENERATIONS if capability and one <= capability), default=None)
    if capability is None or generation is None or not num_cores:
        return None
    flops, bytes_per_s = _GPU_GENERATIONS[generation]
    host_bytes_per_s = 64e9 if capability >= _FIRST_PCIE_5 else 32e9
    return Hardware(
        name=kind,
        hbm_bytes=usable_bytes / GPU_MEMORY_SHARE,
        usable_bytes=usable_bytes,
        hbm_bytes_per_s=num_cores * bytes_per_s,
        flops=num_cores * flops * _GPU_CLOCK_HZ / (2 if "GeForce" in kind else 1),
        host_bytes_per_s=host_bytes_per_s,
        link_bytes_per_s=host_bytes_per_s,
        kinds=(kind,),
        multiplies_fp8=capability >= _FIRST_FP8,
    )


def _parse_capability(text: object) -> tuple[int, int] | None:
    """Parse a compute capability of CUDA, such as `9.0`; return None for anything else, such as ROCm's `gfx942`."""
    major, _, minor = str(text).partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


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
