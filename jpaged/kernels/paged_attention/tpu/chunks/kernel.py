"""The Mosaic kernel for rows of several queries: one call over a list of segments, each a part of a tile of queries.

    segment     the queries of one row in one tile, over the chunks of keys that they see
    chunk       `fetch_blocks` blocks, each one DMA; the next chunk is in flight while this one is computed
    part        `part` queries of the tile; with all query heads of a key/value head they are the rows of a matmul
    item        a part, a key/value head and a chunk: one matmul of the pipeline

    a chunk has arrived: its words are unpacked, head by head: keys and values of each head become dense   (`unpack`)
    then, two items at a time, each stage on other items, so that no unit waits for another:

        turn t      scores of items t      | weights of items t - 1   | values of items t - 2
                    q k, scaled, masked    | maximum, 2^x, sums       | p v, added to the faded output
                    ──► s                  | s ──► p, fade            | p, fade ──► o

The pipeline continues from chunk to chunk of a segment and is drained at its end. Items after the last one work on an
unused slot. A part that sees nothing of a chunk has no items in it, and the scores of chunks that all of their parts
see completely are not masked.

Each core of a device has its own query heads, all segments, and their lanes of the queries and outputs:

    core 0      q0 q1 q2 q3     k0 v0 k1 v1         all cores have equal work, whatever the tiles of a step
    core 1      q4 q5 q6 q7     k2 v2 k3 v3         a single key/value head is fetched by all of them

Scores are in units of log 2. A maximum fills the 128 lanes of a row, and each lane keeps a separate sum until the
end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.paged_attention.tpu import tables
from jpaged.kernels.paged_attention.tpu.chunks.plan import (
    Chunk,
    ChunkPlan,
    ChunkRefs,
    ChunkScalars,
    Item,
    Scratch,
    cost,
    scratch_shapes,
)
from jpaged.kernels.paged_attention.tpu.chunks.sizes import ITEMS_A_TURN, VMEM_LIMIT_BYTES, num_buffers
from jpaged.kernels.paged_attention.tpu.chunks.stages import (
    LOG2_E,
    fetch,
    is_seen,
    repeat,
    scores,
    unpack,
    values,
    weights,
    wide,
)

LOWEST = -1e30
"""Start of the running maximum: finite, so that a chunk without a visible key leaves no NaN."""


def _chunk(scalars: ChunkScalars, core: Any, segment: Any, c: Any, plan: ChunkPlan) -> Chunk:
    """Return chunk c, with the parts of the tile that see some of it."""
    segments, window = scalars.segments, plan.spec.kind.sliding_window
    lo, hi, position = segments.lo[segment], segments.hi[segment], segments.position[segment]
    first_key, last_key = c * plan.chunk_tokens, (c + 1) * plan.chunk_tokens - 1
    shift = plan.part.bit_length() - 1
    first_part = jnp.maximum(lo, first_key - position) >> shift
    last_query = hi - 1 if window is None else jnp.minimum(hi - 1, last_key - 1 - position + window)
    num_parts = jnp.maximum((last_query >> shift) - first_part + 1, 0)
    is_whole = (segments.begin[segment] <= first_key) & (segments.end[segment] > last_key)
    is_whole &= position + jnp.maximum(lo, first_part << shift) >= last_key
    if window is not None:
        is_whole &= position + hi - window <= first_key
    buffer = lax.rem(c, num_buffers(plan.num_kv_heads)) * plan.chunk_rows
    first_head = plan.first_head(core)
    first_row = buffer if plan.has_own_rows else buffer + first_head * plan.head_rows
    return Chunk(first_key, first_head, buffer, first_row, first_part, num_parts * plan.num_kv_heads, is_whole)


def _item(chunk: Chunk, i: Any, plan: ChunkPlan) -> tuple[Any, Any, Item]:
    """Return the part, the head and the `Item` of item i; after the last, the last again."""
    this = jnp.clip(i, 0, jnp.maximum(chunk.num_items - 1, 0))
    head = lax.rem(this, plan.num_kv_heads)
    part = jnp.minimum(chunk.first_part + lax.div(this, plan.num_kv_heads), plan.tile // plan.part - 1)
    slot = jnp.where(i < chunk.num_items, part * plan.num_kv_heads + head, plan.num_slots)
    return part, head, Item(slot, chunk.first_row + plan.head_rows * (head + 1) - 1)


def _attend(
    scalars: ChunkScalars,
    segment: Any,
    chunk: Chunk,
    is_last: Any,
    items: Any,
    q_ref: Any,
    kept: Scratch,
    plan: ChunkPlan,
) -> Any:
    """Run the chunk's items through the pipeline, drained after the last chunk; return the items still in it."""
    num_turns = pl.cdiv(chunk.num_items, ITEMS_A_TURN) + jnp.where(is_last, 2, 0)

    def turns(is_masked: bool) -> Callable[[], Any]:
        def turn(t: Any, items: Any) -> Any:
            before, before_that = items
            # The last stage first: the previous stage overwrites its input.
            values(before_that, kept, plan)
            weights(before, kept, plan)
            news = []
            for place in range(ITEMS_A_TURN):
                part, head, new = _item(chunk, t * ITEMS_A_TURN + place, plan)
                s_rw = scores(scalars, chunk, part, head, q_ref, kept, plan)
                if is_masked:
                    s_rw = jnp.where(is_seen(scalars, segment, chunk, part, plan), s_rw, -jnp.inf)
                kept.s[place] = s_rw
                news.append(new)
            return news, before

        return lambda: lax.fori_loop(0, num_turns, turn, items)

    return lax.cond(chunk.is_whole, turns(False), turns(True))


