"""What an attention call is made of, told once: every backend gets the same full description."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jpaged.errors import InternalError
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Shaped

NewKV = tuple[jax.Array, jax.Array | None, jax.Array]
"""Keys and values [T, K, D] of the packed tokens, and each token's slot [T], which is where its row's block table puts
its position, or outside of the layer for padding: nothing is stored for it. Latents are keys without values."""
Attended = tuple[jax.Array, jax.Array]
"""Outputs [T, H, D], of latents [T, H, value_dim], in the queries' type and log-sum-exp of the scores [T, H] in
float32, with which attention over parts of a context can be merged. Tokens that belong to no row, or see no key, have 0
and minus infinity."""
Updated = tuple[jax.Array, jax.Array, jax.Array]
"""What was attended, and the pool."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The static side of a call: hashable, the same for every step.

    Attributes:
        layout: of the pool.
        kind: what is computed over it.
    """

    layout: KVLayout
    kind: AttentionKind


@dataclass(frozen=True, slots=True)
class Queries:
    """What a backend is asked about besides the pool, before anything is traced.

    Attributes:
        num_heads: query heads.
        dtype: of queries.
        num_rows: of the block tables (S).
        table_width: blocks in a row's table (M).
        num_tokens: of a call at most (T).
    """

    num_heads: int
    dtype: jnp.dtype
    num_rows: int
    table_width: int
    num_tokens: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Which tokens of the packed axis belong together, and where their contexts lie.

        packed tokens   | a a a a | b | c c | - - |        query_starts 0 4 5 7 7 7 ...
                          chunk    decode     padding

        keys of row c   | . . . . | k k k k | k k |        kv_begins 4, kv_lens 10, first_positions 8
                          skipped   seen      its own

    A query at position p sees the keys from kv_begin to the lesser of p and kv_len - 1, and of those the window's. As a
    rule a row's queries are the last tokens of its context, which it sees from its beginning: the two fields need no
    value then. Attention over a part of the context has them.

    Attributes:
        query_starts_s1: row i owns tokens query_starts[i] to query_starts[i + 1].
        kv_lens_s: tokens of the row's context, its queries included.
        block_tables_sm: the row's blocks in order; entries outside of what it sees are never used.
        num_rows: rows in use.
        first_positions_s: position of the row's first query; None is kv_len less the number of queries.
        kv_begins_s: the first key that the row sees, a multiple of the block size; None is 0.
        lists: what a backend made of the other fields for all layers of a step (`prepare_rows`), a tree of arrays; None
            where it has yet to do so.
    """

    query_starts_s1: Int[Array, "S+1"]
    kv_lens_s: Int[Array, "S"]
    block_tables_sm: Int[Array, "S M"]
    num_rows: Int[Array, ""]
    first_positions_s: Int[Array, "S"] | None = None
    kv_begins_s: Int[Array, "S"] | None = None
    lists: Any = None

    @property
    def positions(self) -> Int[Array, "S"]:
        """Position of each row's first query."""
        if self.first_positions_s is not None:
            return self.first_positions_s
        return self.kv_lens_s - (self.query_starts_s1[1:] - self.query_starts_s1[:-1])

    @property
    def begins(self) -> Int[Array, "S"]:
        """The first key that each row sees."""
        return jnp.zeros_like(self.kv_lens_s) if self.kv_begins_s is None else self.kv_begins_s


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call, as every backend takes it.

    Attributes:
        q_thd: queries, packed; not scaled.
        pool: keys and values of all layers as `spec.layout` says.
        layer: which layer's blocks are meant.
        rows: how the packed queries form rows.
        spec: the static side.
        scales_lk2: of each layer's and head's keys and values, which the pool holds divided by them; a pool of 8 bits
            has them, another has not. The two of a latent are one number.

    Raises:
        InternalError: shapes that contradict the layout.
    """

    q_thd: Float[Array, "T H D"]
    pool: Shaped[Array, "P B ..."]
    layer: Int[Array, ""] | int
    rows: RaggedRows
    spec: AttentionSpec
    scales_lk2: Float[Array, "L K 2"] | None = None

    def __post_init__(self) -> None:
        if self.spec.kind.num_sink_tokens:
            raise InternalError("sink tokens are a part of the context of their own: no kernel looks for them")
        layout, q_shape = self.spec.layout, self.q_thd.shape
        if self.pool.shape != layout.shape or self.pool.dtype != layout.storage_dtype:
            raise InternalError(
                f"the pool is {self.pool.dtype}{self.pool.shape}, its layout {layout.storage_dtype}{layout.shape}"
            )
        if q_shape[1] % layout.num_kv_heads or q_shape[2] != layout.head_dim:
            raise InternalError(
                f"queries {q_shape} do not fit {layout.num_kv_heads} key/value heads of {layout.head_dim}"
            )
        if (self.scales_lk2 is not None) != layout.is_scaled:
            raise InternalError(f"a pool of {layout.dtype} {'needs its' if layout.is_scaled else 'takes no'} scales")

    @property
    def queries(self) -> Queries:
        """What the backend is asked about."""
        num_tokens, num_heads, _ = self.q_thd.shape
        num_rows, table_width = self.rows.block_tables_sm.shape
        return Queries(num_heads, self.q_thd.dtype, num_rows, table_width, num_tokens)

    def scaled(self, new_kv: NewKV) -> NewKV:
        """New keys and values as this layer of the pool holds them: divided by their scales where it has any."""
        k_tkd, v_tkd, slots_t = new_kv
        if (v_tkd is None) != (self.spec.layout.value_dim is not None):
            raise InternalError("latents are stored without values, and other keys with them")
        if self.scales_lk2 is None:
            return new_kv
        if v_tkd is not None:
            v_tkd = v_tkd / self.scales_lk2[self.layer, :, 1:]
        return k_tkd / self.scales_lk2[self.layer, :, :1], v_tkd, slots_t


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows", "table_rows_s"], meta_fields=["spec"])
@dataclass(frozen=True, slots=True)
class ContextPart:
    """Rows that see a part of the contexts of a call's rows: attention over all parts is merged.

    Attributes:
        rows: over the same packed tokens; a token is in one of them at most.
        spec: differs from the call's in the window alone.
        table_rows_s: which of the call's rows has each one's block table; None is its own place.
    """

    rows: RaggedRows
    spec: AttentionSpec
    table_rows_s: Int[Array, "S"] | None = None
