"""The Hopper kernel of paged attention: one thread block, one tile of queries, one part of their keys.

    64 or 128 rows of Q   | t0 h0 | t0 h1 | t1 h0 | t1 h1 | ...    tokens of one row, the query heads of one KV head

    keys and values       | B tokens: k v | B tokens: k v | ...    one TMA copy per block, a barrier per chunk,
                          └──────────── chunk ────────────┘        `stages` chunks in flight

    for each chunk        wait; [convert to 16 bits]; [clean]; S = Q K^T; softmax; O += P V; commit; fetch ahead

One warpgroup does all of that for a tile of 64 rows. A tile of 128 rows has three warpgroups, which only wait for each
other's barriers:

    producer              fetch ...; wait; [convert to 16 bits]; [clean]; hand off; wait until it is free; fetch ahead
    consumer 0, rows 0-   wait; S = Q K^T; softmax; O += P V; set free      so that each chunk is fetched once for both,
    consumer 1, rows 64-  wait; S = Q K^T; softmax; O += P V; set free      and one's softmax hides the other's matmuls

If such a tile has 64 rows or less, as in a decode, the consumers alternate between its chunks and add up at the end.
Chunks that every query of a consumer sees are multiplied in a separate loop, without masks.

The grid is (items, KV heads), heads fastest: they read adjacent memory. An item is a tile and a part of the keys. A row
of an array describes it; see `GpuItemField` and `work.py`.

Parts of a chunk that the tile does not see are cleared before use, since 0 times NaN is NaN. That happens only at the
ends of the visible range, and in rows whose tables name blocks outside the layer, which read as zeros.
"""

from __future__ import annotations

import enum
import functools
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.kernels.paged_attention.gpu.work import TILE_ROWS, Tiling
from jpaged.kernels.paged_attention.spec import AttentionSpec

_LOG2_E = math.log2(math.e)
_LOWEST = -1e30
"""Start of the running maximum: finite, so that a chunk without a visible key leaves no NaN."""

_WGMMA = plgpu.Layout.WGMMA
_ROWS = _WGMMA.reduce(1)
_WHOLE: tuple[Any, ...] = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
"""The index of a load of a whole reference; loads have no such parameter since jax 0.12."""


class GpuItemField(enum.IntEnum):
    """Columns of the array that describes the items."""

    ROW = 0
    """The row whose block table is read."""
    FIRST_ROW = 1
    """The item's first query row: a multiple of 8, because copies into tiled memory silently round other offsets."""
    NUM_TOKENS = 2
    """0 for an item that is not used."""
    POSITION = 3
    """The position of its first query."""
    KV_BEGIN = 4
    KV_END = 5
    """First key that some query of the tile sees, and the end of the visible keys."""
    FIRST_CHUNK = 6
    NUM_CHUNKS = 7
    """The chunks of its part."""
    WINDOW = 8
    """Keys that a query sees at most, including its own."""
    HAS_BAD_IDS = 9
    """Whether its row's table names a block outside the layer."""


@dataclass(frozen=True, slots=True)
class GpuKernelParams:
    """Compile-time constants of the kernel.

    Attributes:
        spec: of the call.
        tiling: sizes of the work.
        is_interpreted: without tensor cores: uses plain matmuls.
    """

    spec: AttentionSpec
    tiling: Tiling
    is_interpreted: bool = False


