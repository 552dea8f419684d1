"""The Mosaic kernel behind the TPU backend: one call over a list of segments.

    step 0      | write the step's new keys and values to their slots, and wait for all of them    (`writes`)
    step i      | segment i: the queries of one row in one tile, over the chunks of keys they see
                |
                |   chunk c      fetch c+1 ──► buffer 1        compute c ◄── buffer 0
                |   chunk c+1    fetch c+2 ──► buffer 0        compute c+1 ◄── buffer 1
                |   last chunk   fetch the first chunk of segment i+1

A chunk is `fetch_blocks` blocks, each one DMA from where the block table says. The new keys are in the pool before the
first fetch starts, so that a block that is written and read in the same call, by this row or by another, needs no
special care. Blocks that no query of the segment sees are not fetched; what their part of the buffer holds is masked,
in the scores and in the values.

No reference is reshaped or seen as another type: Mosaic could, the interpreter that checks this file for races cannot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.paged_attention.spec import AttentionSpec
from jpaged.kernels.paged_attention.tpu.sizes import VMEM_LIMIT_BYTES

LOWEST = -1e30
"""Start of the running maximum: finite, so that a chunk without a visible key leaves no NaN."""


class Segments(NamedTuple):
    """Which queries meet in one step of the grid, and the keys that they see; each a list in scalar memory.

    Attributes:
        row: whose block table is meant.
        tile: of the packed queries, in units of the query tile.
        lo: first query in the tile that is the row's.
        hi: one behind the last.
        position: of the tile's first query, were it the row's.
        begin: first key that any of them sees.
        end: one behind the last.
    """

    row: Any
    tile: Any
    lo: Any
    hi: Any
    position: Any
    begin: Any
    end: Any


class Scalars(NamedTuple):
    """What lies in scalar memory before the kernel starts.

    Attributes:
        layer: [1].
        num_segments: [1].
        segments: see there.
        tables: block tables [S * M], row by row: with two axes each row would be padded to 128 entries.
        scales: [2K], of keys and values in turns, the softmax scale multiplied into those of the keys.
        writes: (slots [T], whether B tokens from here on fill a block [T]); empty where nothing is written.
    """

    layer: Any
    num_segments: Any
    segments: Segments
    tables: Any
    scales: Any
    writes: tuple[Any, ...]


class Scratch(NamedTuple):
    """Memory of the kernel's own, kept from step to step.

    Attributes:
        chunk: two buffers of blocks [2, n, B, R, pack, lanes].
        m: running maxima [K, rows, 1].
        l: running sums, alike.
        o: running outputs [K, rows, lanes].
        turn: [1], number of chunks so far: which buffer is next.
        fetched: semaphores of the buffers.
        written: semaphores of whole blocks and of single tokens.
    """

    chunk: Any
    m: Any
    l: Any
    o: Any
    turn: Any
    fetched: Any
    written: Any


@dataclass(frozen=True, slots=True)
class Plan:
    """The static side of one call.

    Attributes:
        spec: of the attention.
        tile: queries of a tile, a power of two; 1 is the form for decodes, whose rows are the group's heads alone.
        rows: of one matrix product: the tile's queries times the group's heads, padded for decodes.
        fetch_blocks: blocks of a chunk.
        table_width: blocks in a row's table (M).
        compute_dtype: of the matrix products' operands.
        has_writes: whether new keys and values are stored.
    """

    spec: AttentionSpec
    tile: int
    rows: int
    fetch_blocks: int
    table_width: int
    compute_dtype: jnp.dtype
    has_writes: bool

    @property
    def chunk_tokens(self) -> int:
        return self.fetch_blocks * self.spec.layout.block_size

    @property
    def lse_lanes(self) -> int:
        return -(-self.rows // 128) * 128


def _write(scalars: Scalars, new_ref: Any, pool_ref: Any, written: Any, plan: Plan) -> None:
    """Stores every new token in its slot; whole blocks in one DMA each. Returns when all have arrived."""
    layout, (slots_ref, is_whole_ref) = plan.spec.layout, scalars.writes
    block_size, num_tokens = layout.block_size, new_ref.shape[0]
    num_slots, first_block = layout.blocks_per_layer * block_size, scalars.layer[0] * layout.blocks_per_layer

    def copy_block(t: Any, block: Any) -> Any:
        return pltpu.make_async_copy(new_ref.at[pl.ds(t, block_size)], pool_ref.at[block], written.at[0])

    def copy_token(t: Any, block: Any, offset: Any) -> Any:
        # Slices, where numbers would do: the interpreter of jax 0.10 and 0.11 overlooks that a number lies in a whole.
        return pltpu.make_async_copy(new_ref.at[pl.ds(t, 1)], pool_ref.at[block, pl.ds(offset, 1)], written.at[1])

    def store(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
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
    _, num_blocks, num_singles = lax.while_loop(lambda state: state[0] < num_tokens, store, (zero, zero, zero))
    if num_tokens >= block_size:
        _repeat(num_blocks, lambda _: copy_block(0, 0).wait())
    _repeat(num_singles, lambda _: copy_token(0, 0, 0).wait())


def _fetch(scalars: Scalars, segment: Any, chunk: Any, pool_ref: Any, plan: Plan) -> Callable[..., None]:
    """Returns what starts a chunk's DMAs into a buffer, or waits for them."""
    layout, segments = plan.spec.layout, scalars.segments
    table, first_block = segments.row[segment] * plan.table_width, scalars.layer[0] * layout.blocks_per_layer
    begin = jnp.maximum(segments.begin[segment] // layout.block_size, chunk * plan.fetch_blocks)
    end = jnp.minimum(pl.cdiv(segments.end[segment], layout.block_size), (chunk + 1) * plan.fetch_blocks)

    def each_block(buffer_ref: Any, semaphore: Any, *, is_start: bool) -> None:
        def block(j: Any) -> None:
            block_id = scalars.tables[table + begin + j]
            place = begin + j - chunk * plan.fetch_blocks
            is_inside = (block_id >= 0) & (block_id < layout.blocks_per_layer)

            @pl.when(is_inside)
            def _() -> None:
                copy = pltpu.make_async_copy(pool_ref.at[first_block + block_id], buffer_ref.at[place], semaphore)
                if is_start:
                    copy.start()
                else:
                    copy.wait()

            if not is_start:

                @pl.when(~is_inside)
                def _() -> None:
                    buffer_ref[place] = jnp.zeros(buffer_ref.shape[1:], buffer_ref.dtype)

        _repeat(jnp.maximum(end - begin, 0), block)

    return each_block


def _repeat(num_turns: Any, body: Callable[[Any], None]) -> None:
    def turn(i: Any, carry: None) -> None:
        body(i)
        return carry

    lax.fori_loop(0, num_turns, turn, None)


def _load_heads(chunk_ref: Any, index: Any, num_heads: int, plan: Plan) -> list[tuple[Any, Any]]:
    """Keys and values [W, lanes] of heads that share words; where a row of lanes has both, that row twice."""
    layout = plan.spec.layout

    def tiles(row: Any) -> Any:
        return chunk_ref[:, :, row].reshape(-1, layout.lanes)

    if layout.pack == 1:
        return [(tiles(index), tiles(index)) if layout.is_joined else (tiles(2 * index), tiles(2 * index + 1))]
    # As words of 32 bits a row lies dense in registers. Cut to tiles of `pack` it does not: for four heads of bfloat16
    # the program was twice as long with libtpu 0.0.42, and as long with 0.0.51.
    words_wl = pltpu.bitcast(tiles(index), jnp.int32)
    if layout.is_joined:
        return [(row, row) for row in (_unpack(words_wl, j, layout.dtype) for j in range(num_heads))]
    rows = [_unpack(words_wl, j, layout.dtype) for j in range(2 * num_heads)]
    return list(zip(rows[0::2], rows[1::2], strict=True))


def _unpack(words: Any, j: int, dtype: jnp.dtype) -> Any:
    """Part j of each word, the lowest first, as a number of 32 bits."""
    if dtype == jnp.bfloat16:
        return pltpu.bitcast(words << 16 if j == 0 else words & jnp.int32(-(1 << 16)), jnp.float32)
    if dtype == jnp.int8:
        return ((words << (24 - 8 * j)) >> 24).astype(jnp.float32)
    return pltpu.bitcast((words >> (8 * j)).astype(jnp.int8), dtype).astype(jnp.float32)


def _each_head(chunk_ref: Any, body: Callable[[Any, Any, Any], None], plan: Plan) -> None:
    """Calls the body with each head and its keys and values."""
    layout = plan.spec.layout
    share = layout.pack if layout.is_joined else max(1, layout.pack // 2)
    num_whole, num_left = divmod(layout.num_kv_heads, share)

    def heads_of(index: Any, num_heads: int = share) -> None:
        for j, (k_wd, v_wd) in enumerate(_load_heads(chunk_ref, index, num_heads, plan)):
            body(index * share + j, k_wd, v_wd)

    if plan.tile > 1:
        # A tile's products are long enough to fill the units by themselves: one copy of the program is enough.
        _repeat(num_whole, heads_of)
    else:
        for index in range(num_whole):
            heads_of(index)
    if num_left:
        heads_of(num_whole, num_left)


def _attend(scalars: Scalars, segment: Any, chunk: Any, q_ref: Any, chunk_ref: Any, kept: Scratch, plan: Plan) -> None:
    """One chunk of keys and values meets the segment's queries, head by head."""
    spec, segments = plan.spec, scalars.segments
    first_key, begin, end = chunk * plan.chunk_tokens, segments.begin[segment], segments.end[segment]
    query_r1 = lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0) & (plan.tile - 1)
    position_r1 = segments.position[segment] + query_r1
    key_1w = first_key + lax.broadcasted_iota(jnp.int32, (1, plan.chunk_tokens), 1)
    key_w1 = first_key + lax.broadcasted_iota(jnp.int32, (plan.chunk_tokens, 1), 0)
    is_seen_rw = (key_1w <= position_r1) & (key_1w >= begin) & (key_1w < end)
    if spec.kind.sliding_window is not None:
        is_seen_rw &= position_r1 - key_1w < spec.kind.sliding_window
    is_filled_w1 = (key_w1 >= begin) & (key_w1 < end)
    precision = lax.Precision.HIGHEST if plan.compute_dtype == jnp.float32 else lax.Precision.DEFAULT
    dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def attend_head(head: Any, k_wd: Any, v_wd: Any) -> None:
        k_wd = k_wd.astype(plan.compute_dtype)
        v_wd = jnp.where(is_filled_w1, v_wd, 0.0).astype(plan.compute_dtype)
        q_rd = q_ref[head].reshape(plan.rows, -1).astype(plan.compute_dtype)
        s_rw = dot(q_rd, k_wd, (((1,), (1,)), ((), ()))) * scalars.scales[2 * head]
        if spec.kind.soft_cap is not None:
            s_rw = spec.kind.soft_cap * jnp.tanh(s_rw / spec.kind.soft_cap)
        s_rw = jnp.where(is_seen_rw, s_rw, -jnp.inf)
        m_r1 = kept.m[head]
        m_new_r1 = jnp.maximum(m_r1, s_rw.max(axis=1, keepdims=True))
        p_rw = jnp.exp(s_rw - m_new_r1)
        fade_r1 = jnp.exp(m_r1 - m_new_r1)
        kept.m[head] = m_new_r1
        kept.l[head] = kept.l[head] * fade_r1 + p_rw.sum(axis=1, keepdims=True)
        pv_rd = dot(p_rw.astype(plan.compute_dtype), v_wd, (((1,), (0,)), ((), ())))
        kept.o[head] = kept.o[head] * fade_r1 + pv_rd

    _each_head(chunk_ref, attend_head, plan)


def _finish(scalars: Scalars, segment: Any, o_ref: Any, lse_ref: Any, kept: Scratch, plan: Plan) -> None:
    """Results of the segment's queries; those of the tile's other queries stay."""
    lo, hi = scalars.segments.lo[segment], scalars.segments.hi[segment]

    def is_ours(shape: tuple[int, int], axis: int) -> Any:
        query = lax.broadcasted_iota(jnp.int32, shape, axis) & (plan.tile - 1)
        return (query >= lo) & (query < hi)

    for head in range(plan.spec.layout.num_kv_heads):
        l_r1 = kept.l[head]
        has_keys_r1 = l_r1 > 0
        l_r1 = jnp.where(has_keys_r1, l_r1, 1.0)
        o_rd = kept.o[head] / l_r1 * scalars.scales[2 * head + 1]
        lse_r1 = jnp.where(has_keys_r1, kept.m[head] + jnp.log(l_r1), -jnp.inf)
        # A column becomes a row of lanes: everything but the diagonal is added as zero.
        shape = (plan.rows, plan.lse_lanes)
        is_diagonal = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)
        lse_1r = jnp.where(is_diagonal, lse_r1, 0.0).sum(axis=0, keepdims=True)
        if plan.tile > 1:
            o_rd = jnp.where(is_ours((plan.rows, 1), 0), o_rd, o_ref[head].reshape(o_rd.shape).astype(jnp.float32))
            lse_1r = jnp.where(is_ours((1, plan.lse_lanes), 1), lse_1r, lse_ref[pl.ds(head, 1)])
        o_ref[head] = o_rd.astype(o_ref.dtype).reshape(o_ref.shape[1:])
        lse_ref[pl.ds(head, 1)] = lse_1r


