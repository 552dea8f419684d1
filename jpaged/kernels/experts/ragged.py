"""Experts by grouped matmuls of rows sorted by expert.

On TPUs XLA implements `jax.lax.ragged_dot` by a Mosaic kernel whose tiles cover only groups with rows, so that the
matrices of an expert without rows are not read. On GPUs XLA would multiply every row with every expert. The package's
own kernels (`jpaged.kernels.matmul.triton`) replace it there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jpaged.kernels.experts.routing import Routes, SortedRows
from jpaged.kernels.experts.weights import ExpertWeights, flat, join, placed
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


def apply_experts(
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
    inner = join(gate, project(x_pe, weights.gate, weights.gate_bias), project(x_pe, weights.up, weights.up_bias))
    return rows.sum(project(inner.astype(x_te.dtype), weights.down, None), routes, num_experts)