def attend_items(
    q_kmd: jax.Array,
    pool: jax.Array,
    tables_sm: jax.Array,
    items_nf: jax.Array,
    layer: jax.Array,
    scales: jax.Array | None,
    static: GpuKernelParams,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run the kernel over all items.

    Args:
        q_kmd: [K, rows, D], the query heads of a token and KV head consecutively; see `GpuItemField.FIRST_ROW`.
        pool: [P, B, K, 2D], the pool with each key next to its value.
        tables_sm: block ids within the layer.
        items_nf: [items, len(GpuItemField)].
        layer: [1].
        scales: [L * K * 2], or None.
        static: compile-time constants.
        interpret: parameters of the interpreter, or None for the device.

    Returns:
        outputs [items, K, 1 or 2, tile rows, D] divided by their sums, in the queries' type; if contexts may be split,
        followed by their rounding errors. Running maxima [items, K, tile rows] in base 2, and sums. Entries of unused
        items, and of a tile's rows without queries, may be undefined.
    """
    tiling = static.tiling
    num_kv_heads, _, head_dim = q_kmd.shape
    shape = (items_nf.shape[0], num_kv_heads)
    arguments = (q_kmd, pool, tables_sm, items_nf, layer, *(() if scales is None else (scales,)))
    out = jax.ShapeDtypeStruct((*shape, 1 if tiling.max_parts == 1 else 2, tiling.tile_rows, head_dim), q_kmd.dtype)
    sums = jax.ShapeDtypeStruct((*shape, tiling.tile_rows), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_paged_attention_item, static, len(arguments)),
        out_type=[out, sums, sums],
        scratch_types=_scratch(q_kmd.dtype, pool.dtype, head_dim, tiling),
        grid=shape,
        grid_names=("item", "head"),
        num_threads=None if tiling.num_consumers == 1 else tiling.num_consumers + 1,
        thread_name=None if tiling.num_consumers == 1 else "warpgroup",
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    results = kernel(*arguments)
    return results[0], results[1], results[2]


def _scratch(q_dtype: Any, kv_dtype: Any, head_dim: int, tiling: Tiling) -> dict[str, Any]:
    def tiled(shape: tuple[int, ...], dtype: Any, width: int) -> Any:
        swizzle = swizzle_bytes(width * jnp.dtype(dtype).itemsize)
        tile = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(swizzle)))

    consumers, stages, kv_shape = tiling.num_consumers, tiling.stages, (tiling.chunk_rows, 2 * head_dim)
    is_narrow = kv_dtype != q_dtype
    scratch = {
        "q_s": tiled((consumers, TILE_ROWS, head_dim), q_dtype, head_dim),
        "kv_s": tiled((stages, *kv_shape), kv_dtype, 2 * head_dim if is_narrow else head_dim),
        "max_s": plgpu.SMEM((consumers, TILE_ROWS), jnp.float32),
        "sum_s": plgpu.SMEM((consumers, TILE_ROWS), jnp.float32),
        "q_barriers": plgpu.Barrier(num_barriers=consumers),
        "kv_barriers": plgpu.Barrier(num_arrivals=tiling.chunk_blocks, num_barriers=stages),
    }
    if is_narrow:
        scratch["wide_s"] = tiled((stages if consumers > 1 else 1, *kv_shape), q_dtype, head_dim)
    if consumers > 1:
        scratch["ready_barriers"] = plgpu.Barrier(num_barriers=stages)
        scratch["free_barriers"] = plgpu.Barrier(num_barriers=consumers * stages)
        scratch["sum_barriers"] = plgpu.Barrier(num_barriers=2)
    return scratch


def swizzle_bytes(row_bytes: int) -> int:
    """Return the widest swizzle pattern for rows of this many bytes."""
    return next(width for width in (128, 64, 32) if row_bytes % width == 0)


@dataclass(frozen=True, slots=True)
class _Refs:
    """Memory references of the kernel: arguments and results, then shared memory."""

    q: Any
    pool: Any
    tables: Any
    layer: Any
    scales: Any
    out: Any
    out_max: Any
    out_sum: Any
    q_s: Any
    kv_s: Any
    max_s: Any
    sum_s: Any
    q_barriers: Any
    kv_barriers: Any
    wide_s: Any = None
    ready_barriers: Any = None
    free_barriers: Any = None
    sum_barriers: Any = None


@dataclass(frozen=True, slots=True)
class _Work:
    """The work of this thread block: its place in the grid, and the fields of the item, see `GpuItemField`."""

    item: jax.Array
    head: jax.Array
    row: jax.Array
    first_row: jax.Array
    num_tokens: jax.Array
    position: jax.Array
    begin: jax.Array
    end: jax.Array
    first_chunk: jax.Array
    num_chunks: jax.Array
    window: jax.Array
    has_bad_ids: jax.Array


def _paged_attention_item(static: GpuKernelParams, num_arguments: int, *refs: Any, **scratch: Any) -> None:
    q, pool, tables, items, layer, *scales = refs[:num_arguments]
    out, out_max, out_sum = refs[num_arguments:]
    memory = _Refs(q, pool, tables, layer, scales[0] if scales else None, out, out_max, out_sum, **scratch)
    item = lax.axis_index("item")

    @pl.when(items[item, int(GpuItemField.NUM_TOKENS)] > 0)
    def _() -> None:
        fields = (items[item, int(field)] for field in GpuItemField)
        _attend_tile(memory, _Work(item, lax.axis_index("head"), *fields), static)


def _attend_tile(memory: _Refs, work: _Work, static: GpuKernelParams) -> None:
    tiling = static.tiling
    if tiling.num_consumers == 1:
        _attend_alone(memory, work, static)
        return
    warpgroup = lax.axis_index("warpgroup")

    def produce() -> None:
        plgpu.set_max_registers(tiling.producer_registers, action="decrease")
        _produce(memory, work, static)

    def consume() -> None:
        plgpu.set_max_registers(tiling.consumer_registers, action="increase")
        _consume(warpgroup, memory, work, static)

    lax.cond(warpgroup == tiling.num_consumers, produce, consume)


@dataclass(frozen=True, slots=True)
class _Consumer:
    """A warpgroup that multiplies, and its share of the tile.

    Attributes:
        number: index among the block's consumers.
        first_row: the first of the 64 rows in the tile.
        first_chunk: the first of the chunks in the part, of which it takes each `step`-th.
        step: 1 if it takes all.
    """

    number: Any
    first_row: Any
    first_chunk: Any
    step: Any

    def chunk(self, turn: jax.Array) -> jax.Array:
        """Return the chunk of the part for this turn."""
        return self.first_chunk + turn * self.step

    def turns(self, num_chunks: jax.Array) -> jax.Array:
        """Return how many of the first `num_chunks` chunks it takes."""
        return lax.div(num_chunks - self.first_chunk + self.step - 1, jnp.int32(self.step))


def _attend_alone(memory: _Refs, work: _Work, static: GpuKernelParams) -> None:
    """Process a tile of 64 rows."""
    me = _Consumer(0, 0, 0, 1)
    _fetch_queries(me, memory, work)
    _fetch_first(memory, work, static)
    plgpu.barrier_wait(memory.q_barriers.at[0])
    _store(_attend_chunks(me, _own_chunk, memory, work, static), me, memory, work, static)


def _consume(number: jax.Array, memory: _Refs, work: _Work, static: GpuKernelParams) -> None:
    """Multiply 64 of a tile's 128 rows; or every second chunk, if the tile has no more than 64."""
    is_whole = _is_whole(work, static)
    me = _Consumer(
        number,
        jnp.where(is_whole, number * TILE_ROWS, 0),
        jnp.where(is_whole, 0, number),
        jnp.where(is_whole, 1, static.tiling.num_consumers),
    )
    _fetch_queries(me, memory, work)
    plgpu.barrier_wait(memory.q_barriers.at[number])
    state = _attend_chunks(me, _given_chunk, memory, work, static)

    def add_up() -> None:
        lax.cond(
            number > 0,
            lambda: _hand_in(state, memory),
            lambda: _store(_added_up(state, memory, static), me, memory, work, static),
        )

    lax.cond(is_whole, lambda: _store(state, me, memory, work, static), add_up)


def _is_whole(work: _Work, static: GpuKernelParams) -> jax.Array:
    """Return True if the tile has rows for both consumers."""
    return work.num_tokens * static.tiling.group > TILE_ROWS


def _produce(memory: _Refs, work: _Work, static: GpuKernelParams) -> None:
    """Fetch all chunks for the consumers, and convert and clean them if necessary."""
    stages, is_narrow = static.tiling.stages, memory.wide_s is not None
    _fetch_first(memory, work, static)

    def chunk(i: jax.Array, nothing: None) -> None:
        slot = lax.rem(i, jnp.int32(stages))
        # 8-bit slots are free here; 16-bit slots when the consumers have freed them, one turn later.
        refilled = i + stages - (0 if is_narrow else 1)
        next_ids = _block_ids(refilled, memory, work, static)
        plgpu.barrier_wait(memory.kv_barriers.at[slot])
        kv_s = memory.kv_s.at[slot]
        if is_narrow:
            kv_s = _widened(i, slot, memory, work, static)

        @pl.when(_needs_cleaning(i, work, static))
        def _() -> None:
            _clean(i, kv_s, memory, work, static)
            if not is_narrow:
                _hand_over(slot, memory)

        if is_narrow:
            _hand_over(slot, memory)

        @pl.when((refilled >= stages) & (refilled < work.num_chunks))
        def _() -> None:
            free_slot = lax.rem(refilled, jnp.int32(stages))
            if not is_narrow:
                _wait_until_free(free_slot, memory, work, static)
            _fetch(next_ids, free_slot, memory, work, static)

    lax.fori_loop(jnp.int32(0), work.num_chunks, chunk, None)


def _widened(i: jax.Array, slot: jax.Array, memory: _Refs, work: _Work, static: GpuKernelParams) -> Any:
    """Convert a chunk to 16 bits, after the consumers have freed the previous one in its slot."""

    @pl.when(i >= static.tiling.stages)
    def _() -> None:
        _wait_until_free(slot, memory, work, static)

    _widen(memory.kv_s.at[slot], memory.wide_s.at[slot], static)
    return memory.wide_s.at[slot]


def _hand_over(slot: jax.Array, memory: _Refs) -> None:
    plgpu.commit_smem()
    plgpu.barrier_arrive(memory.ready_barriers.at[slot])


def _wait_until_free(slot: jax.Array, memory: _Refs, work: _Work, static: GpuKernelParams) -> None:
    """Wait until the consumers have freed a slot."""
    is_whole = _is_whole(work, static)
    for number in range(static.tiling.num_consumers):

        @pl.when(is_whole | (lax.rem(slot, jnp.int32(static.tiling.num_consumers)) == number))
        def _(number: int = number) -> None:
            plgpu.barrier_wait(memory.free_barriers.at[number * static.tiling.stages + slot])


def _fetch_queries(me: _Consumer, memory: _Refs, work: _Work) -> None:
    queries = memory.q.at[work.head, pl.ds(work.first_row + me.first_row, TILE_ROWS)]
    plgpu.copy_gmem_to_smem(queries, memory.q_s.at[me.number], memory.q_barriers.at[me.number])


def _fetch_first(memory: _Refs, work: _Work, static: GpuKernelParams) -> None:
    """Start the copies of the first chunks, up to the number of slots."""
    tiling = static.tiling
    if tiling.chunk_rows > tiling.chunk_tokens:
        # Rows that no copy reaches: they are multiplied with zeros after the context, and so must be finite.
        for slot in range(tiling.stages):
            _clear(memory.kv_s.at[slot], memory.wide_s is not None, static)
        plgpu.commit_smem()
    for slot in range(tiling.stages):

        @pl.when(slot < work.num_chunks)
        def _(slot: int = slot) -> None:
            _fetch(_block_ids(jnp.int32(slot), memory, work, static), slot, memory, work, static)


@contextmanager
def _own_chunk(
    i: jax.Array, me: _Consumer, is_masked: bool, memory: _Refs, work: _Work, static: GpuKernelParams
) -> Iterator[Any]:
    """Provide a chunk that this warpgroup has fetched itself; after its use, fetch another into its slot."""
    stages = static.tiling.stages
    slot = lax.rem(i, jnp.int32(stages))
    # Read a turn before they are needed, so that no turn waits for them.
    next_ids = _block_ids(i + stages, memory, work, static)
    plgpu.barrier_wait(memory.kv_barriers.at[slot])
    kv_s = memory.kv_s.at[slot]
    if memory.wide_s is not None:
        _widen(kv_s, memory.wide_s.at[me.number], static)
        plgpu.commit_smem()
        kv_s = memory.wide_s.at[me.number]
    if is_masked:

        @pl.when(_needs_cleaning(i, work, static))
        def _() -> None:
            _clean(i, kv_s, memory, work, static)
            plgpu.commit_smem()

    yield kv_s

    @pl.when(i + stages < work.num_chunks)
    def _() -> None:
        # All warps have read the slot, and their writes there precede those of the copies.
        plgpu.commit_smem()
        _fetch(next_ids, slot, memory, work, static)


@contextmanager
def _given_chunk(
    i: jax.Array, me: _Consumer, is_masked: bool, memory: _Refs, work: _Work, static: GpuKernelParams
) -> Iterator[Any]:
    """Provide a chunk of the producer's; after its use, notify the producer."""
    stages = static.tiling.stages
    slot = lax.rem(i, jnp.int32(stages))
    if memory.wide_s is not None:
        plgpu.barrier_wait(memory.ready_barriers.at[slot])
        yield memory.wide_s.at[slot]
    else:
        plgpu.barrier_wait(memory.kv_barriers.at[slot])
        if is_masked:

            @pl.when(_needs_cleaning(i, work, static))
            def _() -> None:
                plgpu.barrier_wait(memory.ready_barriers.at[slot])

        yield memory.kv_s.at[slot]

    @pl.when(i + stages < work.num_chunks)
    def _() -> None:
        plgpu.barrier_arrive(memory.free_barriers.at[me.number * stages + slot])


class _GpuSoftmax(NamedTuple):
    """The online softmax so far: sum of weighted values, largest score in base 2, sum of weights."""

    out: jax.Array
    max: jax.Array
    sum: jax.Array


def _attend_chunks(me: _Consumer, held: Any, memory: _Refs, work: _Work, static: GpuKernelParams) -> _GpuSoftmax:
    """Compute the softmax over a consumer's chunks; `held` is a context manager that provides each one."""

    def turn(is_masked: bool, j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i = me.chunk(j)
        with held(i, me, is_masked, memory, work, static) as kv_s:
            return tuple(_attend_chunk(i, me, kv_s, _GpuSoftmax(*state), is_masked, memory, work, static))

    state: tuple[jax.Array, ...] = (
        _laid_out(jnp.zeros((TILE_ROWS, static.spec.layout.head_dim), jnp.float32), _WGMMA, static),
        _laid_out(jnp.full((TILE_ROWS,), _LOWEST, jnp.float32), _ROWS, static),
        _laid_out(jnp.zeros((TILE_ROWS,), jnp.float32), _ROWS, static),
    )
    begin, end, count = (me.turns(n) for n in (*_seen_by_all(me, work, static), work.num_chunks))
    masked, plain = functools.partial(turn, True), functools.partial(turn, False)
    if static.tiling.chunk_rows > static.tiling.chunk_tokens:
        return _GpuSoftmax(*lax.fori_loop(jnp.int32(0), count, masked, state))
    state = lax.fori_loop(jnp.int32(0), begin, masked, state)
    state = lax.fori_loop(begin, end, plain, state)
    return _GpuSoftmax(*lax.fori_loop(end, count, masked, state))


def _seen_by_all(me: _Consumer, work: _Work, static: GpuKernelParams) -> tuple[jax.Array, jax.Array]:
    """Return the range of chunks of the part whose keys all exist and are seen by all of a consumer's queries."""
    tiling = static.tiling
    span, group = jnp.int32(tiling.chunk_tokens), jnp.int32(tiling.group)
    first_key = work.begin
    if static.spec.kind.sliding_window is not None:
        last_token = jnp.minimum(lax.div(me.first_row + TILE_ROWS - 1, group), work.num_tokens - 1)
        first_key = jnp.maximum(first_key, work.position + last_token - work.window + 1)
    end_key = jnp.minimum(work.end, work.position + lax.div(jnp.int32(me.first_row), group) + 1)
    begin = jnp.clip(lax.div(first_key + span - 1, span) - work.first_chunk, 0, work.num_chunks)
    end = jnp.clip(lax.div(end_key, span) - work.first_chunk, begin, work.num_chunks)
    return begin, jnp.where(work.has_bad_ids > 0, begin, end)


def _laid_out(numbers: jax.Array, layout: Any, static: GpuKernelParams) -> jax.Array:
    """Fix the layout of values over threads; the interpreter has no layouts."""
    return numbers if static.is_interpreted else plgpu.layout_cast(numbers, layout)


def _count(shape: tuple[int, ...], axis: int, static: GpuKernelParams) -> jax.Array:
    """Return 0, 1, ... along an axis, in the layout of scores."""
    return _laid_out(lax.broadcasted_iota(jnp.int32, shape, axis), _WGMMA, static)


def _block_ids(i: jax.Array, memory: _Refs, work: _Work, static: GpuKernelParams) -> list[jax.Array]:
    """Return the block ids of the part's i-th chunk from the table; after the table's end its last one."""
    first = (work.first_chunk + i) * static.tiling.chunk_blocks
    last = memory.tables.shape[1] - 1
    return [memory.tables[work.row, jnp.minimum(first + j, last)] for j in range(static.tiling.chunk_blocks)]


def _is_block(block_id: jax.Array, static: GpuKernelParams) -> jax.Array:
    return (block_id >= 0) & (block_id < static.spec.layout.blocks_per_layer)


def _fetch(block_ids: list[jax.Array], slot: Any, memory: _Refs, work: _Work, static: GpuKernelParams) -> None:
    """Start the copies of a chunk. An id outside the layer copies some block, which is cleared before its use."""
    layout = static.spec.layout
    first = memory.layer[0] * layout.blocks_per_layer
    for j, block_id in enumerate(block_ids):
        place = jnp.where(_is_block(block_id, static), block_id + first, 0)
        plgpu.copy_gmem_to_smem(
            memory.pool.at[place, :, work.head],
            memory.kv_s.at[slot, pl.ds(j * layout.block_size, layout.block_size)],
            memory.kv_barriers.at[slot],
        )


def _attend_chunk(
    i: jax.Array,
    me: _Consumer,
    kv_s: Any,
    state: _GpuSoftmax,
    is_masked: bool,
    memory: _Refs,
    work: _Work,
    static: GpuKernelParams,
) -> _GpuSoftmax:
    head_dim = static.spec.layout.head_dim
    k_s, v_s = (kv_s.at[:, pl.ds(part * head_dim, head_dim)] for part in range(2))
    scores, factor = _scores(me, k_s, memory, work, static)
    if is_masked:
        scores = _masked(scores, i, me, work, static)
    new_max = jnp.maximum(state.max, scores.max(axis=1) * factor)
    weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_max, scores.shape, [0]))
    fade = jnp.exp2(state.max - new_max)
    out = state.out * lax.broadcast_in_dim(fade, state.out.shape, [0])
    out = _add_product(out, weights.astype(memory.q_s.dtype), v_s, static)
    return _GpuSoftmax(out, new_max, state.sum * fade + weights.sum(axis=1))


