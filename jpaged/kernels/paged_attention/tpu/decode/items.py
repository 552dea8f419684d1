"""An item's blocks: their ids, their copies into a buffer, and clearing of the parts that are not seen.

Before them, a step's new keys and values are stored in the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.tpu import tables, words
from jpaged.kernels.paged_attention.tpu.decode.plan import DecodePlan, DecodeRefs, DecodeScalars, DecodeSegments, Kept

_PIECE = 128
"""Rows of words that are cleared at once."""
_UNROLL = 16
"""DMAs that an unrolled loop starts."""
_PARTIAL, _STRANGE = 1, 2
"""Flags of an item: some tokens are not seen; some ids are outside the layer."""


def repeat(begin: Any, end: Any, body: Callable[[Any], None]) -> None:
    """Call the body with each number from begin on and below end."""

    def turn(i: Any, carry: None) -> None:
        body(i)
        return carry

    lax.fori_loop(begin, end, turn, None)


def _blocks(scalars: DecodeScalars, segment: Any, item: Any, plan: DecodePlan) -> tuple[Any, Any]:
    """Return the range of an item's visible blocks, relative to the item's first."""
    shift, num_blocks = plan.spec.layout.block_size.bit_length() - 1, plan.fetch_blocks
    begin = jnp.maximum((scalars.segments.begin[segment] >> shift) - item * num_blocks, 0)
    end = (scalars.segments.end[segment] + (1 << shift) - 1 >> shift) - item * num_blocks
    return begin, jnp.clip(end, begin, num_blocks)


def following(segments: DecodeSegments, segment: Any, item: Any) -> tuple[Any, Any]:
    """Return the segment and the item after an item of a segment."""
    is_last = item + 1 >= segments.last[segment]
    after = segment + is_last.astype(jnp.int32)
    return after, jnp.where(is_last, segments.first[after], item + 1)


def start(scalars: DecodeScalars, refs: DecodeRefs, kept: Kept, plan: DecodePlan) -> None:
    """Start the DMAs of the item at the cursor, and move the cursor."""
    layout, num_blocks, tokens = plan.spec.layout, plan.fetch_blocks, plan.sizes.chunk_tokens
    segment, item, buffer = (kept.cursor[i] for i in range(3))
    _enter(scalars, segment, item, refs, kept, plan)
    first_id = kept.ids[0] + item * num_blocks
    kept.ids[1 + buffer] = first_id
    layer_ref = refs.pool.at[pl.ds(scalars.layer[0] * layout.blocks_per_layer, layout.blocks_per_layer)]
    is_whole = (scalars.segments.begin[segment] <= item * tokens) & (
        scalars.segments.end[segment] >= (item + 1) * tokens
    )

    def block(j: Any, greatest: Any) -> Any:
        # As unsigned numbers, negative ids exceed every layer's blocks.
        block_id = kept.pages.ids[first_id + j].astype(jnp.uint32)
        source = layer_ref.at[jnp.minimum(block_id, layout.blocks_per_layer - 1).astype(jnp.int32)]
        place = kept.chunks.at[buffer, j, :, pl.ds(0, layout.token_shape[0])]
        pltpu.make_async_copy(source, place, kept.fetched.at[buffer]).start()
        return jnp.maximum(greatest, block_id)

    def blocks(begin: Any, end: Any, unroll: int) -> Any:
        """Return 1 if one of these ids is outside the layer."""

        def several(i: Any, greatest: Any) -> Any:
            for j in range(unroll):
                greatest = block(begin + i * unroll + j, greatest)
            return greatest

        num_several = lax.div(end - begin, unroll)
        greatest = lax.fori_loop(0, num_several, several, jnp.uint32(0))
        greatest = lax.fori_loop(begin + num_several * unroll, end, block, greatest)
        return (greatest >= layout.blocks_per_layer).astype(jnp.int32)

    @pl.when(is_whole)
    def _() -> None:
        kept.special[buffer] = blocks(0, num_blocks, min(num_blocks, _UNROLL)) * _STRANGE

    @pl.when(jnp.logical_not(is_whole))
    def _() -> None:
        begin, end = _blocks(scalars, segment, item, plan)
        kept.special[buffer] = blocks(begin, end, _UNROLL) * _STRANGE + _PARTIAL

    kept.cursor[0], kept.cursor[1] = following(scalars.segments, segment, item)
    kept.cursor[2] = buffer_after(buffer, plan)


def _enter(scalars: DecodeScalars, segment: Any, item: Any, refs: DecodeRefs, kept: Kept, plan: DecodePlan) -> None:
    """Switch to the next page if the item is the first whose ids are in it."""
    paging, segments = plan.paging, scalars.segments

    @pl.when((item == segments.first[segment]) | (item & (paging.chunks - 1) == 0))
    def _() -> None:
        end_core = scalars.cores[pl.program_id(0) + 1]
        place = tables.turn(segments, end_core, refs.tables, kept.pages, paging)
        kept.ids[0] = place - (item >> paging.chunks.bit_length() - 1) * paging.page_blocks


def buffer_after(buffer: Any, plan: DecodePlan) -> Any:
    """Return the buffer after a buffer."""
    return jnp.where(buffer + 1 == plan.sizes.ring, 0, buffer + 1)


def receive(scalars: DecodeScalars, segment: Any, item: Any, buffer: Any, kept: Kept, plan: DecodePlan) -> None:
    """Wait for an item's blocks, and clear everything that is not seen."""
    special, num_rows = kept.special[buffer], plan.spec.layout.token_shape[0]

    def wait(num_blocks: int) -> None:
        place = kept.chunks.at[buffer, pl.ds(0, num_blocks), :, pl.ds(0, num_rows)]
        pltpu.make_async_copy(place, place, kept.fetched.at[buffer]).wait()

    @pl.when(special & _PARTIAL == 0)
    def _() -> None:
        wait(plan.fetch_blocks)

    @pl.when(special > 0)
    def _() -> None:
        begin, end = _blocks(scalars, segment, item, plan)

        @pl.when(special & _PARTIAL > 0)
        def _() -> None:
            # By powers of two: a semaphore counts bytes, whatever their source.
            for i in reversed(range(plan.fetch_blocks.bit_length())):
                pl.when(((end - begin) & (1 << i)) > 0)(functools.partial(wait, 1 << i))
            _clean(*seen(scalars, segment, item, plan), buffer, kept, plan)

        @pl.when(special & _STRANGE > 0)
        def _() -> None:
            repeat(begin, end, functools.partial(_clean_strange, buffer=buffer, kept=kept, plan=plan))


