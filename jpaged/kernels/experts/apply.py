"""The entry point of a mixture of experts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from jpaged.kernels.experts import sorted_rows
from jpaged.kernels.experts.cpu.experts import loaded
from jpaged.kernels.experts.routing import Routes
from jpaged.kernels.experts.weights import ExpertWeights, flat
from jpaged.kernels.matmul import PackedMatrix, tpu
from jpaged.kernels.matmul.on_device import takes_tpu_kernel
from jpaged.kernels.matmul.quantized import QuantizedMatrix
from jpaged.kernels.matmul.triton.grouped import ProductBackend, multiply_sorted, unsupported_reason
from jpaged.kernels.mixture_kind import GateFunction

if TYPE_CHECKING:
    from jaxtyping import Array, Float

ExpertsBackend = Literal["tiles", "wide-tiles", "ragged"] | ProductBackend
"""Backends for unpacked matrices: loops over small or larger tiles, XLA's grouped matmul, or a GPU kernel's."""
ExpertsKernel = Callable[[jax.Array, Routes, ExpertWeights, GateFunction], jax.Array]
"""Computes `sum_experts`; on several devices, their parts and the sum of those."""


def apply_experts(
    x_te: Float[Array, "T E"],
    routes: Routes,
    weights: ExpertWeights,
    gate: GateFunction,
    kernel: ExpertsKernel | None = None,
) -> Float[Array, "T E"]:
    """Return the weighted sum of the outputs of each row's experts, accumulated and returned in float32.

    A row's result depends only on that row and its experts: experts have no capacity limit, and no row is dropped. Rows
    that are sent nowhere are zeros.

    Args:
        x_te: float32, bfloat16 or float16, as the matrices; values between the two matmuls are rounded to that.
        kernel: computes everything except the last bias; None is `sum_experts`.
    """
    without_bias = dataclasses.replace(weights, down_bias=None)
    y_te = (kernel or sum_experts)(x_te, routes, without_bias, gate)
    if weights.down_bias is None:
        return y_te
    num_experts = weights.num_experts
    bias_tke = weights.down_bias[jnp.minimum(routes.ids_tk, num_experts - 1)].astype(jnp.float32)
    weights_tk = jnp.where(routes.ids_tk < num_experts, routes.weights_tk, 0.0)
    mixed_te: jax.Array = jnp.sum(weights_tk[..., None] * bias_tke, axis=1)
    return y_te + mixed_te


def sum_experts(
    x_te: Float[Array, "T E"],
    routes: Routes,
    weights: ExpertWeights,
    gate: GateFunction,
    backend: ExpertsBackend = "tiles",
) -> Float[Array, "T E"]:
    """Compute `apply_experts` without the last bias, on one device.

    Packed matrices are read by the CPU kernel whatever the backend. Quantized ones are multiplied in a loop, unless the
    GPU kernel (backend triton or cuda) or the TPU kernel of grouped matmuls (backend ragged) supports them.
    """
    if isinstance(weights.gate, PackedMatrix):
        return loaded().apply(x_te, routes, weights, gate)
    if backend == "tiles":
        return sorted_rows.apply_tiles(x_te, routes, weights, gate)
    if backend in ("triton", "cuda") and takes_all(weights, backend):
        return sorted_rows.apply_grouped(
            x_te, routes, weights, gate, functools.partial(multiply_sorted, backend=backend)
        )
    if backend == "ragged" and _takes_all_on_tpu(weights):
        return sorted_rows.apply_grouped(x_te, routes, weights, gate, tpu.multiply_sorted)
    if backend != "ragged" or isinstance(flat(weights.gate)[0], QuantizedMatrix):
        return sorted_rows.apply_tiles(x_te, routes, weights, gate, sorted_rows.rows_for(routes, weights.num_experts))
    return sorted_rows.apply_grouped(x_te, routes, weights, gate)


def takes_all(weights: ExpertWeights, backend: ProductBackend = "triton") -> bool:
    """Return True if a GPU kernel supports all matrices of a layer's experts."""
    matrices = (flat(matrices)[0] for matrices in (weights.gate, weights.up, weights.down))
    return not any(unsupported_reason(each, backend) for each in matrices)


def _takes_all_on_tpu(weights: ExpertWeights) -> bool:
    matrices = [flat(matrices)[0] for matrices in (weights.gate, weights.up, weights.down)]
    return all(isinstance(each, QuantizedMatrix) and takes_tpu_kernel(each) for each in matrices)