def _scores(
    me: _Consumer, k_s: Any, memory: _Refs, work: _Work, static: GpuKernelParams
) -> tuple[jax.Array, jax.Array | float]:
    """Return scores [64, chunk rows], and their positive factor to base 2, which may also be applied to the maximum."""
    spec, q_s = static.spec, memory.q_s.at[me.number]
    if static.is_interpreted:
        scores = jnp.dot(q_s[...], k_s[...].T, preferred_element_type=jnp.float32)
    else:

        def product(sums: Any) -> jax.Array:
            plgpu.wgmma(sums, q_s, k_s.transpose((1, 0)))
            return sums[...]

        scores = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((TILE_ROWS, static.tiling.chunk_rows), jnp.float32))
    scale = spec.kind.scale if memory.scales is None else spec.kind.scale * _scale(0, memory, work, static)
    if spec.kind.soft_cap is None:
        return scores, scale * _LOG2_E
    # The fast tanh of the device is accurate to 3 digits; this one to 6.
    power = jnp.exp2(scores * (scale * (2 * _LOG2_E / spec.kind.soft_cap)))
    return 1 - 2 / (power + 1), spec.kind.soft_cap * _LOG2_E


def _masked(scores: jax.Array, i: jax.Array, me: _Consumer, work: _Work, static: GpuKernelParams) -> jax.Array:
    """Return the scores, with minus infinity for keys that a query does not see."""
    tiling = static.tiling
    rows, columns = (_count(scores.shape, axis, static) for axis in range(2))
    keys = _first_key(i, work, static) + columns
    positions = work.position + lax.div(me.first_row + rows, jnp.int32(tiling.group))
    is_seen = (keys <= positions) & (keys < work.end) & (keys >= work.begin)
    if tiling.chunk_rows > tiling.chunk_tokens:
        is_seen &= columns < tiling.chunk_tokens
    if static.spec.kind.sliding_window is not None:
        is_seen &= keys > positions - work.window
    return jnp.where(is_seen, scores, -jnp.inf)