def _begin(scalars: ChunkScalars, segment: Any, kept: Scratch, plan: ChunkPlan) -> None:
    """Clear the running values of the segment's parts."""
    begin, end = _slots(scalars, segment, plan)

    def clear(slot: Any) -> None:
        kept.m[slot] = jnp.full(kept.m.shape[1:], LOWEST, jnp.float32)
        kept.l[slot] = jnp.zeros(kept.l.shape[1:], jnp.float32)
        kept.o[slot] = jnp.zeros(kept.o.shape[1:], jnp.float32)

    repeat(begin, end, clear)


def _slots(scalars: ChunkScalars, segment: Any, plan: ChunkPlan) -> tuple[Any, Any]:
    heads, shift = plan.num_kv_heads, plan.part.bit_length() - 1
    lo, hi = scalars.segments.lo[segment], scalars.segments.hi[segment]
    return (lo >> shift) * heads, (((hi - 1) >> shift) + 1) * heads


def _finish(
    scalars: ChunkScalars, core: Any, segment: Any, o_ref: Any, lse_ref: Any, kept: Scratch, plan: ChunkPlan
) -> None:
    """Write results of the segment's queries; those of the tile's other queries are preserved."""
    first_head, o_lanes = plan.first_head(core), plan.value_lanes
    lo, hi = scalars.segments.lo[segment], scalars.segments.hi[segment]
    begin, end = _slots(scalars, segment, plan)

    def finish(slot: Any) -> None:
        part, head = lax.div(slot, plan.num_kv_heads), lax.rem(slot, plan.num_kv_heads)
        queries = pl.ds(pl.multiple_of(part * plan.part, plan.part), plan.part)
        l_r1 = kept.l[slot].sum(axis=1, keepdims=True)
        has_keys_r1 = l_r1 > 0
        l_r1 = jnp.where(has_keys_r1, l_r1, 1.0)
        o_rd = kept.o[slot] * (scalars.scales[2 * (first_head + head) + 1] / l_r1)
        lse_rl = jnp.where(has_keys_r1, (kept.m[slot] + jnp.log2(l_r1)) * (1 / LOG2_E), -jnp.inf)
        query_q1 = part * plan.part + lax.broadcasted_iota(jnp.int32, (plan.part, 1), 0)
        is_ours_q1 = (query_q1 >= lo) & (query_q1 < hi)
        lse_ql = lse_ref[queries]
        lane = lax.broadcasted_iota(jnp.int32, lse_ql.shape, 1)
        for g in range(plan.group):
            rows, query_head = slice(g * plan.part, (g + 1) * plan.part), head * plan.group + g
            lanes = pl.ds(pl.multiple_of(query_head * o_lanes, o_lanes), o_lanes)
            o_ref[queries, lanes] = jnp.where(is_ours_q1, o_rd[rows].astype(o_ref.dtype), o_ref[queries, lanes])
            lse_ql = jnp.where(is_ours_q1 & (lane == query_head), wide(lse_rl[rows], plan.lse_lanes), lse_ql)
        lse_ref[queries] = lse_ql

    repeat(begin, end, finish)


def _others(
    scalars: ChunkScalars, core: Any, step: Any, refs: ChunkRefs, kept: Scratch, plan: ChunkPlan
) -> tuple[Any, Any]:
    """Return whether a tile with other rows' queries begins here, and the DMA of the tile's results so far."""
    segments = scalars.segments
    tile, lo, hi = segments.tile[step], segments.lo[step], segments.hi[step]
    is_begun = (step == 0) | (tile != segments.tile[jnp.maximum(step - 1, 0)])
    is_shared = (lo > 0) | (hi < plan.tile) | (step >= scalars.num_segments[0])
    queries = pl.ds(pl.multiple_of(tile * plan.tile, plan.tile), plan.tile)
    lanes = pl.ds(pl.multiple_of(core * plan.output_lanes, plan.output_lanes), plan.output_lanes)
    return is_begun & is_shared, pltpu.make_async_copy(refs.before.at[queries, lanes], refs.o, kept.joined)


