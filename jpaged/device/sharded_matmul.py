"""Matmuls that are split over the devices of a mesh: quantized matrices, experts, and sums that overlap with matmuls.

Quantized matrices that a kernel multiplies with carry partition specs. Of experts, each device has a part of every one,
or some whole ones.

Hidden states are whole on every device between layers, so each device already has the rows for the experts that it
holds. It computes with its own matrices, and one sum over the devices ends the layer, as in a dense layer. An exchange
of rows (all-to-all) could only replace the scattering half of that sum. For T rows of E numbers, K experts per row and
n devices, a device then sends

    replicated    2 (n - 1) / n  T E        the sum: scattered, and gathered again
    exchanged     (min(K, n) / n + 1) (n - 1) / n  T E      results to the row's device, and the rows gathered again

if messages may have any length. But programs have static shapes, no row may be dropped, and all rows may choose the
experts of one device. Each pair of devices then needs room for T / n rows, which is what the scattering half sends.
So rows are never exchanged.

Dense layers are summed twice, after attention and after the feed-forward. On TPUs the hidden states are summed in parts
of their columns, so that the compiler overlaps the sum of one part with the matmuls of others
(`jpaged.models.layers.ColumnParts`). Parts of rows would read the weights once for each part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.device.mesh import (
    MODEL_AXIS,
    first_device,
    num_context_parts,
    num_shards,
    num_stages,
    on_shards,
    partition_spec,
)
from jpaged.kernels.experts import ExpertsBackend, ExpertsKernel, ExpertWeights, Routes, StackedExperts, sum_experts
from jpaged.kernels.matmul import QuantizedMatrix
from jpaged.kernels.matmul.on_device import PartedMatrix, kernel_takes
from jpaged.kernels.mixture_kind import GateFunction
from jpaged.kernels.paged_attention.triton.attention import unsupported_device_reason
from jpaged.models.config import Mixture
from jpaged.models.decoder.leaves import expert_axes
from jpaged.models.layers import Params
from jpaged.models.model import Model, leaf_axes, placed_leaves
from jpaged.models.param_specs import EXPERT_AXES, LogicalAxes
from jpaged.models.stack import LayerMode

_KINDS = frozenset({"TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x"})
"""Devices for which libtpu runs a sum within matmuls; for v5e it compiles the parts to synchronous sums."""
_LEAST_WEIGHTS = 3 << 24
"""Numbers of a layer's matrices on one device at least: matmuls of fewer are shorter than the sums they would hide."""
_LEAST_STATES: Mapping[int, int] = {4: 1 << 22, 2: 1 << 19}
"""Numbers of hidden states at least, by parts: smaller parts take mainly the latency of their sums."""
_LANES = 128


def overlaps_sums(model: Model, layer_mode: LayerMode, mesh: Mesh, *, has_adapters: bool) -> bool:
    """Return True if a model's larger steps sum hidden states in parts.

    Quantized matrices and adapters have no parts.
    """
    is_split = num_shards(mesh) > 1 and num_context_parts(mesh) == num_stages(mesh) == 1
    if has_adapters or not is_split or layer_mode != "scan" or first_device(mesh).device_kind not in _KINDS:
        return False
    layer = (leaf for path, (leaf, *_) in placed_leaves(model.config, "loop") if path[:2] == ("layers", 0))
    num_weights = sum(math.prod(leaf.shape) for leaf in layer) // num_shards(mesh)
    return num_weights >= _LEAST_WEIGHTS and model.dtype != np.float16 and model.takes_column_parts


def num_column_parts(num_tokens: int, width: int) -> int:
    """Return the parts of hidden states `[T, E]`, each of whole vectors of columns: 1, 2 or 4."""
    fitting = (parts for parts in _LEAST_STATES if width % (parts * _LANES) == 0)
    return next((parts for parts in fitting if num_tokens * width >= _LEAST_STATES[parts]), 1)


def in_parts(params: Params, model: Model, layer_mode: LayerMode, mesh: Mesh) -> Params:
    """Return the parameters, with partition specs attached to each dense matrix that a kernel multiplies with.

    XLA partitions the other matmuls; experts are partitioned layer by layer, too.
    """
    config = model.config
    if mesh.size == 1 or layer_mode != "loop" or config.quantization is None:
        return params
    specs = {
        path: _matrix_specs(leaf_axes(config.quantization, leaf, model.dtype, is_stacked=False))
        for path, (leaf, *_) in placed_leaves(config, layer_mode)
        if path[0] == "layers" and EXPERT_AXES.isdisjoint(leaf.axes)
    }

    def mark(path: tuple[Any, ...], leaf: Any) -> Any:
        spec = specs.get(tuple(key for key in map(_key, path) if key != "base"))  # `AdaptedMatrix` adds the key "base"
        if not isinstance(leaf, QuantizedMatrix) or spec is None:
            return leaf
        return PartedMatrix(leaf, spec, mesh) if kernel_takes(_part(leaf, spec, mesh), first_device(mesh)) else leaf

    marked: Params = jax.tree_util.tree_map_with_path(
        mark, params, is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix)
    )
    return marked