def _add_product(out: jax.Array, weights: jax.Array, v_s: Any, static: GpuKernelParams) -> jax.Array:
    if static.is_interpreted:
        return out + jnp.dot(weights, v_s[...], preferred_element_type=jnp.float32)

    def product(sums: Any) -> None:
        plgpu.wgmma(sums, weights, v_s)

    return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(out))


def _scale(part: int, memory: _Refs, work: _Work, static: GpuKernelParams) -> jax.Array:
    """Return the scale by which this head's keys (0) or values (1) are divided in the pool."""
    return memory.scales[(memory.layer[0] * static.spec.layout.num_kv_heads + work.head) * 2 + part]


def _columns(dtype: Any, width: int, num_columns: int) -> list[Any]:
    """Return slices of columns, each one swizzle pattern wide: registers would not hold whole rows."""
    step = swizzle_bytes(width * jnp.dtype(dtype).itemsize) // jnp.dtype(dtype).itemsize
    return [pl.ds(start, step) for start in range(0, num_columns, step)]


def _widen(narrow_s: Any, wide_s: Any, static: GpuKernelParams) -> None:
    """Convert 8 bits to the queries' type."""
    head_dim = static.spec.layout.head_dim
    for columns in _columns(narrow_s.dtype, 2 * head_dim, 2 * head_dim):
        numbers = narrow_s[:, columns]
        if narrow_s.dtype != jnp.int8 and wide_s.dtype == jnp.bfloat16:
            numbers = numbers.astype(jnp.float32)  # no instruction converts these 8 bits to bfloat16
        wide_s[:, columns] = numbers.astype(wide_s.dtype)


