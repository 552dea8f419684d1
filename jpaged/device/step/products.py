"""Quantized matrices split over the devices of a mesh: those that a kernel multiplies with carry partition specs."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.device.mesh import first_device, partition_spec
from jpaged.kernels.product import QuantisedMatrix
from jpaged.kernels.product.on_device import PartedMatrix, kernel_takes
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.quantisation.formats import EXPERT_AXES
from jpaged.models.quantisation.tree import leaf_axes, placed_leaves
from jpaged.models.stack import LayerMode


def in_parts(params: Params, model: Model, layer_mode: LayerMode, mesh: Mesh) -> Params:
    """Return the parameters, with partition specs attached to each dense matrix that a kernel multiplies with.

    XLA partitions the other matmuls; experts are partitioned layer by layer (`experts.py`).
    """
    config = model.config
    if mesh.size == 1 or layer_mode != "loop" or config.quantisation is None:
        return params
    specs = {
        path: _specs(leaf_axes(config.quantisation, leaf, model.dtype, is_stacked=False))
        for path, (leaf, *_) in placed_leaves(config, layer_mode)
        if path[0] == "layers" and EXPERT_AXES.isdisjoint(leaf.axes)
    }

    def mark(path: tuple[Any, ...], leaf: Any) -> Any:
        spec = specs.get(tuple(key for key in map(_key, path) if key != "base"))  # `AdaptedMatrix` adds the key "base"
        if not isinstance(leaf, QuantisedMatrix) or spec is None:
            return leaf
        return PartedMatrix(leaf, spec, mesh) if kernel_takes(_part(leaf, spec, mesh), first_device(mesh)) else leaf

    marked: Params = jax.tree_util.tree_map_with_path(
        mark, params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix)
    )
    return marked


def _specs(axes: Any) -> QuantisedMatrix | None:
    """Return the partition specs of a matrix's arrays, from the names of their axes; None if it is not quantized."""
    if not isinstance(axes, QuantisedMatrix):
        return None
    specs: QuantisedMatrix = jax.tree.map(
        lambda names: partition_spec(*names), axes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
    return specs


def _part(matrix: QuantisedMatrix, specs: QuantisedMatrix, mesh: Mesh) -> QuantisedMatrix:
    """Return the shapes of one device's part."""

    def part(array: jax.Array, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(array.shape), array.dtype)

    parts: QuantisedMatrix = jax.tree.map(part, matrix, specs)
    return parts


def _key(key: Any) -> str | int:
    if isinstance(key, jax.tree_util.SequenceKey):
        return key.idx
    found: str = key.key if isinstance(key, jax.tree_util.DictKey) else key.name
    return found