def _matrix_specs(axes: Any) -> QuantizedMatrix | None:
    """Return the partition specs of a matrix's arrays, from the names of their axes; None if it is not quantized."""
    if not isinstance(axes, QuantizedMatrix):
        return None
    specs: QuantizedMatrix = jax.tree.map(
        lambda names: partition_spec(*names), axes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
    return specs


def _part(matrix: QuantizedMatrix, specs: QuantizedMatrix, mesh: Mesh) -> QuantizedMatrix:
    """Return the shapes of one device's part."""

    def part(array: jax.Array, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(array.shape), array.dtype)

    parts: QuantizedMatrix = jax.tree.map(part, matrix, specs)
    return parts


def _key(key: Any) -> str | int:
    if isinstance(key, jax.tree_util.SequenceKey):
        return key.idx
    found: str = key.key if isinstance(key, jax.tree_util.DictKey) else key.name
    return found


_BACKENDS: dict[str, ExpertsBackend] = {"cpu": "tiles", "tpu": "ragged"}


def experts_backend(device: jax.Device) -> ExpertsBackend:
    """Return the backend that multiplies with unpacked expert matrices on a device."""
    if device.platform in _BACKENDS:
        return _BACKENDS[device.platform]
    return "wide-tiles" if unsupported_device_reason(device) else "triton"


def experts_kernel(mixture: Mixture | None, mesh: Mesh) -> ExpertsKernel | None:
    """Return the function that computes a model's experts on its devices; None if it has no experts."""
    if mixture is None:
        return None
    compute = functools.partial(sum_experts, backend=experts_backend(first_device(mesh)))
    if mesh.size == 1:
        return compute

    def run(x_te: jax.Array, routes: Routes, weights: ExpertWeights, gate: GateFunction) -> jax.Array:
        def part(x_te: jax.Array, routes: Routes, weights: ExpertWeights) -> jax.Array:
            if mixture.is_parallel:
                num_own = weights.num_experts
                routes = routes.part(jax.lax.axis_index(MODEL_AXIS) * num_own, num_own)
            total: jax.Array = jax.lax.psum(compute(x_te, routes, weights, gate), MODEL_AXIS)
            return total

        whole = PartitionSpec()
        summed: jax.Array = on_shards(part, mesh, (whole, whole, _expert_specs(mixture, weights)), whole)(
            x_te, routes, weights
        )
        return summed

    return run


def _expert_specs(mixture: Mixture, weights: ExpertWeights) -> ExpertWeights:
    """Return the partition specs of the arrays, in their places."""
    kernels = (_matrix_spec(getattr(weights, part), expert_axes(mixture, part)) for part in ("gate", "up", "down"))
    experts, _, inner = expert_axes(mixture, "gate")
    biases = (None if bias is None else partition_spec(experts, inner) for bias in (weights.gate_bias, weights.up_bias))
    return ExpertWeights(*kernels, *biases)


def _matrix_spec(matrix: Any, axes: LogicalAxes) -> Any:
    if isinstance(matrix, StackedExperts):
        of_one = _matrix_spec(jax.eval_shape(lambda: jax.tree.map(lambda a: a[0], matrix.matrices)), axes)
        return StackedExperts(_behind(of_one), PartitionSpec())
    if not isinstance(matrix, QuantizedMatrix):
        return partition_spec(*axes)
    experts, contracted, columns = axes
    of_groups = partition_spec(experts, contracted if matrix.num_groups > 1 else None, columns)
    return dataclasses.replace(
        matrix,
        values=partition_spec(*axes),
        scales=of_groups,
        zeros=None if matrix.zeros is None else of_groups,
        group_ids=None if matrix.group_ids is None else partition_spec(experts, contracted),
        input_scale=None if matrix.input_scale is None else partition_spec(experts),
    )


def _behind(specs: Any) -> Any:
    """Return the specs of arrays with an axis of layers before theirs."""
    return jax.tree.map(
        lambda spec: PartitionSpec(None, *spec), specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec)
    )