def _clear(kv_s: Any, is_narrow: bool, static: GpuKernelParams) -> None:
    head_dim = static.spec.layout.head_dim
    for columns in _columns(kv_s.dtype, head_dim * (2 if is_narrow else 1), 2 * head_dim):
        shape = (static.tiling.chunk_rows, columns.size)
        kv_s[:, columns] = _laid_out(jnp.zeros(shape, kv_s.dtype), _WGMMA, static)


def _first_key(i: jax.Array, work: _Work, static: GpuKernelParams) -> jax.Array:
    return (work.first_chunk + i) * static.tiling.chunk_tokens


def _needs_cleaning(i: jax.Array, work: _Work, static: GpuKernelParams) -> jax.Array:
    first_key = _first_key(i, work, static)
    is_partly_seen = (first_key < work.begin) | (first_key + static.tiling.chunk_tokens > work.end)
    return is_partly_seen | (work.has_bad_ids > 0)


def _clean(i: jax.Array, kv_s: Any, memory: _Refs, work: _Work, static: GpuKernelParams) -> None:
    """Clear the keys and values that the tile does not see, and those of blocks outside the layer."""
    block_size = static.spec.layout.block_size
    first_key, block_ids = _first_key(i, work, static), _block_ids(i, memory, work, static)
    head_dim = static.spec.layout.head_dim
    for columns in _columns(kv_s.dtype, head_dim, 2 * head_dim):
        numbers = kv_s[:, columns]
        places = _count(numbers.shape, 0, static)
        keys = first_key + places
        is_kept = (keys >= work.begin) & (keys < work.end)
        blocks = lax.div(places, jnp.int32(block_size))
        for j, block_id in enumerate(block_ids):
            is_kept &= (blocks != j) | _is_block(block_id, static)
        kv_s[:, columns] = jnp.where(is_kept, numbers, jnp.zeros_like(numbers))


