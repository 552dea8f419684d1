"""The mesh and its names."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from jpaged.device import mesh
from jpaged.errors import InvalidArgument


def test_devices_share_one_copy_of_the_model() -> None:
    built = mesh.build_mesh(jax.devices())
    assert built.shape == {"data": 1, "context": 1, "model": len(jax.devices())}
    assert mesh.replicated(built).spec == PartitionSpec()
    assert mesh.first_device(built) == jax.devices()[0]


def test_devices_that_are_not_there_are_refused() -> None:
    num_devices = len(jax.devices())
    assert mesh.num_shards(mesh.serving_mesh(num_devices)) == num_devices
    with pytest.raises(InvalidArgument, match=f"requires 99 devices; cpu has {num_devices}"):
        mesh.serving_mesh(99)


def test_logical_axes_name_mesh_axes() -> None:
    assert mesh.partition_spec("embed", "heads", None) == PartitionSpec(None, "model", None)
    assert set(mesh.LOGICAL_AXES.values()) <= {*mesh.MESH_AXES, None}


def test_layers_run_as_suits_the_device() -> None:
    assert mesh.layer_mode_for(jax.devices()[0]) == "loop"
