"""The keys and values of a chunk, fetched into a buffer and unpacked head by head; the three stages of an item."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.paged_attention.tpu import tables
from jpaged.kernels.paged_attention.tpu.chunks.plan import (
    LANES,
    Chunk,
    ChunkPlan,
    ChunkRefs,
    ChunkScalars,
    Item,
    Scratch,
)


def repeat(begin: Any, end: Any, body: Callable[[Any], None]) -> None:
    """Call the body with each number from begin to end."""

    def turn(i: Any, carry: None) -> None:
        body(i)
        return carry

    lax.fori_loop(begin, end, turn, None)


def fetch(
    scalars: ChunkScalars, core: Any, segment: Any, chunk: Any, refs: ChunkRefs, kept: Scratch, plan: ChunkPlan
) -> tuple[Any, Any]:
    """Return functions that start the DMAs of a chunk into a buffer, and that wait for them."""
    layout, segments = plan.spec.layout, scalars.segments
    first_block, paging = scalars.layer[0] * layout.blocks_per_layer, plan.paging
    begin = jnp.maximum(segments.begin[segment] // layout.block_size, chunk * plan.fetch_blocks)
    end = jnp.minimum(pl.cdiv(segments.end[segment], layout.block_size), (chunk + 1) * plan.fetch_blocks)

    def enter() -> None:
        page = tables.turn(segments, scalars.num_segments[0], refs.tables, kept.pages, paging)
        kept.ids[0] = page - lax.div(chunk, paging.chunks) * paging.page_blocks

    def copy(block: Any, buffer: Any, place: Any) -> Any:
        source = refs.pool.at[block]
        if plan.token_shape != layout.token_shape:
            source = source.at[:, pl.ds(core * plan.token_shape[0], plan.token_shape[0])]
        return pltpu.make_async_copy(source, kept.chunk.at[buffer, place], kept.fetched.at[buffer])

    def is_inside(block_id: Any) -> Any:
        return (block_id >= 0) & (block_id < layout.blocks_per_layer)

    def start(buffer: Any) -> None:
        is_first = chunk == lax.div(segments.begin[segment], plan.chunk_tokens)
        pl.when(is_first | (lax.rem(chunk, paging.chunks) == 0))(enter)
        first_id = kept.ids[0]
        kept.ids[1 + buffer] = first_id

        def block(j: Any, num_missing: Any) -> Any:
            block_id = kept.pages.ids[first_id + j]

            @pl.when(is_inside(block_id))
            def _() -> None:
                copy(first_block + block_id, buffer, j - chunk * plan.fetch_blocks).start()

            return num_missing + jnp.where(is_inside(block_id), 0, 1)

        kept.num_missing[buffer] = lax.fori_loop(begin, end, block, jnp.int32(0))

    def wait(buffer: Any) -> None:
        is_all = (end - begin == plan.fetch_blocks) & (kept.num_missing[buffer] == 0)

        @pl.when(is_all)
        def _() -> None:
            whole = kept.chunk.at[buffer]
            pltpu.make_async_copy(whole, whole, kept.fetched.at[buffer]).wait()

        @pl.when(jnp.logical_not(is_all))
        def _() -> None:
            repeat(begin, end, functools.partial(wait_for, buffer))

    def wait_for(buffer: Any, j: Any) -> None:
        block_id, place = kept.pages.ids[kept.ids[1 + buffer] + j], j - chunk * plan.fetch_blocks

        @pl.when(is_inside(block_id))
        def _() -> None:
            copy(0, buffer, place).wait()

        @pl.when(jnp.logical_not(is_inside(block_id)))
        def _() -> None:
            kept.chunk[buffer, place] = jnp.zeros(kept.chunk.shape[2:], kept.chunk.dtype)

    return start, wait


def unpack(kept: Scratch, buffer: Any, chunk: Chunk, begin: Any, end: Any, plan: ChunkPlan) -> None:
    """Unpack a chunk: each row of tokens becomes dense, and zero for tokens that no query of the segment sees.

    The pieces of a latent are concatenated.
    """
    layout, width = plan.spec.layout, plan.chunk_tokens
    tiles = layout.lanes // LANES
    num_words = plan.token_shape[0] * tiles
    # A word has the same lane of `pack` rows of one token. A tile of 128 lanes has the words of one row of tiles.
    words_ref = kept.chunk.at[buffer].bitcast(jnp.int32).reshape(width * num_words, LANES)

    def unpack_words(index: Any, is_masked: bool) -> None:
        for tile in range(tiles):

            def words(first: int, num_tokens: int, tile: int = tile) -> Any:
                places = pl.ds(first * num_words + index * tiles + tile, num_tokens, num_words)
                if not is_masked:
                    return words_ref[places, :]
                key_w1 = chunk.first_key + first + lax.broadcasted_iota(jnp.int32, (num_tokens, 1), 0)
                return jnp.where((key_w1 >= begin) & (key_w1 < end), words_ref[places, :], 0)

            parts = _pair(words, width) if plan.is_paired else _numbers(words(0, width), layout.dtype)
            for j, part_wl in enumerate(parts):
                row = index * layout.pack + j
                if layout.value_dim is None:
                    lanes = pl.ds(tile * LANES, LANES)
                    kept.rows[chunk.buffer + row, :, lanes] = part_wl.astype(plan.compute_dtype)
                elif row * LANES < plan.key_lanes:
                    kept.rows[chunk.buffer, :, pl.ds(row * LANES, LANES)] = part_wl.astype(plan.compute_dtype)

    def unpack_all(is_masked: bool) -> None:
        if layout.value_dim is None:
            repeat(0, plan.token_shape[0], functools.partial(unpack_words, is_masked=is_masked))
        else:
            for index in range(plan.token_shape[0]):
                unpack_words(index, is_masked)

    is_full = (begin <= chunk.first_key) & (end >= chunk.first_key + width)
    pl.when(is_full)(functools.partial(unpack_all, False))
    pl.when(jnp.logical_not(is_full))(functools.partial(unpack_all, True))


def _pair(words: Callable[[int, int], Any], width: int) -> tuple[Any, Any]:
    """Return two rows of bfloat16 [W, 128]: from the words' low halves and from their high ones."""
    a, b = words(0, width // 2), words(width // 2, width // 2)
    low = (a & jnp.int32(0xFFFF)) | (b << 16)
    high = lax.shift_right_logical(a, jnp.int32(16)) | (b & jnp.int32(-(1 << 16)))
    return pltpu.bitcast(low, jnp.bfloat16), pltpu.bitcast(high, jnp.bfloat16)


def _numbers(words: Any, dtype: jnp.dtype) -> list[Any]:
    """Return each part of the words, the lowest first, as 32-bit numbers."""
    if dtype == jnp.float32:
        return [pltpu.bitcast(words, jnp.float32)]
    if dtype == jnp.bfloat16:
        return [pltpu.bitcast(bits, jnp.float32) for bits in (words << 16, words & jnp.int32(-(1 << 16)))]
    if dtype == jnp.int8:
        return [((words << (24 - 8 * j)) >> 24).astype(jnp.float32) for j in range(4)]
    return [pltpu.bitcast((words >> (8 * j)).astype(jnp.int8), dtype).astype(jnp.float32) for j in range(4)]


def key_order(shape: tuple[int, int], axis: int, plan: ChunkPlan) -> Any:
    """Return the key of a chunk at each place of `axis`."""
    place = lax.broadcasted_iota(jnp.int32, shape, axis)
    return (place >> 1) + (place & 1) * (plan.chunk_tokens // 2) if plan.is_paired else place


LOG2_E = math.log2(math.e)
_NO_KEY = 2**30


def scores(
    scalars: ChunkScalars, chunk: Chunk, part: Any, head: Any, q_ref: Any, kept: Scratch, plan: ChunkPlan
) -> Any:
    """First stage: compute the scores of a part and one of the core's heads, in units of log 2."""
    kind = plan.spec.kind
    queries = pl.ds(pl.multiple_of(part * plan.part, plan.part), plan.part)

    def lanes_of(g: int) -> Any:
        lanes = plan.key_lanes
        return pl.ds(pl.multiple_of((head * plan.group + g) * lanes, lanes), lanes)

    q_rd = jnp.concatenate([q_ref[queries, lanes_of(g)] for g in range(plan.group)], axis=0)
    key_row = chunk.first_row + plan.head_rows * head
    s_rw = _dot(q_rd.astype(plan.compute_dtype), kept.rows[key_row], 1, plan)
    scale = scalars.scales[2 * (chunk.first_head + head)]
    if kind.soft_cap is None:
        return s_rw * (scale * LOG2_E)
    return kind.soft_cap * LOG2_E * jnp.tanh(s_rw * (scale / kind.soft_cap))


def is_seen(scalars: ChunkScalars, segment: Any, chunk: Chunk, part: Any, plan: ChunkPlan) -> Any:
    """Return which keys of the chunk each row of a part's matmuls sees."""
    segments, window = scalars.segments, plan.spec.kind.sliding_window
    key_1w = chunk.first_key + key_order((1, plan.chunk_tokens), 1, plan)
    is_there_1w = (key_1w >= segments.begin[segment]) & (key_1w < segments.end[segment])
    key_1w = jnp.where(is_there_1w, key_1w, _NO_KEY)
    query_r1 = lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0) & (plan.part - 1)
    position_r1 = segments.position[segment] + part * plan.part + query_r1
    is_seen_rw = key_1w <= position_r1
    return is_seen_rw if window is None else is_seen_rw & (position_r1 - key_1w < window)


def weights(items: list[Item], kept: Scratch, plan: ChunkPlan) -> None:
    """Second stage: compute the weights of the items' keys, and their sums."""
    for place, item in enumerate(items):
        s_rw, m_rl = kept.s[place], kept.m[item.slot]
        m_new_rl = jnp.maximum(m_rl, s_rw.max(axis=1, keepdims=True))
        p_rw, fade_rl = jnp.exp2(s_rw - wide(m_new_rl, plan.chunk_tokens)), jnp.exp2(m_rl - m_new_rl)
        sums_rl = functools.reduce(jnp.add, jnp.split(p_rw, plan.chunk_tokens // LANES, axis=1))
        kept.m[item.slot] = m_new_rl
        kept.l[item.slot] = kept.l[item.slot] * fade_rl + sums_rl
        kept.p[place], kept.fade[place] = p_rw.astype(plan.compute_dtype), fade_rl


def values(items: list[Item], kept: Scratch, plan: ChunkPlan) -> None:
    """Third stage: add the weighted values of the items' keys to their outputs."""
    for place, item in enumerate(items):
        pv_rd = _dot(kept.p[place], kept.rows[item.value_row, :, : plan.value_lanes], 0, plan)
        kept.o[item.slot] = kept.o[item.slot] * wide(kept.fade[place], plan.value_lanes) + pv_rd


def _dot(a: Any, b: Any, b_axis: int, plan: ChunkPlan) -> Any:
    precision = lax.Precision.HIGHEST if plan.compute_dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((1,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def wide(x_rl: Any, width: int) -> Any:
    """Repeat a column that fills 128 lanes to a multiple of 128 lanes."""
    return jnp.concatenate([x_rl] * (width // LANES), axis=1)
