"""The matrices of a layer's experts, and their gate function.

`StackedExperts` has the matrices of all layers' experts in one array, and the index of a layer's.

A grouped matmul takes its matrices as they lie in memory. A slice for one layer would first be copied, with all
experts. So the whole stack is passed, and the groups of other layers are empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jpaged.kernels.matmul import PackedMatrix
from jpaged.kernels.mixture_kind import GateFunction

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Experts of one of several layers, in place of the layer's array `[X, K, N]`.

    Attributes:
        matrices: `[L, X, K, N]`, quantized or not.
        index: int32 scalar: the layer.
    """

    matrices: Any
    index: Any


def get_num_experts(matrices: Any) -> int:
    """Return the number of experts of one layer."""
    return int(matrices.matrices.shape[1] if isinstance(matrices, StackedExperts) else matrices.shape[0])


def flat(matrices: Any) -> tuple[Any, jax.Array | int]:
    """Return all matrices `[L * X, K, N]`, and the index of the layer's first."""
    if not isinstance(matrices, StackedExperts):
        return matrices, 0
    joined = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), matrices.matrices)
    return joined, matrices.index * get_num_experts(matrices)


def placed(counts_x: jax.Array, first: jax.Array | int, num_matrices: int) -> jax.Array:
    """Return the counts of a layer's experts at their places among all matrices."""
    if len(counts_x) == num_matrices:
        return counts_x
    none = jnp.zeros((num_matrices,), counts_x.dtype)
    return jax.lax.dynamic_update_slice(none, counts_x, (first,))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a layer's experts: down(gate(x Wg + bg, x Wu + bu)) + bd.

    Attributes:
        gate, up: `[X, E, F]`, quantized or not, `StackedExperts`, or packed as `[E, X, F]` in X parts. The same one,
            which is multiplied once, if there are no gates.
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
        return get_num_experts(self.gate)


def join(gate: GateFunction, gates: Float[Array, "..."], ups: Float[Array, "..."]) -> Float[Array, "..."]:
    """Combine a gate and an up into one number, in float32."""
    if gate.kind == "silu":
        return jax.nn.silu(gates) * ups
    if gate.kind == "gelu_tanh":
        return jax.nn.gelu(gates, approximate=True) * ups
    if gate.kind == "relu2":
        return jnp.square(jax.nn.relu(ups))
    gates, ups = jnp.minimum(gates, gate.limit), jnp.clip(ups, -gate.limit, gate.limit)
    return (ups + 1) * gates * jax.nn.sigmoid(gate.alpha * gates)
