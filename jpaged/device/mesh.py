"""Devices as a mesh, and where each logical axis of an array goes on it.

One device today: every array is whole on it. The names are there so that shardings are written once, explicitly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.errors import Unsupported
from jpaged.models.layers import LayerMode

MESH_AXES = ("data", "model")

LOGICAL_AXES: Mapping[str, str | None] = {
    "tokens": None,
    "rows": None,
    "blocks": None,
    "layers": None,
    "embed": None,
    "heads": "model",
    "kv_heads": "model",
    "feed_forward": "model",
    "vocab": "model",
}
"""Mesh axis of each logical axis; None is whole on every device."""


def build_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of MESH_AXES over the devices.

    Raises:
        Unsupported: there is not exactly one device.
    """
    if len(devices) != 1:
        raise Unsupported(f"jpaged runs on one device, and {len(devices)} were given; start one server for each")
    return Mesh(np.asarray(devices).reshape(1, len(devices)), MESH_AXES)


def partition_spec(*logical_axes: str | None) -> PartitionSpec:
    """The spec of an array whose axes are named; None names an axis that is never split."""
    return PartitionSpec(*(None if axis is None else LOGICAL_AXES[axis] for axis in logical_axes))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec())


def layer_mode_for(device: jax.Device) -> LayerMode:
    """How layers run best: `scan` on TPUs, where it compiles 5 times as fast; `loop` where it would copy weights."""
    return "scan" if device.platform == "tpu" else "loop"
