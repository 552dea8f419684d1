"""The matrices of a layer's experts, and what becomes of their gates and ups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclass(frozen=True, slots=True)
class Gate:
    """How a gate and an up become one number, in float32. Hashable, static under jit.

    Attributes:
        kind: `silu`, silu(gate) * up; or `clamped`, (up + 1) * gate * sigmoid(alpha * gate), of gates that are at most
            `limit` and ups between minus it and it (gpt-oss).
    """

    kind: Literal["silu", "clamped"] = "silu"
    alpha: float = 1.0
    limit: float = float("inf")

    def __call__(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        """Joins gates and ups."""
        if self.kind == "silu":
            return jax.nn.silu(gate) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """What the experts of a layer compute with: down(gate(x Wg + bg, x Wu + bu)) + bd.

    Attributes:
        gate, up: `[X, E, F]`, or packed.
        down: `[X, F, E]`, or packed.
        gate_bias, up_bias: `[X, F]`, or None.
        down_bias: `[X, E]`, or None.
    """

    gate: Any
    up: Any
    down: Any
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
