"""Accelerators by their data sheets, and the assumptions that turn peaks into times.

| | HBM | bandwidth | 16-bit dense peak | host link, one way | source |
|---|---|---|---|---|---|
| a100-40gb | 40 GB | 1555 GB/s | 312 TFLOP/s | 32 GB/s (PCIe 4 x16) | NVIDIA A100 data sheet |
| a100-80gb | 80 GB | 2039 GB/s | 312 TFLOP/s | 32 GB/s | NVIDIA A100 data sheet (SXM) |
| h200 | 141 GB | 4800 GB/s | 989 TFLOP/s | 64 GB/s (PCIe 5 x16) | NVIDIA H200 data sheet (SXM, no sparsity) |
| tpu-v5e | 16 GB | 819 GB/s | 197 TFLOP/s | 16 GB/s, assumed | Cloud TPU documentation, v5e |
| tpu-v5p | 95 GB | 2765 GB/s | 459 TFLOP/s | 32 GB/s, assumed | Cloud TPU documentation, v5p |
| tpu-v6e | 32 GB | 1638 GB/s | 918 TFLOP/s | 64 GB/s (PCIe 5) | Cloud TPU documentation, v6e |

The rest is assumed, the same for all of them: see `Assumptions`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator; every number is of one device, in bytes, bytes per second and FLOP per second."""

    name: str
    hbm_bytes: float
    hbm_bytes_per_s: float
    flops: float
    host_bytes_per_s: float


HARDWARE = {
    device.name: device
    for device in (
        Hardware("a100-40gb", 40e9, 1555e9, 312e12, 32e9),
        Hardware("a100-80gb", 80e9, 2039e9, 312e12, 32e9),
        Hardware("h200", 141e9, 4800e9, 989e12, 64e9),
        Hardware("tpu-v5e", 16e9, 819e9, 197e12, 16e9),
        Hardware("tpu-v5p", 95e9, 2765e9, 459e12, 32e9),
        Hardware("tpu-v6e", 32e9, 1638e9, 918e12, 64e9),
    )
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What no data sheet says.

    Attributes:
        bandwidth_efficiency: of the HBM's peak, for weights and long runs of KV memory.
        flops_efficiency: of the peak, for the matrix products.
        host_link_efficiency: of the link's peak, for long transfers.
        step_overhead_s: host work and kernel launches of a step that do not overlap with the device.
        all_reduce_s: one all-reduce between the devices of one model; two a layer.
        transfer_latency_s: what a transfer over the host link costs besides its bytes. A block is 2 * num_layers
            transfers (its keys and its values in each layer), as in the system that the paper measured.
        half_rate_run_bytes: gathered KV memory is read at half the bandwidth when its consecutive run (one head's part
            of a block) has this many bytes: run / (run + this) of it. 942 makes blocks of 16 with heads of 128 slower
            by 23 percent than contiguous memory, the middle of the 20 to 26 that the PagedAttention paper measured of
            its kernel (section 7.1); that other sizes follow the same curve is assumed.
        memory_utilization: share of HBM for weights and KV pool where a pool is not given.
    """

    bandwidth_efficiency: float = 0.7
    flops_efficiency: float = 0.5
    host_link_efficiency: float = 0.8
    step_overhead_s: float = 0.005
    all_reduce_s: float = 20e-6
    transfer_latency_s: float = 5e-6
    half_rate_run_bytes: float = 942.0
    memory_utilization: float = 0.9
