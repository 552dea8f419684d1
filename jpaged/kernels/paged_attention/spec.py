"""The arguments of an attention call, the same for every backend, and additions to its results: sinks, other parts.

A sink is a score for each head that takes a share of every query's attention weights and has no value. With a query's
log-sum-exp (lse) sinks can be added after the kernel, and after the merge of parts of a context:

    weights with a sink     e^s_i / (e^sink + sum of e^s_j)  =  e^s_i / sum of e^s_j  x  1 / (1 + e^(sink - lse))

Learned sinks are those of gpt-oss (OpenAI, 2025); for the reasons see Xiao et al., "Efficient Streaming Language Models
with Attention Sinks" (2023).
"""

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
"""Keys and values [T, K, D] of the packed tokens, and the slot [T] of each token.

The row's block table and the token's position determine the slot. A slot outside the layer marks padding, which is not
stored. Latents are keys without values.
"""
Attended = tuple[jax.Array, jax.Array]
"""Outputs [T, H, D] (for latents [T, H, value_dim]) in the queries' type, and log-sum-exp of scores [T, H] in float32.

The log-sum-exp serves to merge attention over parts of a context. Tokens that belong to no row, or see no key, have 0
and minus infinity.
"""
Updated = tuple[jax.Array, jax.Array, jax.Array]
"""The attention results, and the pool."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The static part of a call: hashable, the same for every step.

    Attributes:
        layout: of the pool.
        kind: the attention kind.
    """

    layout: KVLayout
    kind: AttentionKind


@dataclass(frozen=True, slots=True)
class Queries:
    """Description of a call's queries and rows, for checks of a backend before anything is traced.

    Attributes:
        num_heads: query heads.
        dtype: of queries.
        num_rows: of the block tables (S).
        table_width: blocks in a row's table (M).
        num_tokens: maximum tokens of a call (T).
    """

    num_heads: int
    dtype: jnp.dtype
    num_rows: int
    table_width: int
    num_tokens: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The rows of the packed tokens, and their contexts.

        packed tokens   | a a a a | b | c c | - - |        query_starts 0 4 5 7 7 7 ...
                          chunk    decode     padding

        keys of row c   | . . . . | k k k k | k k |        kv_begins 4, kv_lens 10, first_positions 8
                          skipped   seen      its own

    A query at position p sees the keys from kv_begin to the lesser of p and kv_len - 1, and of those the window's.
    Usually a row's queries are the last tokens of the context, which it sees from its beginning: the two fields are
    None then. Attention over a part of the context sets them.

    Attributes:
        query_starts_s1: row i owns tokens query_starts[i] to query_starts[i + 1].
        kv_lens_s: tokens of the row's context, including its queries.
        block_tables_sm: the row's blocks in order; entries outside its visible range are never used.
        num_rows: rows in use.
        first_positions_s: position of the row's first query; None is kv_len less the number of queries.
        kv_begins_s: the first key that the row sees, a multiple of the block size; None is 0.
        lists: a backend's preparation for all layers of a step (`prepare_rows`), a tree of arrays; None if it has not
            been computed.
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
    """The arguments of one call, for every backend.

    Attributes:
        q_thd: queries, packed; not scaled.
        pool: keys and values of all layers in `spec.layout`.
        layer: the layer whose blocks are read.
        rows: the rows of the packed queries.
        spec: the static part.
        scales_lk2: scales of each layer's and head's keys and values, by which the pool's contents were divided; only
            for a pool of 8 bits. The two of a latent are equal.

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
            raise InternalError("sink tokens are a separate part of the context: kernels do not support them")
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
            raise InternalError(f"a pool of {layout.dtype} {'requires' if layout.is_scaled else 'has no'} scales")

    @property
    def queries(self) -> Queries:
        """Description of the queries, for the backend's checks."""
        num_tokens, num_heads, _ = self.q_thd.shape
        num_rows, table_width = self.rows.block_tables_sm.shape
        return Queries(num_heads, self.q_thd.dtype, num_rows, table_width, num_tokens)

    def scaled(self, new_kv: NewKV) -> NewKV:
        """Return new keys and values as this layer of the pool stores them: divided by their scales, if any."""
        k_tkd, v_tkd, slots_t = new_kv
        if (v_tkd is None) != (self.spec.layout.value_dim is not None):
            raise InternalError("latents must be stored without values, and other keys with values")
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
        rows: over the same packed tokens; a token is in at most one of them.
        spec: differs from the call's only in the window.
        table_rows_s: the call's row whose block table each row uses; None is the same index.
    """

    rows: RaggedRows
    spec: AttentionSpec
    table_rows_s: Int[Array, "S"] | None = None


def add_sinks(attended: Attended, sinks_h: Float[Array, "H"]) -> Attended:
    """Add sinks to attention over whole contexts; if contexts were attended in parts, after their merge.

    Args:
        attended: results of attention.
        sinks_h: the score of each head's sink: scaled, and not capped.

    Returns:
        outputs and log-sum-exp with the sinks; tokens that saw no key keep 0 and minus infinity.
    """
    o_thd, lse_th = attended
    sinks_h = sinks_h.astype(jnp.float32)
    share_th = jax.nn.sigmoid(lse_th - sinks_h)
    with_sinks_th = jnp.where(jnp.isneginf(lse_th), lse_th, jnp.logaddexp(lse_th, sinks_h))
    return (o_thd.astype(jnp.float32) * share_th[..., None]).astype(o_thd.dtype), with_sinks_th


def merge(a: Attended, b: Attended) -> Attended:
    """Merge attention over two disjoint parts of each context; a part without keys has -inf and counts nothing.

    In float32; the output is of the parts' type.
    """
    (o_a_thd, lse_a_th), (o_b_thd, lse_b_th) = a, b
    highest_th = jnp.maximum(lse_a_th, lse_b_th)
    highest_th = jnp.where(jnp.isneginf(highest_th), 0.0, highest_th)
    weight_a_th, weight_b_th = jnp.exp(lse_a_th - highest_th), jnp.exp(lse_b_th - highest_th)
    total_th = weight_a_th + weight_b_th
    share_a_th, share_b_th = (
        weight_th / jnp.where(total_th > 0, total_th, 1) for weight_th in (weight_a_th, weight_b_th)
    )
    o_thd = share_a_th[..., None] * o_a_thd.astype(jnp.float32) + share_b_th[..., None] * o_b_thd.astype(jnp.float32)
    return o_thd.astype(o_a_thd.dtype), highest_th + jnp.log(total_th)
