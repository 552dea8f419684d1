"""Packed tokens as the input of a model."""

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
        is_used_t: see `Rows`.
        states: shardings of hidden states that are split by rows; None if every device has all rows. Static.
        recurrent: the rows of recurrent layers; None for one row that begins its sequence.
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
    is_used_t: jax.Array | None = None
    states: StateShardings | None = dataclasses.field(default=None, metadata={"static": True})
    recurrent: RecurrentRows | None = None

    @property
    def rows(self) -> Rows:
        """The tokens as rows of matmuls."""
        num_in_use = jnp.int32(len(self.ids_t)) if self.num_tokens is None else self.num_tokens
        return Rows(num_in_use, self.adapters_t, self.is_used_t)