def _hand_in(state: _GpuSoftmax, memory: _Refs) -> None:
    """Pass this consumer's sums to the other one: divided, as two 16-bit numbers, as in `_store`."""
    inverse = jnp.where(state.sum > 0, 1 / state.sum, 0.0)
    plgpu.barrier_wait(memory.sum_barriers.at[0])  # the other consumer has finished with its queries, too
    _write(state.out, inverse, memory.q_s.at[1], memory.q_s.at[0])
    memory.max_s[1] = state.max
    memory.sum_s[1] = state.sum
    plgpu.commit_smem()
    plgpu.barrier_arrive(memory.sum_barriers.at[1])


def _added_up(state: _GpuSoftmax, memory: _Refs, static: GpuKernelParams) -> _GpuSoftmax:
    """Add the sums of the second consumer to those of the first."""
    plgpu.barrier_arrive(memory.sum_barriers.at[0])
    plgpu.barrier_wait(memory.sum_barriers.at[1])
    other_max, other_sum = (_read_rows(ref.at[1], static) for ref in (memory.max_s, memory.sum_s))
    new_max = jnp.maximum(state.max, other_max)
    fade, other_sum = jnp.exp2(state.max - new_max), jnp.exp2(other_max - new_max) * other_sum
    out = state.out * lax.broadcast_in_dim(fade, state.out.shape, [0])
    for number in (1, 0):
        out += memory.q_s[number].astype(jnp.float32) * lax.broadcast_in_dim(other_sum, out.shape, [0])
    return _GpuSoftmax(out, new_max, state.sum * fade + other_sum)


