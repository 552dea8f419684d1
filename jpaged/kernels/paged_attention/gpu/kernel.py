"""The Hopper kernel of paged attention itself: one block of threads, one tile of queries, one part of its keys.

    64 rows of Q          | t0 h0 | t0 h1 | t1 h0 | t1 h1 | ...    tokens of one row, the query heads of one KV head

    keys and values       | B tokens: k v | B tokens: k v | ...    one TMA copy a block, a barrier a chunk,
                          └──────────── chunk ────────────┘        `stages` chunks on their way

    for each chunk        wait; [convert to 16 bits]; [clean]; S = Q K^T; softmax; O += P V; commit; fetch ahead

The grid is (items, KV heads), heads fastest: they read neighbouring memory. An item is a tile and a part of its keys;
what is asked is in its row of an array, see `ItemField` and `work.py`.

Whatever a chunk holds outside of what the tile sees is cleared before it is used, since 0 times NaN is NaN: only at
the ends of what is seen, and in rows whose tables name blocks outside of the layer, which read as zeros.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.kernels.paged_attention.gpu.tiling import TILE_ROWS, Tiling
from jpaged.kernels.paged_attention.spec import AttentionSpec

_LOG2_E = math.log2(math.e)
_LOWEST = -1e30
"""Start of the running maximum: finite, so that a chunk without a visible key leaves no NaN."""

_WGMMA = plgpu.Layout.WGMMA
_ROWS = _WGMMA.reduce(1)


class ItemField(enum.IntEnum):
    """Columns of the array that describes the items."""

    ROW = 0
    """The row whose block table is read."""
    FIRST_ROW = 1
    """Where its queries begin: a multiple of 8, as copies into tiled memory round others without an error."""
    NUM_TOKENS = 2
    """0 for an item that is not used."""
    POSITION = 3
    """The position of its first query."""
    KV_BEGIN = 4
    KV_END = 5
    """First key that some query of the tile sees, and the first behind them."""
    FIRST_CHUNK = 6
    NUM_CHUNKS = 7
    """Its part of them."""
    WINDOW = 8
    """Keys that a query sees at most, itself among them."""
    HAS_BAD_IDS = 9
    """Whether its row's table names a block outside of the layer."""


