"""The entry point of a mixture of experts, which chooses the backend and adds the last bias.

Rows are sorted by expert: for a grouped matmul on accelerators, and for tiles of one expert each on CPUs.

On TPUs a kernel computes all of it (`jpaged.kernels.experts.tpu`). For what it does not support, XLA implements
`jax.lax.ragged_dot` by a Mosaic kernel, which reads no matrix of an expert without rows. On GPUs XLA would multiply
every row with every expert. The package's own kernels (`jpaged.kernels.matmul.triton`) replace it there.

The loop over the used tiles reads no expert without rows either:

    sorted rows   a a a a a a a a a a b c c c      tiles of 8: a, a, b, c
                  └ tile 0 ──┘└ 1 ──...            a tile may extend into the next expert's rows, whose own
                              └ 1 ┘└ 2 ...         tile overwrites them later

On CPUs a tile has a fixed number of rows, so that the order of a row's sums does not depend on the other rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from jpaged.kernels.experts import tpu as experts_tpu
from jpaged.kernels.experts.cpu.experts import loaded
from jpaged.kernels.experts.routing import Routes, SortedRows
from jpaged.kernels.experts.weights import ExpertWeights, flat, join, placed
from jpaged.kernels.matmul import PackedMatrix, tpu
from jpaged.kernels.matmul.on_device import takes_tpu_kernel
from jpaged.kernels.matmul.quantized import QuantizedMatrix, multiply
from jpaged.kernels.matmul.triton.grouped import ProductBackend, multiply_sorted, unsupported_reason
from jpaged.kernels.mixture_kind import GateFunction

if TYPE_CHECKING:
    from jaxtyping import Array, Float


GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]
"""Grouped matmul with a float32 result `[P, N]`.

Arguments: rows `[P, K]`, the number of rows of each matrix `[X]`, the matrix of each row `[P]`, and matrices `[X, K,
N]`.
"""


def ragged_dot(x_pk: jax.Array, counts_x: jax.Array, matrices_p: jax.Array, matrices: jax.Array) -> jax.Array:
    """Multiply by XLA's own grouped matmul."""
    del matrices_p
    precision = jax.lax.Precision.HIGHEST if x_pk.dtype == jnp.float32 else None
    y_pn: jax.Array = jax.lax.ragged_dot(x_pk, matrices, counts_x, precision, jnp.float32)
    return y_pn


def apply_grouped(
    x_te: Float[Array, "T E"],
    routes: Routes,
    weights: ExpertWeights,
    gate: GateFunction,
    multiply: GroupedProduct = ragged_dot,
) -> Float[Array, "T E"]:
    """Return the weighted sum of the outputs of each row's experts, without the last bias, in float32."""
    num_experts = weights.num_experts
    rows = SortedRows.of(routes, num_experts)
    experts_p = jnp.minimum(rows.experts_p, num_experts - 1)

    def project(x_pi: jax.Array, kernel_xio: Any, bias_xo: jax.Array | None) -> jax.Array:
        matrices, first = flat(kernel_xio)
        counts = placed(rows.counts_x, first, matrices.shape[0])
        y_po = multiply(x_pi, counts, first + experts_p, matrices)
        return y_po if bias_xo is None else y_po + bias_xo[experts_p].astype(jnp.float32)

    x_pe = x_te[rows.tokens_p]
    ups = project(x_pe, weights.up, weights.up_bias)
    inner = join(gate, project(x_pe, weights.gate, weights.gate_bias) if gate.has_gates else ups, ups)
    return rows.sum(project(inner.astype(x_te.dtype), weights.down, None), routes, num_experts)


TILE_ROWS = 8
"""Rows of a tile: reading a matrix and multiplying with it then take equally long on a core with AVX-512."""


_MAX_TILE_ROWS = 128


