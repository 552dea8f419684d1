"""Rows sorted by expert, and the inverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.kernels.experts.routing import Routes

if TYPE_CHECKING:
    from jaxtyping import Array, Float


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
