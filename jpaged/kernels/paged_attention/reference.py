"""Paged attention in plain XLA: the specification of the operation, and the fallback without a kernel.

    for each group of segments                        a segment: a decoding row, or a tile of a row's queries
        for each chunk of the longest's context       (only chunks that one of the group can see)
            gather that chunk's blocks of every segment, update their running maxima, sums and outputs

The running (online) softmax is that of "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (Kwon et al., 2023), block by block, as in FlashAttention: with m the maximum and l the sum so far,

    m' = max(m, max s)      l' = l e^(m - m') + sum e^(s - m')      o' = o e^(m - m') + e^(s - m') v

so the cost follows the contexts' actual lengths, not the maximum: segments are sorted by length, so that those of a
group have similar lengths. A chunk of which a segment sees nothing changes no bit of the segment's sums, so that the
other segments of the group do not matter. Everything is accumulated in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.kernels.kv_layout import KVLayout, output_dim, split_rows
from jpaged.kernels.paged_attention.spec import Attended, AttentionCall, AttentionSpec

CHUNK_TOKENS = 128
"""Context tokens of a segment that one turn of the inner loop reads.

On CPUs 64 to 256 are equally fast, 512 is half as fast.
"""
TILE_QUERIES = 64
"""Queries of a prefill row that share the reading of a chunk."""

GROUP_ROWS = 32
"""Decoding rows processed together in each turn on accelerators."""
GROUP_TILES = 8
"""Tiles of prefill rows processed together in each turn on accelerators."""

_LOWEST = -1e30
"""Start of the running maximum: finite, so that a chunk without a visible key leaves no NaN."""


class _RowSegments(NamedTuple):
    """Queries of one row that read its context together, each field a list; entries after the last are all 0.

    Attributes:
        rows: the row.
        places: of the first among the packed tokens.
        lens: number of queries.
        positions: of the first in its row's context.
        begins: the first chunk that any of them sees.
        ends: the end of the chunks that any of them sees.
    """

    rows: jax.Array
    places: jax.Array
    lens: jax.Array
    positions: jax.Array
    begins: jax.Array
    ends: jax.Array


class _Running(NamedTuple):
    """The running softmax of n segments: maxima and sums [n, K, Q, G], outputs [n, K, Q, G, D]."""

    m: jax.Array
    l: jax.Array
    o: jax.Array


_Out = tuple[jax.Array, jax.Array]  # output [T, K, G, D] and log-sum-exp [T, K, G]


def attend(call: AttentionCall) -> Attended:
    """See `jpaged.kernels.paged_attention.paged_attention`."""
    q_thd, layout = call.q_thd, call.spec.layout
    num_tokens, num_heads, head_dim = q_thd.shape
    shape = (num_tokens, layout.num_kv_heads, num_heads // layout.num_kv_heads, head_dim)
    q_tkgd = (q_thd.astype(jnp.float32) * call.spec.kind.scale).reshape(shape)
    out = jnp.zeros((*shape[:-1], output_dim(layout)), jnp.float32), jnp.full(shape[:-1], -jnp.inf)
    for tile in (1, min(TILE_QUERIES, num_tokens)) if num_tokens > 1 else (1,):
        segments = _segments(call, tile)
        out = _attend_groups(call, q_tkgd, segments, out, tile)
    o_tkgd, lse_tkg = out
    return o_tkgd.reshape(num_tokens, num_heads, -1).astype(q_thd.dtype), lse_tkg.reshape(num_tokens, num_heads)


def _group_size(tile: int, layout: KVLayout) -> int:
    """Return the number of segments processed together in each turn.

    A turn costs an accelerator about the same whatever their number. A CPU's caches hold the chunk of one: with 16
    segments and the heads of Llama 3 it takes eight times as long per key.
    """
    if layout.form == "cpu":
        return 1
    return GROUP_ROWS if tile == 1 else GROUP_TILES


def _chunk_blocks(spec: AttentionSpec) -> int:
    return max(1, CHUNK_TOKENS // spec.layout.block_size)


def _segments(call: AttentionCall, tile: int) -> _RowSegments:
    """Return the segments of the rows with one query (tile 1), or with more, sorted by descending context length."""
    rows, spec, num_tokens = call.rows, call.spec, call.q_thd.shape[0]
    starts_s, num_rows = rows.query_starts_s1[:-1], rows.kv_lens_s.shape[0]
    nums_s = rows.query_starts_s1[1:] - starts_s
    is_ours_s = (jnp.arange(num_rows) < rows.num_rows) & ((nums_s == 1) if tile == 1 else (nums_s > 1))
    tiles_s = jnp.where(is_ours_s, -(-nums_s // tile), 0)
    lasts_s = jnp.cumsum(tiles_s)
    most = min(num_rows, num_tokens) if tile == 1 else num_tokens // tile + min(num_rows, num_tokens // 2)
    i_n = jnp.arange(most)
    row_n = jnp.minimum((i_n[:, None] >= lasts_s).sum(axis=1), num_rows - 1)
    first_n = (i_n - (lasts_s - tiles_s)[row_n]) * tile
    len_n = jnp.where(i_n < lasts_s[-1], jnp.minimum(tile, nums_s[row_n] - first_n), 0)
    position_n = rows.positions[row_n] + first_n
    begin_n = rows.begins[row_n]
    if spec.kind.sliding_window is not None:
        begin_n = jnp.maximum(begin_n, position_n - spec.kind.sliding_window + 1)
    chunk_tokens = _chunk_blocks(spec) * spec.layout.block_size
    seen_n = jnp.minimum(rows.kv_lens_s[row_n], position_n + len_n)
    end_n = jnp.minimum(-(-seen_n // chunk_tokens), -(-rows.block_tables_sm.shape[1] // _chunk_blocks(spec)))
    begin_n = jnp.maximum(begin_n, 0) // chunk_tokens
    unsorted = _RowSegments(row_n, starts_s[row_n] + first_n, len_n, position_n, begin_n, jnp.maximum(begin_n, end_n))
    unsorted = _RowSegments(*(jnp.where(len_n > 0, field, 0).astype(jnp.int32) for field in unsorted))
    order_n = jnp.argsort(jnp.where(len_n > 0, unsorted.begins - unsorted.ends, 1))
    return _RowSegments(*(field[order_n] for field in unsorted))


def _attend_groups(
    call: AttentionCall,
    q_tkgd: jax.Array,
    segments: _RowSegments,
    out: _Out,
    tile: int,
) -> _Out:
    """Attend all segments of at most `tile` queries, and put the results in their places."""
    num_tokens, most = q_tkgd.shape[0], segments.lens.shape[0]
    size = min(_group_size(tile, call.spec.layout), most)
    padded = _RowSegments(*(jnp.pad(field, (0, -most % size)) for field in segments))
    num_groups = ((segments.lens > 0).sum(dtype=jnp.int32) + size - 1) // size

    def group(i: jax.Array, out: _Out) -> _Out:
        ours = _RowSegments(*(lax.dynamic_slice_in_dim(field, i * size, size) for field in padded))
        query_q = jnp.arange(tile)
        places_nq = ours.places[:, None] + query_q
        q_nqkgd = q_tkgd.at[places_nq].get(mode="clip")
        parts = _attend_segments(call, q_nqkgd.transpose(0, 2, 1, 3, 4), ours)
        places_nq = jnp.where(query_q < ours.lens[:, None], places_nq, num_tokens)
        o_tkgd, lse_tkg = (
            whole.at[places_nq].set(jnp.moveaxis(part, 1, 2), mode="drop")
            for whole, part in zip(out, parts, strict=True)
        )
        return o_tkgd, lse_tkg

    return lax.fori_loop(0, num_groups, group, out)


def _attend_segments(call: AttentionCall, q_nkqgd: jax.Array, segments: _RowSegments) -> tuple[jax.Array, jax.Array]:
    """Return outputs [n, K, Q, G, D] and log-sum-exp [n, K, Q, G] of the segments' queries."""

    def chunk(j: jax.Array, running: _Running) -> _Running:
        chunks_n = segments.begins + j
        k_nwkd, v_nwkd, is_context_nw = _read_chunks(call, chunks_n, segments)
        s_nkqgw = _scores(q_nkqgd, k_nwkd, chunks_n, segments, is_context_nw, call.spec)
        m_new = jnp.maximum(running.m, s_nkqgw.max(axis=-1))
        p_nkqgw = jnp.exp(s_nkqgw - m_new[..., None])
        fade = jnp.exp(running.m - m_new)
        o = running.o * fade[..., None] + _weighted_sum(p_nkqgw, v_nwkd)
        return _Running(m_new, running.l * fade + p_nkqgw.sum(axis=-1), o)

    empty = jnp.zeros(q_nkqgd.shape[:-1])
    begin = _Running(empty + _LOWEST, empty, jnp.zeros((*q_nkqgd.shape[:-1], output_dim(call.spec.layout))))
    m, l, o = lax.fori_loop(0, (segments.ends - segments.begins).max(), chunk, begin)
    has_keys = l > 0
    lse = jnp.where(has_keys, m + jnp.log(jnp.where(has_keys, l, 1)), -jnp.inf)
    return o / jnp.where(has_keys, l, 1)[..., None], lse