def rows_for(routes: Routes, num_experts: int) -> int:
    """Return the rows of a tile if a matmul has a high cost per tile: those of an expert if rows were spread evenly."""
    even = -(-routes.ids_tk.size // num_experts)
    return min(max(TILE_ROWS, 1 << (even - 1).bit_length()), _MAX_TILE_ROWS)


def apply_tiles(
    x_te: Float[Array, "T E"], routes: Routes, weights: ExpertWeights, gate: GateFunction, num_rows: int = TILE_ROWS
) -> Float[Array, "T E"]:
    """Return the weighted sum of the outputs of each row's experts, without the last bias, in float32."""
    num_experts, adapters = weights.num_experts, weights.adapters if routes.adapters_t is not None else None
    rows = SortedRows.of(routes, num_experts)
    x_pe = jnp.pad(x_te[rows.tokens_p], ((0, num_rows), (0, 0)))
    weights = dataclasses.replace(weights, adapters=None)
    slots_p = None if routes.adapters_t is None else jnp.pad(routes.adapters_t[rows.tokens_p], (0, num_rows))
    ends_x = jnp.cumsum(rows.counts_x)
    tile_ends_x = jnp.cumsum(-(-rows.counts_x // num_rows))

    def add_tile(i: jax.Array, y_pe: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(tile_ends_x, i, side="right")
        own = _expert(weights, expert)
        num_tiles = -(-rows.counts_x[expert] // num_rows)
        first = ends_x[expert] - rows.counts_x[expert] + (i - (tile_ends_x[expert] - num_tiles)) * num_rows
        x = jax.lax.dynamic_slice_in_dim(x_pe, first, num_rows)

        def project(x_ti: jax.Array, kernel_io: Any, bias_o: jax.Array | None, part: int) -> jax.Array:
            y_to = _project(x_ti, kernel_io, bias_o)
            if adapters is None or slots_p is None:
                return y_to
            slots_t = jax.lax.dynamic_slice_in_dim(slots_p, first, num_rows)
            return y_to + adapters[part].adapt(x_ti, slots_t, expert, num_experts)

        ups = project(x, own.up, own.up_bias, 1)
        gates = project(x, own.gate, own.gate_bias, 0) if gate.has_gates else ups
        inner = join(gate, gates, ups).astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(y_pe, project(inner, own.down, None, 2), first, 0)

    empty = jnp.zeros((len(x_pe), x_te.shape[1]), jnp.float32)
    return rows.sum(jax.lax.fori_loop(0, tile_ends_x[-1], add_tile, empty), routes, num_experts)


def _expert(weights: ExpertWeights, expert: jax.Array) -> ExpertWeights:
    def own(matrices: Any) -> Any:
        matrices, first = flat(matrices)
        return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, first + expert, keepdims=False), matrices)

    return ExpertWeights(*(own(getattr(weights, field.name)) for field in dataclasses.fields(weights)))


def _project(x_ti: jax.Array, kernel_io: jax.Array | QuantizedMatrix, bias_o: jax.Array | None) -> jax.Array:
    if isinstance(kernel_io, QuantizedMatrix):
        y_to = multiply(x_ti, kernel_io)
    else:
        precision = jax.lax.Precision.HIGHEST if x_ti.dtype == jnp.float32 else None
        y_to = jax.lax.dot(x_ti, kernel_io, precision=precision, preferred_element_type=jnp.float32)
    return y_to if bias_o is None else y_to + bias_o.astype(jnp.float32)


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
    GPU kernel (backend triton or cuda) or a TPU kernel (backend ragged) supports them. Experts with adapters are
    multiplied in a loop on every device.
    """
    if weights.adapters is not None:
        num_rows = TILE_ROWS if backend == "tiles" else rows_for(routes, weights.num_experts)
        return apply_tiles(x_te, routes, weights, gate, num_rows)
    if isinstance(weights.gate, PackedMatrix):
        return loaded().apply(x_te, routes, weights, gate)
    if backend == "tiles":
        return apply_tiles(x_te, routes, weights, gate)
    if backend in ("triton", "cuda") and takes_all(weights, backend):
        return apply_grouped(x_te, routes, weights, gate, functools.partial(multiply_sorted, backend=backend))
    if backend == "ragged" and (form := experts_tpu.find_form(x_te, routes, weights, gate)) is not None:
        return experts_tpu.apply(x_te, routes, weights, form)
    if backend == "ragged" and _takes_all_on_tpu(weights):
        return apply_grouped(x_te, routes, weights, gate, tpu.multiply_sorted)
    if backend != "ragged" or isinstance(flat(weights.gate)[0], QuantizedMatrix):
        return apply_tiles(x_te, routes, weights, gate, rows_for(routes, weights.num_experts))
    return apply_grouped(x_te, routes, weights, gate)


def takes_all(weights: ExpertWeights, backend: ProductBackend = "triton") -> bool:
    """Return True if a GPU kernel supports all matrices of a layer's experts."""
    matrices = (flat(matrices)[0] for matrices in (weights.gate, weights.up, weights.down))
    return not any(unsupported_reason(each, backend) for each in matrices)


def _takes_all_on_tpu(weights: ExpertWeights) -> bool:
    matrices = [flat(matrices)[0] for matrices in (weights.gate, weights.up, weights.down)]
    return all(isinstance(each, QuantizedMatrix) and takes_tpu_kernel(each) for each in matrices)
