"""An item's blocks: which they are, how they are fetched into a buffer, and what of the buffer is not seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.paged_attention.tpu import words
from jpaged.kernels.paged_attention.tpu.decode.plan import Kept, Plan, Scalars, Segments

_PIECE = 128
"""Rows of words that are made zero at once."""
_UNROLL = 8
"""DMAs that are started in a row."""


def repeat(begin: Any, end: Any, body: Callable[[Any], None]) -> None:
    """Calls the body with each number from begin on and below end."""

    def turn(i: Any, carry: None) -> None:
        body(i)
        return carry

    lax.fori_loop(begin, end, turn, None)


def _blocks(scalars: Scalars, segment: Any, item: Any, plan: Plan) -> tuple[Any, Any]:
    """The first block of an item that is seen, in the row's table, and one behind the last."""
    block_size, segments = plan.spec.layout.block_size, scalars.segments
    begin = jnp.maximum(segments.begin[segment] // block_size, item * plan.fetch_blocks)
    end = jnp.minimum(pl.cdiv(segments.end[segment], block_size), (item + 1) * plan.fetch_blocks)
    return begin, jnp.maximum(end, begin)


def following(segments: Segments, segment: Any, item: Any) -> tuple[Any, Any]:
    """The segment and the item behind an item of a segment."""
    is_last = item + 1 >= segments.last[segment]
    after = segment + is_last.astype(jnp.int32)
    return after, jnp.where(is_last, segments.first[after], item + 1)


def start(scalars: Scalars, pool_ref: Any, kept: Kept, plan: Plan) -> None:
    """Starts the DMAs of the item at the cursor, and moves the cursor."""
    layout, num_blocks = plan.spec.layout, plan.fetch_blocks
    segment, item, buffer = (kept.cursor[i] for i in range(3))
    first_block = scalars.layer[0] * layout.blocks_per_layer
    table = scalars.segments.row[segment] * plan.table_width
    begin, end = _blocks(scalars, segment, item, plan)

    def block(j: Any, strange: Any) -> Any:
        block_id = scalars.tables[table + j]
        is_outside = (block_id < 0) | (block_id >= layout.blocks_per_layer)
        source = pool_ref.at[first_block + jnp.where(is_outside, 0, block_id)]
        place = kept.chunks.at[buffer, j - item * num_blocks, :, pl.ds(0, layout.token_shape[0])]
        pltpu.make_async_copy(source, place, kept.fetched.at[buffer]).start()
        return strange | is_outside.astype(jnp.int32)

    def several(i: Any, strange: Any) -> Any:
        for j in range(_UNROLL):
            strange = block(begin + i * _UNROLL + j, strange)
        return strange

    num_several = (end - begin) // _UNROLL
    strange = lax.fori_loop(0, num_several, several, jnp.int32(0))
    kept.strange[buffer] = lax.fori_loop(begin + num_several * _UNROLL, end, block, strange)
    kept.cursor[0], kept.cursor[1] = following(scalars.segments, segment, item)
    kept.cursor[2] = buffer_after(buffer, plan)


def buffer_after(buffer: Any, plan: Plan) -> Any:
    """The buffer behind a buffer."""
    return jnp.where(buffer + 1 == plan.sizes.ring, 0, buffer + 1)


def wait(scalars: Scalars, segment: Any, item: Any, buffer: Any, kept: Kept, plan: Plan) -> None:
    """Waits for as many blocks as were fetched, by powers of two; a semaphore counts bytes, whoever sent them."""
    begin, end = _blocks(scalars, segment, item, plan)
    num_rows = plan.spec.layout.token_shape[0]
    for i in reversed(range(plan.fetch_blocks.bit_length())):

        @pl.when(((end - begin) & (1 << i)) > 0)
        def _(num_blocks: int = 1 << i) -> None:
            place = kept.chunks.at[buffer, pl.ds(0, num_blocks), :, pl.ds(0, num_rows)]
            pltpu.make_async_copy(place, place, kept.fetched.at[buffer]).wait()


def seen(scalars: Scalars, segment: Any, item: Any, plan: Plan) -> tuple[Any, Any]:
    """First token of an item that is seen, counted from the item's first, and one behind the last."""
    tokens = plan.sizes.chunk_tokens
    begin = jnp.maximum(scalars.segments.begin[segment] - item * tokens, 0)
    return begin, jnp.minimum(scalars.segments.end[segment] - item * tokens, tokens)


def clean(scalars: Scalars, segment: Any, item: Any, buffer: Any, kept: Kept, plan: Plan) -> None:
    """Makes everything zero that is not seen, and the blocks whose ids are outside of the layer."""
    tokens, num_blocks, layout = plan.sizes.chunk_tokens, plan.fetch_blocks, plan.spec.layout
    begin, end = seen(scalars, segment, item, plan)
    rows_a_token, chunk_ref = plan.sizes.pitch * plan.folds, kept.chunks.at[buffer]
    num_pieces = tokens * rows_a_token // _PIECE

    def cut(keep_begin: Any, keep_end: Any) -> Callable[[Any], None]:
        def piece(i: Any) -> None:
            row = i * _PIECE + lax.broadcasted_iota(jnp.int32, (_PIECE, words.LANES), 0)
            is_kept = (row >= keep_begin * rows_a_token) & (row < keep_end * rows_a_token)
            words.write(chunk_ref, i * _PIECE, jnp.where(is_kept, words.read(chunk_ref, i * _PIECE, _PIECE, 1), 0))

        return piece

    @pl.when((begin > 0) | (end < tokens))
    def _() -> None:
        piece = cut(begin, end)
        back = jnp.maximum(end, 0) * rows_a_token // _PIECE
        repeat(0, jnp.minimum(pl.cdiv(begin * rows_a_token, _PIECE), back), piece)
        repeat(back, num_pieces, piece)

    @pl.when(kept.strange[buffer] > 0)
    def _() -> None:
        table = scalars.segments.row[segment] * plan.table_width
        first, last = _blocks(scalars, segment, item, plan)

        def block(j: Any) -> None:
            block_id = scalars.tables[table + j]

            @pl.when((block_id < 0) | (block_id >= layout.blocks_per_layer))
            def _() -> None:
                place = kept.chunks.at[buffer, j - item * num_blocks]
                place[...] = jnp.zeros(place.shape, place.dtype)

        repeat(first, last, block)