@dataclass(frozen=True, slots=True)
class Static:
    """What the kernel is compiled for.

    Attributes:
        spec: of the call.
        tiling: how the work is cut.
        is_interpreted: no tensor core: products are plain ones.
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
    static: Static,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel over all items.

    Args:
        q_kmd: [K, rows, D], the query heads of a token and KV head one after the other; see `ItemField.FIRST_ROW`.
        pool: [P, B, K, 2D], the pool with each key next to its value.
        tables_sm: block ids within the layer.
        items_nf: [items, len(ItemField)].
        layer: [1].
        scales: [L * K * 2], or None.
        static: what it is compiled for.
        interpret: parameters of the interpreter, or None for the device.

    Returns:
        outputs [items, K, 1 or 2, 64, D] divided by their sums, in the queries' type; where contexts may be cut, what
        that rounds off lies behind them. Running maxima [items, K, 64] in base 2, and sums. What belongs to items that
        are not used, and to the last rows of a tile of one token, is not written.
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

    kv_shape = (tiling.chunk_rows, 2 * head_dim)
    is_narrow = kv_dtype != q_dtype
    return {
        "q_s": tiled((TILE_ROWS, head_dim), q_dtype, head_dim),
        "kv_s": tiled((tiling.stages, *kv_shape), kv_dtype, 2 * head_dim if is_narrow else head_dim),
        **({"wide_s": tiled(kv_shape, q_dtype, head_dim)} if is_narrow else {}),
        "max_s": plgpu.SMEM((TILE_ROWS,), jnp.float32),
        "sum_s": plgpu.SMEM((TILE_ROWS,), jnp.float32),
        "q_barrier": plgpu.Barrier(),
        "kv_barriers": plgpu.Barrier(num_arrivals=tiling.chunk_blocks, num_barriers=tiling.stages),
    }


def swizzle_bytes(row_bytes: int) -> int:
    """The widest pattern in which rows of so many bytes can be stored."""
    return next(width for width in (128, 64, 32) if row_bytes % width == 0)


@dataclass(frozen=True, slots=True)
class _Refs:
    """Memory that the kernel works on: arguments and results, then what lies in shared memory."""

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
    wide_s: Any
    max_s: Any
    sum_s: Any
    q_barrier: Any
    kv_barriers: Any


@dataclass(frozen=True, slots=True)
class _Work:
    """What this block of threads has to do: its place in the grid, and the fields of its item, see `ItemField`."""

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


def _paged_attention_item(static: Static, num_arguments: int, *refs: Any, wide_s: Any = None, **scratch: Any) -> None:
    q, pool, tables, items, layer, *scales = refs[:num_arguments]
    out, out_max, out_sum = refs[num_arguments:]
    memory = _Refs(
        q, pool, tables, layer, scales[0] if scales else None, out, out_max, out_sum, wide_s=wide_s, **scratch
    )
    item = lax.axis_index("item")

    @pl.when(items[item, int(ItemField.NUM_TOKENS)] > 0)
    def _() -> None:
        fields = (items[item, int(field)] for field in ItemField)
        _attend_tile(memory, _Work(item, lax.axis_index("head"), *fields), static)


def _attend_tile(memory: _Refs, work: _Work, static: Static) -> None:
    tiling = static.tiling
    queries = memory.q.at[work.head, pl.ds(work.first_row, TILE_ROWS)]
    plgpu.copy_gmem_to_smem(queries, memory.q_s, memory.q_barrier)
    if tiling.chunk_rows > tiling.chunk_tokens:
        # Rows that no copy reaches: what is multiplied with the zeros behind the context has to be a number.
        for slot in range(tiling.stages):
            _clear(memory.kv_s.at[slot], memory.wide_s is not None, static)
        plgpu.commit_smem()
    for slot in range(tiling.stages):

        @pl.when(slot < work.num_chunks)
        def _(slot: int = slot) -> None:
            _fetch(_block_ids(jnp.int32(slot), memory, work, static), slot, memory, work, static)

    plgpu.barrier_wait(memory.q_barrier)

    def chunk(i: jax.Array, state: _State) -> _State:
        slot = lax.rem(i, jnp.int32(tiling.stages))
        # Read a turn before they are needed, so that no turn waits for them.
        next_ids = _block_ids(i + tiling.stages, memory, work, static)
        state = _attend_chunk(i, slot, state, memory, work, static)

        @pl.when(i + tiling.stages < work.num_chunks)
        def _() -> None:
            # All warps have read the slot, and what they wrote there comes before what the copies write.
            plgpu.commit_smem()
            _fetch(next_ids, slot, memory, work, static)

        return state

    head_dim = static.spec.layout.head_dim
    state = _State(
        _laid_out(jnp.zeros((TILE_ROWS, head_dim), jnp.float32), _WGMMA, static),
        _laid_out(jnp.full((TILE_ROWS,), _LOWEST, jnp.float32), _ROWS, static),
        _laid_out(jnp.zeros((TILE_ROWS,), jnp.float32), _ROWS, static),
    )
    state = _State(
        *lax.fori_loop(jnp.int32(0), work.num_chunks, lambda i, s: tuple(chunk(i, _State(*s))), tuple(state))
    )
    _store(state, memory, work, static)


class _State(NamedTuple):
    """The online softmax so far: sum of weighted values, largest score in base 2, sum of weights."""

    out: jax.Array
    max: jax.Array
    sum: jax.Array


def _laid_out(numbers: jax.Array, layout: Any, static: Static) -> jax.Array:
    """Fixes which thread holds what; the interpreter has no layouts."""
    return numbers if static.is_interpreted else plgpu.layout_cast(numbers, layout)


def _count(shape: tuple[int, ...], axis: int, static: Static) -> jax.Array:
    """0, 1, ... along an axis, laid out as scores are."""
    return _laid_out(lax.broadcasted_iota(jnp.int32, shape, axis), _WGMMA, static)


def _block_ids(i: jax.Array, memory: _Refs, work: _Work, static: Static) -> list[jax.Array]:
    """Block ids of the part's i-th chunk, as the table has them; behind the table's end its last one."""
    first = (work.first_chunk + i) * static.tiling.chunk_blocks
    last = memory.tables.shape[1] - 1
    return [memory.tables[work.row, jnp.minimum(first + j, last)] for j in range(static.tiling.chunk_blocks)]


def _is_block(block_id: jax.Array, static: Static) -> jax.Array:
    return (block_id >= 0) & (block_id < static.spec.layout.blocks_per_layer)


def _fetch(block_ids: list[jax.Array], slot: Any, memory: _Refs, work: _Work, static: Static) -> None:
    """Starts the copies of a chunk. For an id outside of the layer some block comes, to be cleared before its use."""
    layout = static.spec.layout
    first = memory.layer[0] * layout.blocks_per_layer
    for j, block_id in enumerate(block_ids):
        place = jnp.where(_is_block(block_id, static), block_id + first, 0)
        plgpu.copy_gmem_to_smem(
            memory.pool.at[place, :, work.head],
            memory.kv_s.at[slot, pl.ds(j * layout.block_size, layout.block_size)],
            memory.kv_barriers.at[slot],
        )


def _attend_chunk(i: jax.Array, slot: Any, state: _State, memory: _Refs, work: _Work, static: Static) -> _State:
    spec, tiling = static.spec, static.tiling
    plgpu.barrier_wait(memory.kv_barriers.at[slot])
    kv_s = memory.kv_s.at[slot]
    if memory.wide_s is not None:
        _widen(kv_s, memory.wide_s, static)
        plgpu.commit_smem()
        kv_s = memory.wide_s
    first_key = (work.first_chunk + i) * tiling.chunk_tokens
    is_partly_seen = (first_key < work.begin) | (first_key + tiling.chunk_tokens > work.end)

    @pl.when(is_partly_seen | (work.has_bad_ids > 0))
    def _() -> None:
        _clean(first_key, _block_ids(i, memory, work, static), kv_s, work, static)
        plgpu.commit_smem()

    k_s, v_s = (kv_s.at[:, pl.ds(part * spec.layout.head_dim, spec.layout.head_dim)] for part in range(2))
    scores = _masked(_scores(memory, k_s, work, static), first_key, work, static)
    new_max = jnp.maximum(state.max, scores.max(axis=1))
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_max, scores.shape, [0]))
    fade = jnp.exp2(state.max - new_max)
    out = state.out * lax.broadcast_in_dim(fade, state.out.shape, [0])
    out = _add_product(out, weights.astype(memory.q_s.dtype), v_s, static)
    return _State(out, new_max, state.sum * fade + weights.sum(axis=1))


def _scores(memory: _Refs, k_s: Any, work: _Work, static: Static) -> jax.Array:
    """Scores [64, chunk rows] in base 2."""
    spec = static.spec
    if static.is_interpreted:
        scores = jnp.dot(memory.q_s[...], k_s[...].T, preferred_element_type=jnp.float32)
    else:

        def product(sums: Any) -> jax.Array:
            plgpu.wgmma(sums, memory.q_s, k_s.transpose((1, 0)))
            return sums[...]

        scores = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((TILE_ROWS, static.tiling.chunk_rows), jnp.float32))
    scale = spec.kind.scale if memory.scales is None else spec.kind.scale * _scale(0, memory, work, static)
    if spec.kind.soft_cap is None:
        return scores * (scale * _LOG2_E)
    # The fast tanh of the device is good for 3 digits; this one for 6.
    power = jnp.exp2(scores * (scale * (2 * _LOG2_E / spec.kind.soft_cap)))
    return (spec.kind.soft_cap * _LOG2_E) * (1 - 2 / (power + 1))


def _masked(scores: jax.Array, first_key: jax.Array, work: _Work, static: Static) -> jax.Array:
    """Minus infinity where a query does not see a key."""
    tiling = static.tiling
    rows, columns = (_count(scores.shape, axis, static) for axis in range(2))
    keys = first_key + columns
    positions = work.position + lax.div(rows, jnp.int32(tiling.group))
    is_seen = (keys <= positions) & (keys < work.end) & (keys >= work.begin)
    if tiling.chunk_rows > tiling.chunk_tokens:
        is_seen &= columns < tiling.chunk_tokens
    if static.spec.kind.sliding_window is not None:
        is_seen &= keys > positions - work.window
    return jnp.where(is_seen, scores, -jnp.inf)


def _add_product(out: jax.Array, weights: jax.Array, v_s: Any, static: Static) -> jax.Array:
    if static.is_interpreted:
        return out + jnp.dot(weights, v_s[...], preferred_element_type=jnp.float32)

    def product(sums: Any) -> None:
        plgpu.wgmma(sums, weights, v_s)

    return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(out))


def _scale(part: int, memory: _Refs, work: _Work, static: Static) -> jax.Array:
    """What this head's keys (0) or values (1) are divided by in the pool."""
    return memory.scales[(memory.layer[0] * static.spec.layout.num_kv_heads + work.head) * 2 + part]


