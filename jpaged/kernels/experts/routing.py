"""Routing of rows to experts: scores in float32, the best of them, and their weights.

`SortedRows` are the rows sorted by expert, with the inverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.kernels.mixture_kind import Routing

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

_LEAST_SUM = 1e-20


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each row.

    Attributes:
        ids_tk: int32 `[T, K]`: experts, the best first. The number of experts marks rows that are not in use, and
            experts on other devices.
        weights_tk: float32 `[T, K]`.
    """

    ids_tk: jax.Array
    weights_tk: jax.Array

    def part(self, first: jax.Array, num_experts: int) -> Routes:
        """Return the routes to a contiguous range of experts, renumbered from 0."""
        ids = self.ids_tk - first
        return Routes(jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts), self.weights_tk)


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