def _kernel(scalars: ChunkScalars, refs: ChunkRefs, kept: Scratch, plan: ChunkPlan) -> None:
    core, step, num_segments = pl.program_id(0), pl.program_id(1), scalars.num_segments[0]
    segments = scalars.segments

    def first_chunk(segment: Any) -> Any:
        return lax.div(segments.begin[segment], plan.chunk_tokens)

    def buffer_of(turn: Any) -> Any:
        return turn & 1

    def start(segment: Any, chunk: Any, turn: Any) -> None:
        fetch(scalars, core, segment, chunk, refs, kept, plan)[0](buffer_of(turn))

    @pl.when(step == 0)
    def _() -> None:
        kept.turn[0] = 0
        tables.begin(segments, 0, num_segments, refs.tables, kept.pages, plan.paging)

        @pl.when(num_segments > 0)
        def _() -> None:
            start(0, first_chunk(0), 0)

    has_others, others = _others(scalars, core, step, refs, kept, plan)

    @pl.when(has_others)
    def _() -> None:
        others.start()

    @pl.when(step < num_segments)
    def _() -> None:
        _begin(scalars, step, kept, plan)
        first, begin_turn = first_chunk(step), kept.turn[0]
        # At least one chunk, even without blocks: the fetch that was started for it relies on the turn.
        end = jnp.maximum(pl.cdiv(segments.end[step], plan.chunk_tokens), first + 1)

        def turn(c: Any, items: Any) -> Any:
            this_turn = begin_turn + c - first

            @pl.when(c + 1 < end)
            def _() -> None:
                start(step, c + 1, this_turn + 1)

            @pl.when((c + 1 == end) & (step + 1 < num_segments))
            def _() -> None:
                start(step + 1, first_chunk(step + 1), this_turn + 1)

            chunk = _chunk(scalars, core, step, c, plan)
            fetch(scalars, core, step, c, refs, kept, plan)[1](buffer_of(this_turn))
            unpack(kept, buffer_of(this_turn), chunk, segments.begin[step], segments.end[step], plan)
            return _attend(scalars, step, chunk, c + 1 == end, items, refs.q, kept, plan)

        nobody = [Item(jnp.int32(plan.num_slots), jnp.int32(0))] * ITEMS_A_TURN
        lax.fori_loop(first, end, turn, (nobody, nobody))
        kept.turn[0] = begin_turn + end - first

    @pl.when(has_others)
    def _() -> None:
        others.wait()

    @pl.when(step < num_segments)
    def _() -> None:
        _finish(scalars, core, step, refs.o, refs.lse, kept, plan)


def call(
    scalars: ChunkScalars, q: jax.Array, block_tables: jax.Array, pool: jax.Array, before: jax.Array, plan: ChunkPlan
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel over all segments.

    Args:
        scalars: as arrays.
        q: [T, H * lanes of a key], T whole tiles.
        block_tables: of whole pages [S, N].
        pool: of all layers.
        before: [T, H * lanes of a value], the outputs of queries in no segment; it becomes the outputs.
        plan: the static part.

    Returns:
        outputs, and log-sum-exp [T, cores * `ChunkPlan.lse_lanes`], each core's heads first in its lanes, undefined for
        queries in no segment.
    """
    flat, tree = jax.tree.flatten(scalars)
    num_scalars = len(flat)

    def at_tile(core: Any, step: Any, *refs: Any) -> tuple[Any, ...]:
        return jax.tree.unflatten(tree, refs).segments.tile[step], core

    def body(*refs: Any) -> None:
        scalar_refs, array_refs, others = refs[:num_scalars], refs[num_scalars:][:6], refs[num_scalars:][6:]
        _kernel(jax.tree.unflatten(tree, scalar_refs), ChunkRefs(*array_refs), Scratch(*others), plan)

    o, lse = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(plan.num_cores, jnp.maximum(scalars.num_segments[0], 1)),
            in_specs=[
                pl.BlockSpec((plan.tile, plan.query_lanes), at_tile),
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec((plan.tile, plan.output_lanes), at_tile),
                pl.BlockSpec((plan.tile, plan.lse_lanes), at_tile),
            ],
            scratch_shapes=list(scratch_shapes(plan)),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(before.shape, before.dtype),
            jax.ShapeDtypeStruct((q.shape[0], plan.num_cores * plan.lse_lanes), jnp.float32),
        ],
        input_output_aliases={num_scalars + 3: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
            # Ids are checked before use; the kernel computes every other index itself.
            disable_bounds_checks=True,
        ),
        cost_estimate=cost(scalars, q, plan),
        name="paged_attention_chunks",
    )(*flat, q, block_tables, pool, before)
    return o, lse
