"""Packed tokens as the input of a model, and the pooling of an encoder's hidden states over the tokens of each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jpaged.kernels.experts import ExpertsKernel
from jpaged.kernels.recurrence import RecurrentRows


@dataclass(frozen=True, slots=True)
class HeadsKernel:
    """A kernel that splits the projection of queries, keys and values and rotates them, instead of XLA.

    Attributes:
        angles: (cos, sin) `[T, D/2]` -> the angles as `turn` takes them: computed once for all layers.
        turn: (projection `[T, K, G + 2, D]`, angles, scales and epsilon of the norms of queries' and keys' heads, or
            None) -> (q_thd, k_tkd, v_tkd).
    """

    angles: Callable[[jax.Array, jax.Array], Any]
    turn: Callable[[jax.Array, Any, HeadNorms | None], tuple[jax.Array, jax.Array, jax.Array]]


HeadNorms = tuple[jax.Array, jax.Array, float]
"""Scales `[D]`, float32, of the norms of each query and each key, and their epsilon."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Rows:
    """Attributes of the rows of a matmul.

    Attributes:
        num_in_use: int32 scalar: the first rows. Outputs of the others are undefined.
        adapters_t: int32 `[T]`, the adapter slot of each row, 0 is none; None if there are no slots.
        is_used_t: bool `[T]`, the rows in use if they are not the first ones; None if they are.
    """

    num_in_use: jax.Array
    adapters_t: jax.Array | None = None
    is_used_t: jax.Array | None = None