def _kernel(
    scalars: Scalars, q_ref: Any, new_ref: Any, pool_ref: Any, o_ref: Any, lse_ref: Any, kept: Scratch, plan: Plan
) -> None:
    step, num_segments = pl.program_id(0), scalars.num_segments[0]
    segments = scalars.segments

    def first_chunk(segment: Any) -> Any:
        return segments.begin[segment] // plan.chunk_tokens

    def fetch(segment: Any, chunk: Any, turn: Any, *, is_start: bool) -> None:
        buffer = turn & 1
        each_block = _fetch(scalars, segment, chunk, pool_ref, plan)
        each_block(kept.chunk.at[buffer], kept.fetched.at[buffer], is_start=is_start)

    @pl.when(step == 0)
    def _() -> None:
        if plan.has_writes:
            _write(scalars, new_ref, pool_ref, kept.written, plan)
        kept.turn[0] = 0

        @pl.when(num_segments > 0)
        def _() -> None:
            fetch(0, first_chunk(0), 0, is_start=True)

    @pl.when(step < num_segments)
    def _() -> None:
        kept.m[...] = jnp.full(kept.m.shape, LOWEST, jnp.float32)
        kept.l[...] = jnp.zeros(kept.l.shape, jnp.float32)
        kept.o[...] = jnp.zeros(kept.o.shape, jnp.float32)
        first, begin_turn = first_chunk(step), kept.turn[0]
        # One chunk at least, even of no block: whoever started its fetch relies on the turn.
        end = jnp.maximum(pl.cdiv(segments.end[step], plan.chunk_tokens), first + 1)

        def turn(c: Any, carry: None) -> None:
            this_turn = begin_turn + c - first

            @pl.when(c + 1 < end)
            def _() -> None:
                fetch(step, c + 1, this_turn + 1, is_start=True)

            @pl.when((c + 1 == end) & (step + 1 < num_segments))
            def _() -> None:
                fetch(step + 1, first_chunk(step + 1), this_turn + 1, is_start=True)

            fetch(step, c, this_turn, is_start=False)
            _attend(scalars, step, c, q_ref, kept.chunk.at[this_turn & 1], kept, plan)
            return carry

        lax.fori_loop(first, end, turn, None)
        kept.turn[0] = begin_turn + end - first
        _finish(scalars, step, o_ref, lse_ref, kept, plan)


