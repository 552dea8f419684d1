"""Compile-only GPU devices, from descriptions of GPUs in the format of XLA's compiler."""

from __future__ import annotations

import re
from pathlib import Path

import jax
from jax.experimental import topologies

from jpaged.errors import Unsupported

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