def _read_chunks(
    call: AttentionCall, chunks_n: jax.Array, segments: _RowSegments
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return keys and values [n, W, K, D] in float32 of each segment's chunk, and which of them belong to its context.

    They are zero outside the context and before its window, whatever the memory holds there. A segment that has no such
    chunk reads the null block.
    """
    spec, layout, tables_sm = call.spec, call.spec.layout, call.rows.block_tables_sm
    num_blocks = _chunk_blocks(spec)
    columns_nb = chunks_n[:, None] * num_blocks + jnp.arange(num_blocks)
    is_block_nb = (chunks_n < segments.ends)[:, None] & (columns_nb < tables_sm.shape[1])
    ids_nb = jnp.where(is_block_nb, tables_sm.at[segments.rows[:, None], columns_nb].get(mode="clip"), 0)
    blocks = layout.gather(call.pool, call.layer, ids_nb.reshape(-1)).astype(jnp.float32)
    rows_nwkd = blocks.reshape(chunks_n.shape[0], -1, *blocks.shape[2:])
    num_keys = rows_nwkd.shape[1]
    places_nw = chunks_n[:, None] * num_keys + jnp.arange(num_keys)
    begins_n = call.rows.begins[segments.rows]
    if spec.kind.sliding_window is not None:  # earlier blocks were freed
        begins_n = jnp.maximum(begins_n, segments.positions - spec.kind.sliding_window + 1)
    is_context_nw = (places_nw >= begins_n[:, None]) & (places_nw < call.rows.kv_lens_s[segments.rows][:, None])
    is_context_nw &= jnp.repeat(is_block_nb, layout.block_size, axis=1)
    k_nwkd, v_nwkd = split_rows(jnp.where(is_context_nw[..., None, None], rows_nwkd, 0), layout.value_dim)
    if call.scales_lk2 is not None:
        scales_k2 = call.scales_lk2[call.layer]
        k_nwkd, v_nwkd = k_nwkd * scales_k2[:, :1], v_nwkd * scales_k2[:, 1:]
    return k_nwkd, v_nwkd, is_context_nw


def _scores(
    q_nkqgd: jax.Array,
    k_nwkd: jax.Array,
    chunks_n: jax.Array,
    segments: _RowSegments,
    is_context_nw: jax.Array,
    spec: AttentionSpec,
) -> jax.Array:
    """Return scores [n, K, Q, G, W]; minus infinity for keys that a query does not see."""
    s_nkqgw = _dot_products(q_nkqgd, k_nwkd)
    if spec.kind.soft_cap is not None:
        s_nkqgw = spec.kind.soft_cap * jnp.tanh(s_nkqgw / spec.kind.soft_cap)
    num_keys = k_nwkd.shape[1]
    positions_nq = segments.positions[:, None] + jnp.arange(q_nkqgd.shape[2])
    places_nw = chunks_n[:, None] * num_keys + jnp.arange(num_keys)
    distance_nqw = positions_nq[:, :, None] - places_nw[:, None, :]
    is_seen_nqw = (distance_nqw >= 0) & is_context_nw[:, None]
    if spec.kind.sliding_window is not None:
        is_seen_nqw &= distance_nqw < spec.kind.sliding_window
    return jnp.where(is_seen_nqw[:, None, :, None], s_nkqgw, -jnp.inf)


# For a single query, on CPUs multiplication and sum are a quarter faster than transposition and a matmul.


def _dot_products(q_nkqgd: jax.Array, k_nwkd: jax.Array) -> jax.Array:
    if q_nkqgd.shape[2] == 1:
        return (q_nkqgd[..., None, :] * k_nwkd.transpose(0, 2, 1, 3)[:, :, None, None]).sum(axis=-1)
    return jnp.einsum("nkqgd,nwkd->nkqgw", q_nkqgd, k_nwkd, precision=lax.Precision.HIGHEST)


def _weighted_sum(p_nkqgw: jax.Array, v_nwkd: jax.Array) -> jax.Array:
    if p_nkqgw.shape[2] == 1:
        return (p_nkqgw[..., None] * v_nwkd.transpose(0, 2, 1, 3)[:, :, None, None]).sum(axis=-2)
    return jnp.einsum("nkqgw,nwkd->nkqgd", p_nkqgw, v_nwkd, precision=lax.Precision.HIGHEST)
