"""The specification of a mixture: gathers all matrices of each row's experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.kernels.experts.routing import Routes
from jpaged.kernels.experts.weights import ExpertWeights, join
from jpaged.kernels.mixture_kind import GateFunction

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def apply_experts(
    x_te: Float[Array, "T E"], routes: Routes, weights: ExpertWeights, gate: GateFunction
) -> Float[Array, "T E"]:
    """Return the weighted sum of the outputs of each row's experts, without the last bias, in float32."""
    ids, is_sent = jnp.minimum(routes.ids_tk, weights.num_experts - 1), routes.ids_tk < weights.num_experts

    def project(x: jax.Array, kernel_xio: jax.Array, bias_xo: jax.Array | None) -> jax.Array:
        matrices = kernel_xio[ids].astype(jnp.float32)
        x = x.astype(jnp.float32)
        y = jnp.einsum("tki,tkio->tko", x, matrices, precision=jax.lax.Precision.HIGHEST)
        return y if bias_xo is None else y + bias_xo[ids].astype(jnp.float32)

    x = jnp.broadcast_to(x_te[:, None], (*ids.shape, x_te.shape[1]))
    inner = join(gate, project(x, weights.gate, weights.gate_bias), project(x, weights.up, weights.up_bias))
    y_tke = project(inner.astype(x_te.dtype), weights.down, None)
    return jnp.sum(jnp.where(is_sent[..., None], y_tke * routes.weights_tk[..., None], 0.0), axis=1)
