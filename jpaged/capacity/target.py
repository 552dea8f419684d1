"""Target of a plan: a TPU slice or some GPUs, and the hardware of each device.

| | devices | names |
|---|---|---|
| TPU | all of a slice; jax counts two on a chip of tpu7x | as in libtpu: `v6e:2x4` |
| GPU | some of one machine | `h200`, `a100:8` |
"""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.device.aot.gpu import GPUS, device_kind
from jpaged.device.aot.tpu import TOPOLOGIES
from jpaged.errors import InternalError, InvalidArgument
from jpaged.hardware import HARDWARE, Hardware, find_hardware

_MAX_GPUS = 8
_FAMILIES = {name.removeprefix("tpu-"): device for name, device in HARDWARE.items()}


@dataclass(frozen=True, slots=True)
class Target:
    """Devices of one kind.

    Attributes:
        name: as the user writes it.
        family: key of prices: the generation, or the GPU.
        platform: platform of the compiler, `tpu` or `cuda`.
        num_devices: as jax counts them.
        num_chips: as they are billed.
        hardware: data of each device.
        shape: devices along each axis; a message passes all devices of an axis.
    """

    name: str
    family: str
    platform: str
    num_devices: int
    num_chips: int
    hardware: Hardware
    shape: tuple[int, ...]


def find_target(name: str) -> Target:
    """Return the target of a name.

    Raises:
        InvalidArgument: the name is unknown; the message lists the known ones.
    """
    topology = TOPOLOGIES.get(name)
    if topology is not None:
        chip = topology.generation
        return Target(
            name, chip.name, "tpu", topology.num_devices, topology.num_chips, _FAMILIES[chip.name], topology.shape
        )
    family, _, count = name.partition(":")
    if family in GPUS and (count or "1") in map(str, range(1, _MAX_GPUS + 1)):
        num_devices = int(count or "1")
        return Target(name, family, "cuda", num_devices, num_devices, _hardware(family), (num_devices,))
    raise InvalidArgument(
        "topology",
        f"{name!r} is not known; known are {', '.join(GPUS)}, each with an optional suffix :1 to :{_MAX_GPUS}, and "
        f"{', '.join(TOPOLOGIES)}",
    )


def _hardware(gpu: str) -> Hardware:
    """Return the hardware of a GPU that can be compiled for."""
    found = find_hardware(device_kind(gpu))
    if found is None:
        raise InternalError(f"{gpu} reports itself as {device_kind(gpu)!r}, which is not in the hardware table")
    return found