def call(
    scalars: Scalars, q: jax.Array, new: jax.Array | None, pool: jax.Array, plan: Plan
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel over all segments.

    Args:
        scalars: as arrays.
        q: decodes [T, K, rows, lanes]; tiles [K, G, T, lanes], T whole tiles.
        new: [T, R, pack, lanes] in the pool's type, where the plan writes.
        pool: of all layers.
        plan: the static side.

    Returns:
        outputs shaped as q, log-sum-exp [T or tiles, K, lanes of `Plan.lse_lanes`], and the pool. Queries that are in
        no segment get anything.
    """
    layout = plan.spec.layout
    flat, tree = jax.tree.flatten(scalars)
    heads, lanes = layout.num_kv_heads, layout.lanes
    is_decode = plan.tile == 1
    num_tiles = q.shape[0] if is_decode else q.shape[2] // plan.tile
    q_block = (None, heads, plan.rows, lanes) if is_decode else (heads, q.shape[1], plan.tile, lanes)

    def at_tile(step: Any, *refs: Any) -> tuple[Any, ...]:
        tile = jax.tree.unflatten(tree, refs).segments.tile[step]
        return (tile, 0, 0, 0) if is_decode else (0, 0, tile, 0)

    def lse_at_tile(step: Any, *refs: Any) -> tuple[Any, ...]:
        return jax.tree.unflatten(tree, refs).segments.tile[step], 0, 0

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    num_scalars, inputs = len(flat), [q, *([] if new is None else [new]), pool]

    def body(*refs: Any) -> None:
        scalar_refs, refs = jax.tree.unflatten(tree, refs[:num_scalars]), refs[num_scalars:]
        q_ref, new_ref, pool_ref = refs[0], refs[1] if plan.has_writes else None, refs[len(inputs) - 1]
        o_ref, lse_ref, *others = refs[len(inputs) :]
        pool_ref = others.pop(0) if plan.has_writes else pool_ref
        _kernel(scalar_refs, q_ref, new_ref, pool_ref, o_ref, lse_ref, Scratch(*others), plan)

    results = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(jnp.maximum(scalars.num_segments[0], 1),),
            in_specs=[pl.BlockSpec(q_block, at_tile), *([anywhere] * (len(inputs) - 1))],
            out_specs=[
                pl.BlockSpec(q_block, at_tile),
                pl.BlockSpec((None, heads, plan.lse_lanes), lse_at_tile),
                *([anywhere] if plan.has_writes else []),
            ],
            scratch_shapes=list(_scratch_shapes(plan)),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((num_tiles, heads, plan.lse_lanes), jnp.float32),
            *([jax.ShapeDtypeStruct(pool.shape, pool.dtype)] if plan.has_writes else []),
        ],
        input_output_aliases={num_scalars + len(inputs) - 1: 2} if plan.has_writes else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT_BYTES),
        cost_estimate=_cost(scalars, q, plan),
        name=f"paged_attention_{'decode' if is_decode else 'chunks'}",
    )(*flat, *inputs)
    return results[0], results[1], results[2] if plan.has_writes else pool


def _scratch_shapes(plan: Plan) -> Scratch:
    layout = plan.spec.layout
    heads, rows = layout.num_kv_heads, plan.rows
    chunk_shape = (2, plan.fetch_blocks, layout.block_size, *layout.token_shape)
    return Scratch(
        chunk=pltpu.VMEM(chunk_shape, layout.storage_dtype),
        m=pltpu.VMEM((heads, rows, 1), jnp.float32),
        l=pltpu.VMEM((heads, rows, 1), jnp.float32),
        o=pltpu.VMEM((heads, rows, layout.lanes), jnp.float32),
        turn=pltpu.SMEM((1,), jnp.int32),
        fetched=pltpu.SemaphoreType.DMA((2,)),
        written=pltpu.SemaphoreType.DMA((2,)),
    )


def _cost(scalars: Scalars, q: jax.Array, plan: Plan) -> pl.CostEstimate:
    """The cost with full tables, a bound: the lengths are not known when a program is compiled."""
    layout = plan.spec.layout
    num_keys = plan.table_width * layout.block_size
    num_segments = scalars.segments.row.shape[0]
    num_scores = num_segments * layout.num_kv_heads * plan.rows * num_keys
    bytes_per_token = layout.bytes_per_block // layout.num_layers // layout.block_size
    return pl.CostEstimate(
        flops=4 * num_scores * layout.lanes,
        transcendentals=num_scores,
        bytes_accessed=2 * q.nbytes + num_segments * num_keys * bytes_per_token,
    )
