"""The mesh and its names."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from jpaged.device import mesh
from jpaged.errors import InvalidArgument


def test_devices_share_one_copy_of_the_model() -> None:
    built = mesh.build_mesh(jax.devices())
    assert built.shape == {"stage": 1, "context": 1, "model": len(jax.devices())}
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


def test_stages_are_farthest_from_each_other_and_heads_are_neighbors() -> None:
    built = mesh.build_mesh(jax.devices()[:8], 2, 2)
    assert built.shape == {"stage": 2, "context": 2, "model": 2}
    assert mesh.num_stages(built) == 2
    assert [device.id for device in built.devices[1, 0]] == [4, 5]
    with pytest.raises(InvalidArgument, match="pipeline_parallel_size: 99 stages of 1 devices each require 99 devices"):
        mesh.serving_mesh(1, 1, 99)


@pytest.mark.parametrize("sizes", [(4, 1, 2), (2, 4, 1), (8, 1, 1), (1, 8, 1), (1, 2, 4)])
def test_processes_hold_contiguous_parts(sizes: tuple[int, int, int]) -> None:
    mesh._check_nesting(4, sizes)
    with pytest.raises(InvalidArgument, match="with 3 devices per process"):
        mesh._check_nesting(3, sizes)
