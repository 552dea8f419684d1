"""Paged attention in plain XLA: the specification of the operation, and how CPUs run it.

    for each row in use                               (a dynamic loop: unused rows cost nothing)
        for each tile of its queries                  (one query alone when the row decodes)
            for each chunk of its context             (only chunks that the tile can see)
                gather the chunk's blocks, update the running maximum, sum and output

The running (online) softmax is that of "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (Kwon et al., 2023), block by block, as in FlashAttention: with m the maximum and l the sum so far,

    m' = max(m, max s)      l' = l e^(m - m') + sum e^(s - m')      o' = o e^(m - m') + e^(s - m') v

so the cost follows the contexts' real lengths, not the longest that is allowed. Everything is accumulated in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.kernels.kv_layout import split_rows
from jpaged.kernels.paged_attention.spec import Attended, AttentionCall, AttentionSpec

CHUNK_TOKENS = 128
"""Context tokens that one turn of the inner loop reads. 64 to 256 measure alike on CPUs, 512 is half as fast."""
TILE_QUERIES = 64
"""Queries of a prefill row that share the reading of a chunk."""

_LOWEST = -1e30
"""Start of the running maximum: finite, so that a chunk without a visible key leaves no NaN."""


def attend(call: AttentionCall) -> Attended:
    """See `jpaged.kernels.paged_attention.paged_attention`."""
    q_thd, rows, spec = call.q_thd, call.rows, call.spec
    num_tokens, num_heads, head_dim = q_thd.shape
    num_kv_heads = spec.layout.num_kv_heads
    tile = min(TILE_QUERIES, num_tokens)
    # A tile may reach beyond the last token: the padding keeps it from being moved back onto its neighbours.
    q_tkgd = jnp.pad(q_thd.astype(jnp.float32) * spec.kind.scale, ((0, tile), (0, 0), (0, 0)))
    q_tkgd = q_tkgd.reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    tables_sm = _pad_tables(rows.block_tables_sm, spec)
    positions_s, begins_s = rows.positions, rows.begins
    scales_k2 = None if call.scales_lk2 is None else call.scales_lk2[call.layer]

    def row(i: jax.Array, out: _Out) -> _Out:
        start, end = rows.query_starts_s1[i], rows.query_starts_s1[i + 1]
        context = _Context(call.pool, call.layer, tables_sm[i], begins_s[i], rows.kv_lens_s[i], scales_k2)

        def attend(width: int, place: jax.Array, out: _Out) -> _Out:
            position, num_queries = positions_s[i] + place - start, jnp.minimum(width, end - place)
            q_qkgd = lax.dynamic_slice_in_dim(q_tkgd, place, width)
            return _store(out, _attend_tile(q_qkgd, position, num_queries, context, spec), place, num_queries)

        # A loop of no or one turn instead of a condition: its carry is updated in place.
        is_decode = end - start == 1
        out = lax.fori_loop(0, is_decode.astype(jnp.int32), lambda _, out: attend(1, start, out), out)
        num_tiles = jnp.where(is_decode, 0, (end - start + tile - 1) // tile)
        return lax.fori_loop(0, num_tiles, lambda j, out: attend(tile, start + j * tile, out), out)

    out = jnp.zeros(q_tkgd.shape, jnp.float32), jnp.full(q_tkgd.shape[:-1], -jnp.inf)
    num_rows = jnp.minimum(rows.num_rows, rows.kv_lens_s.shape[0])
    o_tkgd, lse_tkg = lax.fori_loop(0, num_rows, row, out)
    o_thd = o_tkgd[:num_tokens].reshape(q_thd.shape).astype(q_thd.dtype)
    return o_thd, lse_tkg[:num_tokens].reshape(num_tokens, num_heads)


_Out = tuple[jax.Array, jax.Array]  # output [T, K, G, D] and log-sum-exp [T, K, G]; or those of one tile


class _Context(NamedTuple):
    """One row's context: its table and the keys from begin to end, in a layer of the pool."""

    pool: jax.Array
    layer: jax.Array | int
    table_m: jax.Array
    begin: jax.Array
    end: jax.Array
    scales_k2: jax.Array | None


