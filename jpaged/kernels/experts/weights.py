"""The matrices of a layer's experts, and their gate function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jpaged.kernels.experts.stacked import num_experts_of
from jpaged.kernels.mixture_kind import Gate
from jpaged.kernels.product import PackedMatrix

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a layer's experts: down(gate(x Wg + bg, x Wu + bu)) + bd.

    Attributes:
        gate, up: `[X, E, F]`, quantized or not, `StackedExperts`, or packed as `[E, X, F]` in X parts.
        down: `[X, F, E]`, in the same forms.
        gate_bias, up_bias: `[X, F]`, or None.
        down_bias: `[X, E]`, or None.
    """

    gate: Any
    up: Any
    down: Any
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None

    @property
    def num_experts(self) -> int:
        """X."""
        if isinstance(self.gate, PackedMatrix):
            return self.gate.num_parts
        return num_experts_of(self.gate)


def join(gate: Gate, gates: Float[Array, "..."], ups: Float[Array, "..."]) -> Float[Array, "..."]:
    """Combine a gate and an up into one number, in float32."""
    if gate.kind == "silu":
        return jax.nn.silu(gates) * ups
    gates, ups = jnp.minimum(gates, gate.limit), jnp.clip(ups, -gate.limit, gate.limit)
    return (ups + 1) * gates * jax.nn.sigmoid(gate.alpha * gates)
