"""Where a plan is for: a slice of TPUs or some GPUs, with what each device has.

| | devices | names |
|---|---|---|
| TPU | all of a slice; jax counts two on a chip of tpu7x | as libtpu has them: `v6e:2x4` |
| H200 | GPUs of one machine, joined by NVLink | `h200`, `h200:8` |

TPU numbers are those of `jpaged.device.aot.tpu`, H200's of NVIDIA's data sheet: 4.8 TB/s, 989 TFLOP/s in bfloat16
without sparsity, and 900 GB/s of NVLink in both directions together.
"""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.device.aot.gpu import H200_HBM_BYTES
from jpaged.device.aot.tpu import TOPOLOGIES
from jpaged.errors import InvalidArgument

_MAX_GPUS = 8


@dataclass(frozen=True, slots=True)
class Target:
    """Devices of one kind; rates are of one of them.

    Attributes:
        name: as the user writes it.
        family: what prices are named by: the generation, or the GPU.
        platform: whose compiler it takes, `tpu` or `cuda`.
        num_devices: as jax counts them.
        num_chips: as they are paid for.
        hbm_bytes: that programs may use.
        hbm_bytes_per_s: peak.
        flops: peak of bfloat16 products.
        link_bytes_per_s: to the other devices, one way.
        shape: devices along each axis; a message passes all of an axis.
    """

    name: str
    family: str
    platform: str
    num_devices: int
    num_chips: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    shape: tuple[int, ...]


def find_target(name: str) -> Target:
    """The target of a name.

    Raises:
        InvalidArgument: there is none; the message lists those that are known.
    """
    topology = TOPOLOGIES.get(name)
    if topology is not None:
        chip = topology.generation
        return Target(
            name=name,
            family=chip.name,
            platform="tpu",
            num_devices=topology.num_devices,
            num_chips=topology.num_chips,
            hbm_bytes=chip.hbm_bytes,
            hbm_bytes_per_s=chip.hbm_bytes_per_s,
            flops=chip.flops,
            link_bytes_per_s=chip.link_bytes_per_s,
            shape=topology.shape,
        )
    family, _, count = name.partition(":")
    if family == "h200" and (count or "1") in map(str, range(1, _MAX_GPUS + 1)):
        num_devices = int(count or "1")
        return Target(
            name, family, "cuda", num_devices, num_devices, H200_HBM_BYTES, 4800e9, 989e12, 450e9, (num_devices,)
        )
    raise InvalidArgument(
        "topology", f"{name!r} is not known; known are h200, h200:1 to h200:{_MAX_GPUS}, {', '.join(TOPOLOGIES)}"
    )