def _columns(static: Static, dtype: Any, width: int) -> list[Any]:
    """Pieces of a chunk's rows: registers would not hold the whole."""
    step = swizzle_bytes(width * jnp.dtype(dtype).itemsize) // jnp.dtype(dtype).itemsize
    return [pl.ds(start, step) for start in range(0, 2 * static.spec.layout.head_dim, step)]


def _widen(narrow_s: Any, wide_s: Any, static: Static) -> None:
    """8 bits to the queries' type."""
    for columns in _columns(static, narrow_s.dtype, 2 * static.spec.layout.head_dim):
        numbers = narrow_s[:, columns]
        if narrow_s.dtype != jnp.int8 and wide_s.dtype == jnp.bfloat16:
            numbers = numbers.astype(jnp.float32)  # no instruction goes from these 8 bits to bfloat16
        wide_s[:, columns] = numbers.astype(wide_s.dtype)


def _clear(kv_s: Any, is_narrow: bool, static: Static) -> None:
    for columns in _columns(static, kv_s.dtype, static.spec.layout.head_dim * (2 if is_narrow else 1)):
        shape = (static.tiling.chunk_rows, columns.size)
        kv_s[:, columns] = _laid_out(jnp.zeros(shape, kv_s.dtype), _WGMMA, static)


