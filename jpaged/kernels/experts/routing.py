"""Routing of rows to experts: scores in float32, the best of them, and their weights.

`SortedRows` are the rows sorted by expert, with the inverse. `ExpertMap` has the physical experts of each logical one,
if experts have replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.kernels.mixture_kind import Routing

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Shaped

_LEAST_SUM = 1e-20


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each row.

    Attributes:
        ids_tk: int32 `[T, K]`: experts, the best first. The number of experts marks rows that are not in use, and
            experts on other devices.
        weights_tk: float32 `[T, K]`.
        adapters_t: int32 `[T]`, the adapter slot of each row, 0 is none; None if experts have no slots.
    """

    ids_tk: jax.Array
    weights_tk: jax.Array
    adapters_t: jax.Array | None = None

    def part(self, first: jax.Array, num_experts: int) -> Routes:
        """Return the routes to a contiguous range of experts, renumbered from 0."""
        ids = self.ids_tk - first
        own_tk = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
        return Routes(own_tk, self.weights_tk, self.adapters_t)


_NUM_HASHED = 16
"""Columns of a row that choose the replica."""
_GOLDEN = 0x9E3779B1
"""Multiplier of Fibonacci hashing: 2**32 divided by the golden ratio, odd."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ExpertMap:
    """The physical experts of each of a layer's X logical ones: one, or several with the same matrices (replicas).

        logical      0   0   1   2   2   2
        physical_p   4   1   0   2   3   5      starts_x1   0 2 3 6

    Attributes:
        starts_x1: int32 `[X + 1]`: the first replica of each logical expert in `physical_p`.
        physical_p: int32 `[P]`: the physical experts, sorted by their logical ones.
    """

    starts_x1: jax.Array
    physical_p: jax.Array

    def apply(self, routes: Routes, x_te: Shaped[Array, "T E"]) -> Routes:
        """Return the routes to physical experts; P marks rows that are not in use.

        The choice among replicas is a hash of the row's own numbers, so it does not depend on the other rows.

        Args:
            routes: to logical experts.
            x_te: the rows.
        """
        num_logical, num_physical = len(self.starts_x1) - 1, len(self.physical_p)
        stride = max(1, x_te.shape[1] // _NUM_HASHED)
        bits = jax.lax.bitcast_convert_type(x_te[:, ::stride].astype(jnp.float32), jnp.uint32)
        hash_t = jnp.zeros(len(x_te), jnp.uint32)
        for column in range(bits.shape[1]):
            hash_t = (hash_t ^ bits[:, column]) * jnp.uint32(_GOLDEN)
            hash_t ^= hash_t >> 15
        ids_tk = jnp.minimum(routes.ids_tk, num_logical - 1)
        first_tk, end_tk = self.starts_x1[ids_tk], self.starts_x1[ids_tk + 1]
        offset_tk = (hash_t[:, None] >> 1).astype(jnp.int32) % jnp.maximum(end_tk - first_tk, 1)
        physical_tk = self.physical_p[jnp.minimum(first_tk + offset_tk, num_physical - 1)]
        return Routes(jnp.where(routes.ids_tk < num_logical, physical_tk, num_physical), routes.weights_tk)


def route(
    logits_tx: Float[Array, "T X"],
    routing: Routing,
    num_rows: Int[Array, ""],
    bias_x: Float[Array, "X"] | None = None,
    is_used_t: Bool[Array, "T"] | None = None,
) -> Routes:
    """Choose the experts of each row and their weights, in float32.

    A row's experts depend on that row alone: experts have no capacity limit. If scores are equal, the expert with the
    smaller number comes first.

    Args:
        num_rows: rows in use, the first ones; the others are sent nowhere.
        bias_x: added to scores for the choice of experts and groups; does not affect weights (DeepSeek-V3).
        is_used_t: rows in use, if they are not the first ones.
    """
    logits = logits_tx.astype(jnp.float32)
    if routing.scores == "chosen":
        best, ids = jax.lax.top_k(logits, routing.top_k)
        weights = jax.nn.softmax(best, axis=-1)
    elif routing.scores == "sparsemixer":
        ids, weights = _mix_sparsely(logits, routing)
    else:
        scores = jax.nn.softmax(logits, axis=-1) if routing.scores == "softmax" else jax.nn.sigmoid(logits)
        ranked = scores if bias_x is None else scores + bias_x.astype(jnp.float32)
        ids = jax.lax.top_k(_in_best_groups(ranked, routing), routing.top_k)[1]
        weights = jnp.take_along_axis(scores, ids, axis=-1)
    if routing.normalises:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _LEAST_SUM)
    weights = weights * routing.scale
    is_in_use = (jnp.arange(len(logits)) < num_rows if is_used_t is None else is_used_t)[:, None]
    return Routes(jnp.where(is_in_use, ids, routing.num_experts), jnp.where(is_in_use, weights, 0.0))


def _mix_sparsely(logits_tx: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """Return (experts, weights) by sparsemixer, one expert after the other."""
    left_tx, ids, weights = logits_tx, [], []
    for _ in range(routing.top_k):
        best_t1, id_t1 = jnp.max(left_tx, axis=-1, keepdims=True), jnp.argmax(left_tx, axis=-1, keepdims=True)
        distances_tx = (best_t1 - logits_tx) / jnp.maximum(jnp.abs(logits_tx), best_t1)
        close_tx = jnp.where(distances_tx > 2 * routing.jitter, -jnp.inf, left_tx)
        ids.append(id_t1)
        weights.append(jnp.take_along_axis(jax.nn.softmax(close_tx, axis=-1), id_t1, axis=-1))
        left_tx = jnp.where(jnp.arange(logits_tx.shape[1]) == id_t1, -jnp.inf, left_tx)
    return jnp.concatenate(ids, axis=-1).astype(jnp.int32), jnp.concatenate(weights, axis=-1)


def _in_best_groups(ranked_tx: jax.Array, routing: Routing) -> jax.Array:
    """Return the scores, with minus infinity outside a row's best groups."""
    if routing.num_groups == routing.top_groups:
        return ranked_tx
    grouped = ranked_tx.reshape(len(ranked_tx), routing.num_groups, -1)
    group_scores = jnp.sum(jax.lax.top_k(grouped, routing.num_best)[0], axis=-1)
    chosen = jax.lax.top_k(group_scores, routing.top_groups)[1]
    is_chosen = jnp.any(jnp.arange(routing.num_groups)[:, None] == chosen[:, None, :], axis=-1)
    return jnp.where(is_chosen[:, :, None], grouped, -jnp.inf).reshape(ranked_tx.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SortedRows:
    """Each row once for each expert that it uses, sorted by expert: P = T * K rows, those that are sent nowhere last.

    Attributes:
        tokens_p: int32 `[P]`: the original row.
        experts_p: int32 `[P]`: the expert.
        counts_x: int32 `[X]`: rows of each expert.
        places_tk: int32 `[T, K]`: sorted places of each row.
    """

    tokens_p: jax.Array
    experts_p: jax.Array
    counts_x: jax.Array
    places_tk: jax.Array

    @classmethod
    def of(cls, routes: Routes, num_experts: int) -> SortedRows:
        """Sort the rows of these routes; those of one expert keep their order."""
        num_tokens, top_k = routes.ids_tk.shape
        ids_p = routes.ids_tk.reshape(-1)
        order = jnp.argsort(ids_p, stable=True)
        places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
        counts = jnp.sum(ids_p[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
        return cls(order // top_k, ids_p[order], counts, places.reshape(num_tokens, top_k))

    def sum(self, y_pe: Float[Array, "P E"], routes: Routes, num_experts: int) -> Float[Array, "T E"]:
        """Return the weighted sum of each row's results, in the order of experts; skips rows sent nowhere."""
        y_tke = y_pe[self.places_tk] * routes.weights_tk[..., None]
        return jnp.sum(jnp.where((routes.ids_tk < num_experts)[..., None], y_tke, 0.0), axis=1)
