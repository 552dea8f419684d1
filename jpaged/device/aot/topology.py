"""Compile-only GPU and TPU devices.

GPUs come from descriptions in the format of XLA's compiler. For TPUs, libtpu compiles on any Linux machine:

| generation | JAX's device kind | devices per chip |
|---|---|---|
| v5e | TPU v5 lite | 1 |
| v5p | TPU v5 | 1 |
| v6e | TPU v6 lite | 1 |
| tpu7x | TPU7x | 2 |

TPU topologies have libtpu's names: `v6e:2x4`, chips along each axis. Nothing here needs a device; only
`compile_only_devices` needs libtpu.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental import topologies

from jpaged.errors import InvalidArgument, Unsupported

GPUS = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.txtpb")))
"""Names of the GPUs with a description."""


def description(name: str) -> str:
    """Return the description of a GPU, one of `GPUS`."""
    return Path(__file__).with_name(f"{name}.txtpb").read_text(encoding="utf-8")


def device_kind(name: str) -> str:
    """Return JAX's device kind of a description, one of `GPUS`."""
    (kind,) = re.findall(r'^device_description_str: "(.+)"$', description(name), re.MULTILINE)
    return str(kind)


def compile_only_gpus(num_devices: int, name: str = "h200") -> list[jax.Device]:
    """Return GPUs of one machine that programs can only be lowered and compiled for.

    Args:
        num_devices: number of GPUs.
        name: the kind of GPU, one of `GPUS`.

    Raises:
        Unsupported: JAX has no CUDA packages in this Python.
    """
    try:
        topology = topologies.get_topology_desc(
            "", platform="cuda", target_config=description(name), topology=f"1x1x{num_devices}"
        )
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise Unsupported(
            f"{name}: this Python cannot compile for CUDA: {reason}: install jax's CUDA packages (`pip install "
            "'jax[cuda13]'`, or `make EXTRAS=cuda`; no GPU is needed)"
        ) from error
    devices: list[jax.Device] = topology.devices
    return devices


@dataclass(frozen=True, slots=True)
class TpuGeneration:
    """A TPU generation.

    Attributes:
        name: prefix of the topologies' names.
        device_kind: `jax.Device.device_kind`.
        devices_per_chip: JAX devices on one chip.
        max_host_chips: chips of the largest single-host slice.
    """

    name: str
    device_kind: str
    devices_per_chip: int
    max_host_chips: int


GENERATIONS: Mapping[str, TpuGeneration] = {
    generation.name: generation
    for generation in (
        TpuGeneration("v5e", "TPU v5 lite", 1, 8),
        TpuGeneration("v5p", "TPU v5", 1, 4),
        TpuGeneration("v6e", "TPU v6 lite", 1, 8),
        TpuGeneration("tpu7x", "TPU7x", 2, 4),
    )
}

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")


@dataclass(frozen=True, slots=True)
class Topology:
    """A slice of TPU chips.

    Attributes:
        name: `<generation>:<chips along each axis>`.
        generation: the TPU generation.
        shape: chips along each axis, two or three.
    """

    name: str
    generation: TpuGeneration
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """Number of devices, as JAX counts them."""
        return self.num_chips * self.generation.devices_per_chip

    @property
    def host_shape(self) -> tuple[int, int, int]:
        """Chips of one host along each axis: all of a small slice, 2x2 of a large one."""
        if self.num_chips <= self.generation.max_host_chips:
            x, y, z = (*self.shape, 1, 1)[:3]
            return x, y, z
        return 2, 2, 1


TOPOLOGIES: Mapping[str, Topology] = {
    f"{generation.name}:{shape}": Topology(
        f"{generation.name}:{shape}", generation, tuple(int(size) for size in shape.split("x"))
    )
    for generation in GENERATIONS.values()
    for shape in (_FLAT if generation.name in ("v5e", "v6e") else _CUBIC)
}


def find_topology(name: str) -> Topology:
    """Return the topology with this name.

    Raises:
        InvalidArgument: there is none; the message lists the known ones.
    """
    topology = TOPOLOGIES.get(name)
    if topology is None:
        raise InvalidArgument("topology", f"{name!r} is not known; known are {', '.join(TOPOLOGIES)}")
    return topology


def compile_only_devices(topology: Topology) -> list[jax.Device]:
    """Return devices that programs can only be lowered and compiled for; make a mesh of them.

    They need libtpu in this process, and JAX on another platform: see `compiler_environment`.

    Raises:
        Unsupported: libtpu is missing, or does not know the topology.
    """
    try:
        described = topologies.get_topology_desc(
            topology.name, platform="tpu", chips_per_host_bounds=list(topology.host_shape)
        )
    except RuntimeError as error:
        raise Unsupported(
            f"topology {topology.name}: this process cannot compile for it: {error} (libtpu is found through "
            "TPU_LIBRARY_PATH, which `make aot` sets, or as an installed package)"
        ) from error
    devices: list[jax.Device] = described.devices
    return devices


def find_library(chosen: Path | None) -> Path:
    """Return the libtpu.so to compile with: the chosen one, an installed package's, or that of `make aot`.

    Raises:
        Unsupported: there is none; the message explains how to get it.
    """
    package = importlib.util.find_spec("libtpu")
    candidates = [Path(sys.prefix) / "aot" / "libtpu" / "libtpu.so"]
    if package is not None and package.origin is not None:
        candidates.insert(0, Path(package.origin).parent / "libtpu.so")
    for path in candidates if chosen is None else [chosen]:
        if path.is_file():
            return path
    where = "" if chosen is None else f" at {chosen} (TPU_LIBRARY_PATH)"
    raise Unsupported(
        f"libtpu, which compiles for TPUs, was not found{where}: install it with `pip install libtpu` or `make aot`, "
        "or set TPU_LIBRARY_PATH to a libtpu.so"
    )


def compiler_environment(library: Path) -> dict[str, str]:
    """Return the environment of a process that compiles for TPUs with this libtpu.so while JAX runs on the CPU."""
    return {
        "TPU_LIBRARY_PATH": str(library),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # otherwise libtpu queries a metadata server for minutes
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