def _read_rows(ref: Any, static: GpuKernelParams) -> jax.Array:
    """Load a number for each row, in the layout of the rows."""
    return ref[...] if static.is_interpreted else plgpu.load(ref, *_WHOLE, layout=_ROWS)


def _store(state: _GpuSoftmax, me: _Consumer, memory: _Refs, work: _Work, static: GpuKernelParams) -> None:
    place, q_s = (work.item, work.head), memory.q_s.at[me.number]
    max_s, sum_s, rows = memory.max_s.at[me.number], memory.sum_s.at[me.number], pl.ds(me.first_row, TILE_ROWS)
    max_s[...] = state.max
    sum_s[...] = state.sum
    inverse = jnp.where(state.sum > 0, 1 / state.sum, 0.0)
    if memory.scales is not None:
        inverse *= _scale(1, memory, work, static)
    _write(state.out, inverse, q_s)  # the queries are no longer needed
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(max_s, memory.out_max.at[(*place, rows)])
    plgpu.copy_smem_to_gmem(sum_s, memory.out_sum.at[(*place, rows)])
    _copy_out(q_s, (*place, 0), me, memory, work, static)
    if static.tiling.max_parts > 1:
        # Two 16-bit numbers are as precise as one of 32, and need no extra memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _write_rounded_off(state.out, inverse, q_s)
        plgpu.commit_smem()
        _copy_out(q_s, (*place, 1), me, memory, work, static)
    plgpu.wait_smem_to_gmem(0)


