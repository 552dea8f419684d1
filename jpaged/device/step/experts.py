"""Experts split over the devices of a mesh: each device has a part of every expert, or some whole experts.

Hidden states are whole on every device between layers, so each device already has the rows for the experts that it
holds. It computes with its own matrices, and one sum over the devices ends the layer, as in a dense layer. An exchange
of rows (all-to-all) could only replace the scattering half of that sum. For T rows of E numbers, K experts per row and
n devices, a device then sends

    replicated    2 (n - 1) / n  T E        the sum: scattered, and gathered again
    exchanged     (min(K, n) / n + 1) (n - 1) / n  T E      results to the row's device, and the rows gathered again

if messages may have any length. But programs have static shapes, no row may be dropped, and all rows may choose the
experts of one device. Each pair of devices then needs room for T / n rows, which is what the scattering half sends.
So rows are never exchanged.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jpaged.device.mesh import MODEL_AXIS, first_device, on_shards, partition_spec
from jpaged.kernels.experts import ExpertsBackend, ExpertsKernel, ExpertWeights, Routes, StackedExperts, sum_experts
from jpaged.kernels.mixture_kind import Gate
from jpaged.kernels.paged_attention.triton.attention import unsupported_device_reason
from jpaged.kernels.product.quantised import QuantisedMatrix
from jpaged.models.experts.leaves import expert_axes
from jpaged.models.experts.mixture import Mixture
from jpaged.models.leaves import LogicalAxes

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

    def run(x_te: jax.Array, routes: Routes, weights: ExpertWeights, gate: Gate) -> jax.Array:
        def part(x_te: jax.Array, routes: Routes, weights: ExpertWeights) -> jax.Array:
            if mixture.is_parallel:
                num_own = weights.num_experts
                routes = routes.part(jax.lax.axis_index(MODEL_AXIS) * num_own, num_own)
            total: jax.Array = jax.lax.psum(compute(x_te, routes, weights, gate), MODEL_AXIS)
            return total

        whole = PartitionSpec()
        summed: jax.Array = on_shards(part, mesh, (whole, whole, _specs(mixture, weights)), whole)(
            x_te, routes, weights
        )
        return summed

    return run


def _specs(mixture: Mixture, weights: ExpertWeights) -> ExpertWeights:
    """Return the partition specs of the arrays, in their places."""
    kernels = (_matrix_spec(getattr(weights, part), expert_axes(mixture, part)) for part in ("gate", "up", "down"))
    experts, _, inner = expert_axes(mixture, "gate")
    biases = (None if bias is None else partition_spec(experts, inner) for bias in (weights.gate_bias, weights.up_bias))
    return ExpertWeights(*kernels, *biases)


def _matrix_spec(matrix: Any, axes: LogicalAxes) -> Any:
    if isinstance(matrix, StackedExperts):
        of_one = _matrix_spec(jax.eval_shape(lambda: jax.tree.map(lambda a: a[0], matrix.matrices)), axes)
        return StackedExperts(_behind(of_one), PartitionSpec())
    if not isinstance(matrix, QuantisedMatrix):
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