def _chunk_blocks(spec: AttentionSpec) -> int:
    return max(1, CHUNK_TOKENS // spec.layout.block_size)


def _pad_tables(block_tables_sm: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Pads tables to whole chunks of blocks, so that the last chunk is not moved back."""
    return jnp.pad(block_tables_sm, ((0, 0), (0, -block_tables_sm.shape[1] % _chunk_blocks(spec))))


def _attend_tile(
    q_qkgd: jax.Array, position: jax.Array, num_queries: jax.Array, context: _Context, spec: AttentionSpec
) -> _Out:
    """One tile of queries at `position`, `position + 1`, ... over the chunks that it can see."""
    table_m = context.table_m
    chunk_tokens = _chunk_blocks(spec) * spec.layout.block_size
    num_seen = jnp.minimum(context.end, position + num_queries)
    end = jnp.minimum((num_seen + chunk_tokens - 1) // chunk_tokens, table_m.shape[0] // _chunk_blocks(spec))
    begin = context.begin
    if spec.kind.sliding_window is not None:
        begin = jnp.maximum(begin, position - spec.kind.sliding_window + 1)
    begin = begin // chunk_tokens

    q_kqgd = q_qkgd.transpose(1, 0, 2, 3)
    positions_q = position + jnp.arange(q_qkgd.shape[0])

    def chunk(c: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        m_kqg, l_kqg, o_kqgd = state
        k_wkd, v_wkd = _read_chunk(c, context, spec)
        s_kqgw = _scores(q_kqgd, k_wkd, positions_q, (c * chunk_tokens, context), spec)
        m_new_kqg = jnp.maximum(m_kqg, s_kqgw.max(axis=-1))
        p_kqgw = jnp.exp(s_kqgw - m_new_kqg[..., None])
        fade_kqg = jnp.exp(m_kqg - m_new_kqg)
        pv_kqgd = _weighted_sum(p_kqgw, v_wkd)
        return m_new_kqg, l_kqg * fade_kqg + p_kqgw.sum(axis=-1), o_kqgd * fade_kqg[..., None] + pv_kqgd

    empty = jnp.zeros(q_kqgd.shape[:-1])
    m_kqg, l_kqg, o_kqgd = lax.fori_loop(begin, end, chunk, (empty + _LOWEST, empty, jnp.zeros(q_kqgd.shape)))
    has_keys = l_kqg > 0
    lse_kqg = jnp.where(has_keys, m_kqg + jnp.log(jnp.where(has_keys, l_kqg, 1)), -jnp.inf)
    o_kqgd = o_kqgd / jnp.where(has_keys, l_kqg, 1)[..., None]
    return o_kqgd.transpose(1, 0, 2, 3), lse_kqg.transpose(1, 0, 2)


def _read_chunk(c: jax.Array, context: _Context, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """Keys and values of chunk c in float32; zero outside of the context, whatever the memory holds there."""
    num_blocks, layout = _chunk_blocks(spec), spec.layout
    ids_n = lax.dynamic_slice_in_dim(context.table_m, c * num_blocks, num_blocks)
    rows_nbkd = layout.gather(context.pool, context.layer, ids_n).astype(jnp.float32)
    rows_wkd = rows_nbkd.reshape(-1, *rows_nbkd.shape[2:])
    places_w = c * rows_wkd.shape[0] + jnp.arange(rows_wkd.shape[0])
    is_context_w = (places_w >= context.begin) & (places_w < context.end)
    k_wkd, v_wkd = split_rows(jnp.where(is_context_w[:, None, None], rows_wkd, 0))
    if context.scales_k2 is None:
        return k_wkd, v_wkd
    return k_wkd * context.scales_k2[:, :1], v_wkd * context.scales_k2[:, 1:]


def _scores(
    q_kqgd: jax.Array,
    k_wkd: jax.Array,
    positions_q: jax.Array,
    keys: tuple[jax.Array, _Context],
    spec: AttentionSpec,
) -> jax.Array:
    """Scores [K, Q, G, W]; minus infinity where a query does not see a key. `keys`: the first one's place, of what."""
    s_kqgw = _dot_products(q_kqgd, k_wkd)
    if spec.kind.soft_cap is not None:
        s_kqgw = spec.kind.soft_cap * jnp.tanh(s_kqgw / spec.kind.soft_cap)
    first_key, context = keys
    places_w = first_key + jnp.arange(k_wkd.shape[0])
    distance_qw = positions_q[:, None] - places_w[None, :]
    is_seen_qw = (distance_qw >= 0) & (places_w >= context.begin) & (places_w < context.end)
    if spec.kind.sliding_window is not None:
        is_seen_qw &= distance_qw < spec.kind.sliding_window
    return jnp.where(is_seen_qw[:, None, :], s_kqgw, -jnp.inf)


# For a query alone, CPUs multiply and sum a quarter faster than they transpose and call a matrix product.


def _dot_products(q_kqgd: jax.Array, k_wkd: jax.Array) -> jax.Array:
    if q_kqgd.shape[1] == 1:
        return (q_kqgd[:, :, :, None] * k_wkd.transpose(1, 0, 2)[:, None, None]).sum(axis=-1)
    return jnp.einsum("kqgd,wkd->kqgw", q_kqgd, k_wkd, precision=lax.Precision.HIGHEST)


def _weighted_sum(p_kqgw: jax.Array, v_wkd: jax.Array) -> jax.Array:
    if p_kqgw.shape[1] == 1:
        return (p_kqgw[..., None] * v_wkd.transpose(1, 0, 2)[:, None, None]).sum(axis=-2)
    return jnp.einsum("kqgw,wkd->kqgd", p_kqgw, v_wkd, precision=lax.Precision.HIGHEST)


def _store(out: _Out, part: _Out, place: jax.Array, num_queries: jax.Array) -> _Out:
    """Puts a tile's results in place; its queries beyond num_queries belong to other rows and stay."""

    def put(whole: jax.Array, new: jax.Array) -> jax.Array:
        is_ours = (jnp.arange(new.shape[0]) < num_queries).reshape(-1, *(1,) * (new.ndim - 1))
        old = lax.dynamic_slice_in_dim(whole, place, new.shape[0])
        return lax.dynamic_update_slice_in_dim(whole, jnp.where(is_ours, new, old), place, axis=0)

    return put(out[0], part[0]), put(out[1], part[1])
