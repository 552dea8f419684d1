"""Accelerators that programs are compiled for without having them: libtpu compiles on any Linux machine.

| generation | jax calls it | devices a chip | HBM for programs | VMEM | peak bf16 | HBM bandwidth |
|---|---|---|---|---|---|---|
| v5e | TPU v5 lite | 1 | 15.75 GiB | 128 MiB | 197 TFLOP/s | 819 GB/s |
| v5p | TPU v5 | 1 | 95.74 GiB | 64 MiB | 459 TFLOP/s | 2765 GB/s |
| v6e | TPU v6 lite | 1 | 31.25 GiB | 128 MiB | 918 TFLOP/s | 1638 GB/s |
| tpu7x | TPU7x | 2 | 94.75 GiB | 64 MiB | 1153.5 TFLOP/s | 3690 GB/s |

All numbers are of one device as jax counts them: a TPU7x chip is two. HBM is what libtpu's compiler says that a program
may use (its out-of-memory error; the chip has a little more), VMEM what jax.experimental.pallas.tpu.get_tpu_info knows,
peak and bandwidth are of Cloud TPU's documentation. A topology is named as libtpu names it: `v6e:2x4`, chips along each
axis. Nothing here needs a device; only `compile_only_devices` needs libtpu.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental import topologies

from jpaged.errors import InvalidArgument, Unsupported

_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True)
class Generation:
    """A kind of TPU; every number is of one device, in bytes, bytes per second and FLOP per second.

    Attributes:
        name: as topologies begin.
        device_kind: as `jax.Device.device_kind` has it.
        devices_per_chip: jax devices on one chip.
        hbm_bytes: what programs may use.
        vmem_bytes: memory beside the compute units.
        flops: peak of bfloat16 products.
        hbm_bytes_per_s: peak.
        max_host_chips: chips of the largest machine that is one host.
        link_bytes_per_s: over all links between chips together, one way: half of what Cloud TPU's documentation gives
            as a chip's bandwidth in both directions (v5e 400, v5p 1200, v6e 800, tpu7x 1200 GB/s).
    """

    name: str
    device_kind: str
    devices_per_chip: int
    hbm_bytes: int
    vmem_bytes: int
    flops: float
    hbm_bytes_per_s: float
    max_host_chips: int
    link_bytes_per_s: float


GENERATIONS: Mapping[str, Generation] = {
    generation.name: generation
    for generation in (
        Generation("v5e", "TPU v5 lite", 1, int(15.75 * _GIB), 128 * _MIB, 197e12, 819e9, 8, 200e9),
        Generation("v5p", "TPU v5", 1, int(95.74 * _GIB), 64 * _MIB, 459e12, 2765e9, 4, 600e9),
        Generation("v6e", "TPU v6 lite", 1, int(31.25 * _GIB), 128 * _MIB, 918e12, 1638e9, 8, 400e9),
        Generation("tpu7x", "TPU7x", 2, int(94.75 * _GIB), 64 * _MIB, 2307e12 / 2, 7380e9 / 2, 4, 600e9 / 2),
    )
}

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")


@dataclass(frozen=True, slots=True)
class Topology:
    """A slice of TPU chips.

    Attributes:
        name: `<generation>:<chips along each axis>`.
        generation: of its chips.
        shape: chips along each axis, two or three.
    """

    name: str
    generation: Generation
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """As jax counts them."""
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
    """The topology of a name.

    Raises:
        InvalidArgument: there is none; the message lists those that are known.
    """
    topology = TOPOLOGIES.get(name)
    if topology is None:
        raise InvalidArgument("topology", f"{name!r} is not known; known are {', '.join(TOPOLOGIES)}")
    return topology


def compile_only_devices(topology: Topology) -> list[jax.Device]:
    """Devices that programs can be lowered and compiled for, and nothing else; make a mesh of them.

    They need libtpu in this process, and jax on another platform: see `compiler_environment`.

    Raises:
        Unsupported: libtpu is not here, or does not know the topology.
    """
    try:
        described = topologies.get_topology_desc(
            topology.name, platform="tpu", chips_per_host_bounds=list(topology.host_shape)
        )
    except RuntimeError as error:
        raise Unsupported(
            f"topology {topology.name}: this process cannot compile for it: {error} (libtpu is found by "
            "TPU_LIBRARY_PATH, which `make aot` prepares, or as an installed package)"
        ) from error
    devices: list[jax.Device] = described.devices
    return devices


def find_library(chosen: Path | None) -> Path:
    """The libtpu.so to compile with: the one that was chosen, an installed package's, or that of `make aot`.

    Raises:
        Unsupported: there is none; the message says how to get it.
    """
    package = importlib.util.find_spec("libtpu")
    places = [Path(sys.prefix) / "aot" / "libtpu" / "libtpu.so"]
    if package is not None and package.origin is not None:
        places.insert(0, Path(package.origin).parent / "libtpu.so")
    for path in places if chosen is None else [chosen]:
        if path.is_file():
            return path
    where = "" if chosen is None else f" at {chosen}, which TPU_LIBRARY_PATH names"
    raise Unsupported(
        f"libtpu, which compiles for TPUs, is not here{where}: get it with `pip install libtpu` or `make aot`, or name "
        "a libtpu.so by TPU_LIBRARY_PATH"
    )


def compiler_environment(library: Path) -> dict[str, str]:
    """Variables under which a process compiles for TPUs with this libtpu.so and takes itself for a CPU's."""
    return {
        "TPU_LIBRARY_PATH": str(library),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a metadata server what machine this is, for minutes
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
