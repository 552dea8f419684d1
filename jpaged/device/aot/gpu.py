"""The description of a GPU in the words of XLA's compiler, and such devices that are not there."""

from __future__ import annotations

from pathlib import Path

import jax
from jax.experimental import topologies

from jpaged.errors import Unsupported

H200 = Path(__file__).with_name("h200.txtpb")


def compile_only_gpus(num_devices: int) -> list[jax.Device]:
    """H200s of one machine that programs can be lowered and compiled for, and nothing else.

    Raises:
        Unsupported: jax has no CUDA packages here.
    """
    try:
        topology = topologies.get_topology_desc(
            "", platform="cuda", target_config=H200.read_text(), topology=f"1x1x{num_devices}"
        )
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise Unsupported(
            f"h200: this Python cannot compile for CUDA: {reason}: install jax's CUDA packages (`pip install "
            "'jax[cuda13]'`, or `make EXTRAS=cuda`; no GPU is needed)"
        ) from error
    devices: list[jax.Device] = topology.devices
    return devices
