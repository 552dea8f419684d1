"""The one call of a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from jpaged.kernels.experts import ragged, tiles
from jpaged.kernels.experts.cpu.experts import loaded
from jpaged.kernels.experts.routing import Routes
from jpaged.kernels.experts.weights import ExpertWeights, Gate
from jpaged.kernels.product import PackedMatrix

if TYPE_CHECKING:
    from jaxtyping import Array, Float

ExpertsBackend = Literal["tiles", "ragged"]
"""Who multiplies with matrices that are not packed."""

_BACKENDS = {"tiles": tiles.apply_experts, "ragged": ragged.apply_experts}


def apply_experts(
    x_te: Float[Array, "T E"], routes: Routes, weights: ExpertWeights, gate: Gate, backend: ExpertsBackend = "tiles"
) -> Float[Array, "T E"]:
    """The weighted sum of what its experts make of each row, accumulated and returned in float32.

    What becomes of a row depends on that row and its experts alone: none is left out, however many share an expert.
    Rows that are sent nowhere come out as zeros.

    Args:
        x_te: float32 or bfloat16, as the matrices; between the two products it is rounded to that.
        weights: packed ones are read by the CPU's kernel, whatever the backend.
    """
    if isinstance(weights.gate, PackedMatrix):
        y_te = loaded().apply(x_te, routes, weights, gate)
    else:
        y_te = _BACKENDS[backend](x_te, routes, weights, gate)
    if weights.down_bias is None:
        return y_te
    num_experts = len(weights.down_bias)
    bias_tke = weights.down_bias[jnp.minimum(routes.ids_tk, num_experts - 1)].astype(jnp.float32)
    weights_tk = jnp.where(routes.ids_tk < num_experts, routes.weights_tk, 0.0)
    mixed: jax.Array = jnp.sum(weights_tk[..., None] * bias_tke, axis=1)
    return y_te + mixed