def _write(out: jax.Array, inverse: jax.Array, target_s: Any, rest_s: Any = None) -> None:
    """Write the divided outputs in 16 bits, and the rounding errors to `rest_s` at once, to keep fewer registers."""
    for columns, piece in _divided(out, inverse, target_s.dtype):
        rounded = piece.astype(target_s.dtype)
        target_s[:, columns] = rounded
        if rest_s is not None:
            rest_s[:, columns] = _rounded_off(piece, rounded)


def _write_rounded_off(out: jax.Array, inverse: jax.Array, target_s: Any) -> None:
    """Write the rounding errors of `_write`."""
    for columns, piece in _divided(out, inverse, target_s.dtype):
        target_s[:, columns] = _rounded_off(piece, piece.astype(target_s.dtype))


def _rounded_off(numbers: jax.Array, rounded: jax.Array) -> jax.Array:
    return (numbers - rounded.astype(jnp.float32)).astype(rounded.dtype)


def _divided(out: jax.Array, inverse: jax.Array, dtype: Any) -> Iterator[tuple[Any, jax.Array]]:
    num_rows, width = out.shape
    for columns in _columns(dtype, width, width):
        piece = lax.slice(out, (0, columns.start), (num_rows, columns.start + columns.size))
        yield columns, piece * lax.broadcast_in_dim(inverse, piece.shape, [0])


def _copy_out(
    q_s: Any, place: tuple[Any, ...], me: _Consumer, memory: _Refs, work: _Work, static: GpuKernelParams
) -> None:
    """Start the copy of a consumer's results: only one token's rows if the tile has one token."""
    num_rows = -(-static.tiling.group // 8) * 8

    @pl.when(work.num_tokens == 1)
    def _() -> None:
        plgpu.copy_smem_to_gmem(q_s.at[pl.ds(0, num_rows)], memory.out.at[(*place, pl.ds(0, num_rows))])

    @pl.when(work.num_tokens > 1)
    def _() -> None:
        plgpu.copy_smem_to_gmem(q_s, memory.out.at[(*place, pl.ds(me.first_row, TILE_ROWS))])