def seen(scalars: DecodeScalars, segment: Any, item: Any, plan: DecodePlan) -> tuple[Any, Any]:
    """Return the range of an item's visible tokens, relative to the item's first."""
    tokens = plan.sizes.chunk_tokens
    begin = jnp.maximum(scalars.segments.begin[segment] - item * tokens, 0)
    return begin, jnp.minimum(scalars.segments.end[segment] - item * tokens, tokens)


def _clean(begin: Any, end: Any, buffer: Any, kept: Kept, plan: DecodePlan) -> None:
    """Clear the tokens before begin and from end on."""
    rows_a_token, chunk_ref = plan.sizes.pitch * plan.folds, kept.chunks.at[buffer]
    num_pieces = plan.sizes.chunk_tokens * rows_a_token // _PIECE

    def piece(i: Any) -> None:
        row = i * _PIECE + lax.broadcasted_iota(jnp.int32, (_PIECE, words.LANES), 0)
        is_kept = (row >= begin * rows_a_token) & (row < end * rows_a_token)
        words.write(chunk_ref, i * _PIECE, jnp.where(is_kept, words.read(chunk_ref, i * _PIECE, _PIECE, 1), 0))

    back = jnp.maximum(end, 0) * rows_a_token // _PIECE
    repeat(0, jnp.minimum(pl.cdiv(begin * rows_a_token, _PIECE), back), piece)
    repeat(back, num_pieces, piece)


def _clean_strange(j: Any, buffer: Any, kept: Kept, plan: DecodePlan) -> None:
    """Clear a block of the item if its id is outside the layer."""
    block_id = kept.pages.ids[kept.ids[1 + buffer] + j]

    @pl.when((block_id < 0) | (block_id >= plan.spec.layout.blocks_per_layer))
    def _() -> None:
        place = kept.chunks.at[buffer, j]
        place[...] = jnp.zeros(place.shape, place.dtype)


def store(writes: tuple[Any, ...], layer: Any, new_ref: Any, pool_ref: Any, written: Any, layout: KVLayout) -> None:
    """Store every new token in its slot; whole blocks in one DMA each. Returns when all have arrived.

    Args:
        writes: (slots [T], whether B tokens from here on fill a block [T]), in scalar memory.
        layer: the layer whose blocks are written.
        new_ref: [T, R, pack, lanes], anywhere.
        pool_ref: of all layers.
        written: semaphores of whole blocks and of single tokens.
        layout: of the pool.
    """
    slots_ref, is_whole_ref = writes
    block_size, num_tokens = layout.block_size, new_ref.shape[0]
    num_slots, first_block = layout.blocks_per_layer * block_size, layer * layout.blocks_per_layer

    def copy_block(t: Any, block: Any) -> Any:
        return pltpu.make_async_copy(new_ref.at[pl.ds(t, block_size)], pool_ref.at[block], written.at[0])

    def copy_token(t: Any, block: Any, offset: Any) -> Any:
        # Slices instead of indices: the interpreter of jax 0.10 and 0.11 ignores that an index refers to a part of a
        # whole.
        return pltpu.make_async_copy(new_ref.at[pl.ds(t, 1)], pool_ref.at[block, pl.ds(offset, 1)], written.at[1])

    def start(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        t, num_blocks, num_singles = state
        slot = slots_ref[t]
        is_inside = (slot >= 0) & (slot < num_slots)
        is_whole = is_inside & (is_whole_ref[t] > 0)
        is_single = is_inside & (is_whole_ref[t] == 0)

        @pl.when(is_whole)
        def _() -> None:
            if num_tokens >= block_size:
                copy_block(t, first_block + slot // block_size).start()

        @pl.when(is_single)
        def _() -> None:
            copy_token(t, first_block + slot // block_size, lax.rem(slot, block_size)).start()

        step = jnp.where(is_whole, block_size, 1)
        return t + step, num_blocks + is_whole.astype(jnp.int32), num_singles + is_single.astype(jnp.int32)

    zero = jnp.int32(0)
    _, num_blocks, num_singles = lax.while_loop(lambda state: state[0] < num_tokens, start, (zero, zero, zero))
    if num_tokens >= block_size:
        _repeat(num_blocks, lambda _: copy_block(0, 0).wait())
    _repeat(num_singles, lambda _: copy_token(0, 0, 0).wait())


def _repeat(num_turns: Any, body: Callable[[Any], None]) -> None:
    def turn(i: Any, carry: None) -> None:
        body(i)
        return carry

    lax.fori_loop(0, num_turns, turn, None)
