"""The description of a GPU in the words of XLA's compiler, and such devices that are not there."""

from __future__ import annotations

import re
from pathlib import Path

import jax
from jax.experimental import topologies

from jpaged.errors import Unsupported

GPUS = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.txtpb")))
"""Names of the GPUs that are described here."""


def description(name: str) -> str:
    """What is written about a GPU, one of `GPUS`."""
    return Path(__file__).with_name(f"{name}.txtpb").read_text(encoding="utf-8")


def device_kind(name: str) -> str:
    """What jax calls the devices of a description, one of `GPUS`."""
    (kind,) = re.findall(r'^device_description_str: "(.+)"$', description(name), re.MULTILINE)
    return str(kind)


def compile_only_gpus(num_devices: int, name: str = "h200") -> list[jax.Device]:
    """GPUs of one machine that programs can be lowered and compiled for, and nothing else.

    Args:
        num_devices: how many they are.
        name: which they are, one of `GPUS`.

    Raises:
        Unsupported: jax has no CUDA packages here.
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
