"""Muon as an optax transformation, with its products in bfloat16.

The momentum of a matrix is replaced by a matrix near to it whose singular values all lie about 1 (K. Jordan, "Muon: an
optimizer for hidden layers in neural networks", 2024). `optax.contrib.muon` does the same in float32, which on CPUs
takes ten times as long.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jpaged.models.layers import accumulate, transposed

# Coefficients of Jordan's quintic iteration.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_NUM_ITERATIONS = 5
# Of an update's root mean square, so that rates fit both AdamW and Muon (Liu et al., arXiv 2502.16982).
_RMS = 0.2


class MuonState(NamedTuple):
    """The momentum."""

    momentum: optax.Updates


def scale_by_muon(momentum: float = 0.95) -> optax.GradientTransformation:
    """Turns gradients of kernels `[in, ...out]` into orthogonal updates, of a root mean square of about 0.2."""

    def init(params: optax.Params) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(
        gradients: optax.Updates, state: MuonState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MuonState]:
        moved = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, gradients)
        ahead = jax.tree.map(lambda m, g: momentum * m + g, moved, gradients)
        return jax.tree.map(_scaled, ahead), MuonState(moved)

    return optax.GradientTransformation(init, update)


def _scaled(gradient: jax.Array) -> jax.Array:
    matrix = gradient.reshape(gradient.shape[0], -1)
    size = _RMS * math.sqrt(max(matrix.shape))
    return size * orthogonal(matrix).reshape(gradient.shape)


def orthogonal(matrix: jax.Array) -> jax.Array:
    """A float32 matrix with the singular vectors of this one and singular values between about 0.7 and 1.2."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = transposed(matrix) if is_tall else matrix
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(_NUM_ITERATIONS):
        low = x.astype(jnp.bfloat16)
        gram = accumulate(low, low, ((1,), (1,)))
        low_gram = gram.astype(jnp.bfloat16)
        polynomial = _B * gram + _C * accumulate(low_gram, low_gram, ((1,), (0,)))
        x = _A * x + accumulate(polynomial.astype(jnp.bfloat16), low, ((1,), (0,)))
    return transposed(x) if is_tall else x
