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

from jpaged.kernels.lora import AdaptedMatrix, adapt
from jpaged.kernels.matmul import PackedMatrix
from jpaged.kernels.mixture_kind import GateFunction

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


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
class ExpertAdapters:
    """The adapters of one matrix of each expert, each adapter in its slot.

    Attributes:
        a: `[slots, X * rank, in]`, expert after expert.
        b: `[slots, X * rank, out]`, including the adapter's scale.
    """

    a: jax.Array
    b: jax.Array

    def adapt(
        self, x_te: Float[Array, "T E"], adapters_t: Int[Array, "T"], expert: Int[Array, ""], num_experts: int
    ) -> Float[Array, "T F"]:
        """Return the delta of each row by an expert, float32; zeros if its slot is 0."""
        rank = self.a.shape[1] // num_experts
        a, b = (jax.lax.dynamic_slice_in_dim(each, expert * rank, rank, axis=1) for each in (self.a, self.b))
        base = jax.ShapeDtypeStruct((a.shape[2], b.shape[2]), a.dtype)
        return adapt(x_te, adapters_t, AdaptedMatrix(base, a, (b,)))


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
        adapters: `ExpertAdapters` of gate, up and down; None if they have no slots.
    """

    gate: Any
    up: Any
    down: Any
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    adapters: Any = None

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
