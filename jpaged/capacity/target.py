"""Where a plan is for: a slice of TPUs or some GPUs, with what each device has.

| | devices | names |
|---|---|---|
| TPU | all of a slice; jax counts two on a chip of tpu7x | as libtpu has them: `v6e:2x4` |
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
        family: what prices are named by: the generation, or the GPU.
        platform: whose compiler it takes, `tpu` or `cuda`.
        num_devices: as jax counts them.
        num_chips: as they are paid for.
        hardware: what each device has.
        shape: devices along each axis; a message passes all of an axis.
    """

    name: str
    family: str
    platform: str
    num_devices: int
    num_chips: int
    hardware: Hardware
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
            name, chip.name, "tpu", topology.num_devices, topology.num_chips, _FAMILIES[chip.name], topology.shape
        )
    family, _, count = name.partition(":")
    if family in GPUS and (count or "1") in map(str, range(1, _MAX_GPUS + 1)):
        num_devices = int(count or "1")
        return Target(name, family, "cuda", num_devices, num_devices, _hardware(family), (num_devices,))
    raise InvalidArgument(
        "topology",
        f"{name!r} is not known; known are {', '.join(GPUS)}, each with :1 to :{_MAX_GPUS} behind it, and "
        f"{', '.join(TOPOLOGIES)}",
    )


def _hardware(gpu: str) -> Hardware:
    """The numbers of a GPU whose description is there to compile for."""
    found = find_hardware(device_kind(gpu))
    if found is None:
        raise InternalError(f"{gpu} is described as {device_kind(gpu)!r}, which is not in the table of hardware")
    return found