def _clean(first_key: jax.Array, block_ids: list[jax.Array], kv_s: Any, work: _Work, static: Static) -> None:
    """Zeros for the keys and values that the tile does not see, and for those of blocks outside of the layer."""
    block_size = static.spec.layout.block_size
    for columns in _columns(static, kv_s.dtype, static.spec.layout.head_dim):
        numbers = kv_s[:, columns]
        places = _count(numbers.shape, 0, static)
        keys = first_key + places
        is_kept = (keys >= work.begin) & (keys < work.end)
        blocks = lax.div(places, jnp.int32(block_size))
        for j, block_id in enumerate(block_ids):
            is_kept &= (blocks != j) | _is_block(block_id, static)
        kv_s[:, columns] = jnp.where(is_kept, numbers, jnp.zeros_like(numbers))


def _store(state: _State, memory: _Refs, work: _Work, static: Static) -> None:
    place = work.item, work.head
    memory.max_s[...] = state.max
    memory.sum_s[...] = state.sum
    inverse = jnp.where(state.sum > 0, 1 / state.sum, 0.0)
    if memory.scales is not None:
        inverse *= _scale(1, memory, work, static)
    out = state.out * lax.broadcast_in_dim(inverse, state.out.shape, [0])
    memory.q_s[...] = out.astype(memory.q_s.dtype)  # the queries have done their part
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(memory.max_s, memory.out_max.at[place])
    plgpu.copy_smem_to_gmem(memory.sum_s, memory.out_sum.at[place])
    _copy_out((*place, 0), memory, work, static)
    if static.tiling.max_parts > 1:
        # Two numbers of 16 bits are as good as one of 32, and need no memory of their own.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        memory.q_s[...] = (out - out.astype(memory.q_s.dtype).astype(jnp.float32)).astype(memory.q_s.dtype)
        plgpu.commit_smem()
        _copy_out((*place, 1), memory, work, static)
    plgpu.wait_smem_to_gmem(0)


def _copy_out(place: tuple[Any, ...], memory: _Refs, work: _Work, static: Static) -> None:
    """Starts the copy of a tile's results: of one token's where it has no more."""
    rows = pl.ds(0, -(-static.tiling.group // 8) * 8)

    @pl.when(work.num_tokens == 1)
    def _() -> None:
        plgpu.copy_smem_to_gmem(memory.q_s.at[rows], memory.out.at[(*place, rows)])

    @pl.when(work.num_tokens > 1)
    def _() -> None:
        plgpu.copy_smem_to_gmem(memory.q_s, memory.out.at[place])
