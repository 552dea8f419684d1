"""The mesh and its names."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from jpaged.device import mesh
from jpaged.errors import Unsupported


def test_one_device_makes_a_mesh_of_both_axes() -> None:
    built = mesh.build_mesh(jax.devices()[:1])
    assert built.shape == {"data": 1, "model": 1}
    assert mesh.replicated(built).spec == PartitionSpec()


@pytest.mark.parametrize("num_devices", [0, 2])
def test_other_numbers_of_devices_are_refused(num_devices: int) -> None:
    with pytest.raises(Unsupported, match=f"one device, and {num_devices} were given"):
        mesh.build_mesh(jax.devices()[:1] * num_devices)


def test_logical_axes_name_mesh_axes() -> None:
    assert mesh.partition_spec("embed", "heads", None) == PartitionSpec(None, "model", None)
    assert set(mesh.LOGICAL_AXES.values()) <= {*mesh.MESH_AXES, None}


def test_layers_run_as_suits_the_device() -> None:
    assert mesh.layer_mode_for(jax.devices()[0]) == "loop"