@dataclass(frozen=True, slots=True)
class StateShardings:
    """Shardings of hidden states `[T, E]` if each device has the rows of some sequences. Hashable, static under jit.

    Attributes:
        split: over the rows, as between layers.
        whole: all rows on every device, as in feed-forwards whose matrices are split over the devices.
    """

    split: NamedSharding
    whole: NamedSharding


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class InputEmbeds:
    """Embeddings that a caller gives in place of some tokens.

    Attributes:
        is_embed_t: bool `[T]`, the tokens that they replace.
        values_te: `[T, E]` in the model's type; `[T, E (1 + n)]` if the first n layers add some to their outputs.
    """

    is_embed_t: jax.Array
    values_te: jax.Array

    def replace(self, x_te: jax.Array) -> jax.Array:
        """Return embeddings of tokens, with the given ones in their places."""
        own_te = self.values_te[:, : x_te.shape[1]]
        return jnp.where(self.is_embed_t[:, None], own_te.astype(x_te.dtype), x_te)

    def add(self, x_te: jax.Array, layer: jax.Array) -> jax.Array:
        """Return a layer's output, with what it adds in the given places."""
        width, num_added = x_te.shape[1], self.values_te.shape[1] // x_te.shape[1] - 1
        start = width * (1 + jnp.minimum(layer, num_added - 1))
        added_te = jax.lax.dynamic_slice_in_dim(self.values_te, start, width, axis=1).astype(x_te.dtype)
        return jnp.where(self.is_embed_t[:, None] & (layer < num_added), x_te + added_te, x_te)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of a call, packed in one axis T.

    Attributes:
        ids_t: int32 `[T]`, all below vocab_size.
        positions_t: int32 `[T]`, the token's position in its sequence.
        rope_lens_t: int32 `[T]`, see `jpaged.models.rope.cos_sin`; learned positions do not depend on it.
        num_tokens: int32 scalar, the number of tokens in use, the first ones; None is all. Outputs of the others are
            undefined.
        heads: the kernel that rotates heads; None is XLA, or the kernel of packed weights. Static.
        experts: the function that computes experts; None is that of one CPU device. Static.
        adapters_t: see `Rows`.
        states_te: a head's input states, `[T, E]`; None for a model that takes only tokens.
        num_column_parts: parts of the hidden states' columns, whose sums over the devices overlap with matmuls; 1 sums
            all at once. More require `Model.takes_column_parts` and the layer mode `scan`. Static.
        num_row_chunks: chunks of the rows of hidden states in parts, which divide T; see `RowChunks`. Static.
        is_used_t: see `Rows`.
        states: shardings of hidden states that are split by rows; None if every device has all rows. Static.
        recurrent: the rows of recurrent layers; None for one row that begins its sequence.
        types_t: int32 `[T]`, the type of each token: 1 in the second text of a pair; None is 0 for all.
        rope_axes_3t: int32 `[3, T]`, positions of time, row and column for rotary embedding with sections; None if all
            three are the position.
        embeds: embeddings in place of some tokens; None if there are none.
    """

    ids_t: jax.Array
    positions_t: jax.Array
    rope_lens_t: jax.Array
    num_tokens: jax.Array | None = None
    heads: HeadsKernel | None = dataclasses.field(default=None, metadata={"static": True})
    experts: ExpertsKernel | None = dataclasses.field(default=None, metadata={"static": True})
    adapters_t: jax.Array | None = None
    states_te: jax.Array | None = None
    num_column_parts: int = dataclasses.field(default=1, metadata={"static": True})
    num_row_chunks: int = dataclasses.field(default=1, metadata={"static": True})
    is_used_t: jax.Array | None = None
    states: StateShardings | None = dataclasses.field(default=None, metadata={"static": True})
    recurrent: RecurrentRows | None = None
    types_t: jax.Array | None = None
    embeds: InputEmbeds | None = None
    rope_axes_3t: jax.Array | None = None

    @property
    def rows(self) -> Rows:
        """The tokens as rows of matmuls."""
        num_in_use = jnp.int32(len(self.ids_t)) if self.num_tokens is None else self.num_tokens
        return Rows(num_in_use, self.adapters_t, self.is_used_t)


Poolings = tuple[str, ...]
"""Names of poolings, in the order of their numbers on the device."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PooledRows:
    """The rows of packed tokens, each a whole prompt whose hidden states are pooled.

    Attributes:
        rows_t: the row of each token; the number of rows for padding.
        places_t: the token's place in its row.
        starts_s: the first token of each row.
        lens_s: tokens of each row; 0 beyond the rows in use.
    """

    rows_t: jax.Array
    places_t: jax.Array
    starts_s: jax.Array
    lens_s: jax.Array

    @classmethod
    def of(cls, query_starts_s1: jax.Array, num_tokens: int) -> PooledRows:
        """Return the rows that begin at these tokens, for `num_tokens` packed tokens with padding."""
        tokens_t = jnp.arange(num_tokens)
        rows_t = jnp.searchsorted(query_starts_s1[1:], tokens_t, side="right").astype(jnp.int32)
        starts_s = query_starts_s1[:-1]
        places_t = tokens_t - starts_s.at[rows_t].get(mode="clip")
        return cls(rows_t, places_t, starts_s, query_starts_s1[1:] - starts_s)

    def types(self, pair_starts_s: jax.Array) -> jax.Array:
        """Return the type of each token: 1 in the second text of a row, from its first token on."""
        return (self.places_t >= pair_starts_s.at[self.rows_t].get(mode="clip")).astype(jnp.int32)

    def pool(self, hidden_te: jax.Array, poolings_s: jax.Array, poolings: Poolings, *, has_branches: bool) -> jax.Array:
        """Pool float32 hidden states `[T, E]` into `[S, E]`; a row's result does not depend on other rows.

        The sums are those of sentence-transformers: `mean` divides by the number of tokens,
        `mean_sqrt_len_tokens` by its root, and `weightedmean` weights the n-th token by n.

        Args:
            poolings_s: the pooling of each row, as an index in `poolings`. Rows of other poolings return their last
                token.
            has_branches: omit sums that no row needs.
        """
        number = {name: index for index, name in enumerate(poolings)}
        num_rows, last_s = len(self.starts_s), jnp.maximum(self.starts_s + self.lens_s - 1, 0)
        is_in_use_t = (self.rows_t < num_rows)[:, None]
        place_s = jnp.where(poolings_s == number["cls"], self.starts_s, last_s)
        pooled_se = hidden_te[place_s]

        def replaced(found_se: jax.Array, names: tuple[str, ...], of_rows: Callable[[], jax.Array]) -> jax.Array:
            is_one_s = jnp.isin(poolings_s, jnp.array([number[name] for name in names]))

            def replace() -> jax.Array:
                return jnp.where(is_one_s[:, None], of_rows(), found_se)

            if not has_branches:
                return replace()
            result: jax.Array = jax.lax.cond(jnp.any(is_one_s), replace, lambda: found_se)
            return result

        def mean() -> jax.Array:
            lens_s = jnp.maximum(self.lens_s, 1).astype(jnp.float32)
            is_weighted_s = poolings_s == number["weightedmean"]
            places_t = 1.0 + self.places_t.astype(jnp.float32)
            weights_t = jnp.where(is_weighted_s.at[self.rows_t].get(mode="clip"), places_t, 1.0)
            states_te = jnp.where(is_in_use_t, hidden_te * weights_t[:, None], 0)
            sums_se = jax.ops.segment_sum(states_te, self.rows_t, num_rows, indices_are_sorted=True)
            divisors_s = jnp.where(poolings_s == number["mean_sqrt_len_tokens"], jnp.sqrt(lens_s), lens_s)
            divisors_s = jnp.where(is_weighted_s, lens_s * (lens_s + 1) / 2, divisors_s)
            return sums_se / divisors_s[:, None]

        def largest() -> jax.Array:
            return jax.ops.segment_max(hidden_te, self.rows_t, num_rows, indices_are_sorted=True)

        pooled_se = replaced(pooled_se, ("mean", "mean_sqrt_len_tokens", "weightedmean"), mean)
        return replaced(pooled_se, ("max",), largest)
