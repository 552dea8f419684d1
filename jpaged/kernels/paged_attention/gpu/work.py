"""The list of work items of the Hopper kernel, built in the traced program from the step's rows.

    rows      | a: 40 tokens | b: 1 | c: 1 |         tiles of 16 tokens of one row, times the heads of a key/value head
    tiles     | a a a | b | c |
    items     | a a a | b b b b b b | c c |          a tile and a part of the keys that it sees: b has a long context

The array sizes fix their number, because the grid is part of a program; the split follows the contexts. A part is about
as long as each processor's share of the whole step, so that no processor is waited for. A single row fills the chip,
and of sixty rows those that are longer than the rest are split.

Sizes of tiles, chunks and parts:

    tile     64 rows, as required by the tensor core: 64 / group tokens of one row times the query heads of one KV head;
             or 128 rows for prompts, whose keys are then read half as often
    chunk    whole blocks, stored in 64 or 128 rows of shared memory, of which two or more are in flight
    part     chunks of a context that one thread block works on; merged by the log-sum-exp

The contexts of the step determine the number of parts of a context, up to a maximum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.spec import AttentionSpec, ContextPart, RaggedRows

if TYPE_CHECKING:
    from jaxtyping import Array, Int

TILE_ROWS = 64
"""Rows of the smallest matmul of a warpgroup."""
_NUM_CONSUMERS = 2
"""Warpgroups that share the chunks of a tile of 128 rows."""
NUM_PROCESSORS = 132
"""The multiprocessors of an H100 SXM or H200.

On chips with more, contexts are split into fewer parts than would fill them.
"""
SHARED_BYTES = 232_448
"""Shared memory of one thread block; `_RESERVED_BYTES` of it belong to the compiler."""
MAX_STAGES = 4
_REGISTERS = 56, 224
"""Registers of each producer thread, and of each consumer thread: 504 for three threads, of 65536 for 384."""
_MAX_CAPPED_HEAD_DIM = 128
"""With 256 and a cap on scores, a consumer's registers spill in tiles of 128 rows."""
_REGISTERS_OF_8_BITS = 88, 208
"""The same if the producer converts."""

_RESERVED_BYTES = 4096
_HALF_PROCESSOR_BYTES = 233_472 // 2 - 1024
"""Shared memory with which two thread blocks fit a multiprocessor, and matmuls of one hide the softmax of the other."""
_MIN_PART_TOKENS = 256
"""Keys below which another part costs more in merging than it gains."""
_MERGE_BYTES = 8 << 20
"""Maximum bytes of float32 parts that merging may read, used or not: some 2 us from the L2 cache."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of the work.

    Attributes:
        group: query heads of a key/value head.
        tile_tokens: queries of a row that one tile can hold.
        chunk_blocks: blocks of a chunk.
        chunk_tokens: keys of a chunk.
        chunk_rows: rows of shared memory for them; those beyond the tokens stay zero.
        stages: chunks in shared memory at a time.
        max_parts: maximum parts of a tile's keys; 1 splits none.
        wanted_items: tiles and parts of one key/value head that keep the whole chip busy, and fit at once.
        min_chunks: chunks of a part, except the last one.
        num_consumers: warpgroups that multiply, each 64 rows: one, which fetches its keys itself, or two plus a
            producer. For two, `stages` is even, so that a slot always belongs to the same one when they alternate.
        producer_registers: of each of the producer's threads, if there is one.
        consumer_registers: of each of a consumer's.
    """

    group: int
    tile_tokens: int
    chunk_blocks: int
    chunk_tokens: int
    chunk_rows: int
    stages: int
    max_parts: int
    wanted_items: int
    min_chunks: int
    num_consumers: int = 1
    producer_registers: int = 0
    consumer_registers: int = 0

    @property
    def tile_rows(self) -> int:
        """Rows of a tile, used or not."""
        return TILE_ROWS * self.num_consumers

    def num_tiles(self, num_tokens: int, num_rows: int) -> int:
        """Return the maximum number of tiles for this many tokens and rows: only a row's last tile is partly filled."""
        return max(1, min(num_tokens, (num_tokens + num_rows * (self.tile_tokens - 1)) // self.tile_tokens))

    def num_items(self, num_tokens: int, nums_rows: Sequence[int]) -> int:
        """Return the maximum number of items of these lists of rows: splitting adds up to `wanted_items`."""
        num_tiles = sum(self.num_tiles(num_tokens, num_rows) for num_rows in nums_rows)
        return num_tiles if self.max_parts == 1 else min(num_tiles * self.max_parts, num_tiles + self.wanted_items)


def chunk_rows(block_size: int) -> int:
    """Return the rows of shared memory for a chunk: 64, or 128 if a block needs them."""
    return 64 if block_size <= 64 else 128


def stage_bytes(layout: KVLayout, num_consumers: int = 1) -> int:
    """Return the shared memory of one chunk in flight; with a producer, including the 16-bit copy of 8-bit numbers."""
    num_bytes = chunk_rows(layout.block_size) * 2 * layout.head_dim * layout.dtype.itemsize
    return num_bytes + (_wide_bytes(layout) if num_consumers > 1 else 0)


def fixed_bytes(layout: KVLayout, num_consumers: int = 1) -> int:
    """Return the shared memory other than chunks: queries, sums, and a 16-bit copy if one warpgroup does everything."""
    rows = TILE_ROWS * num_consumers
    wide_bytes = _wide_bytes(layout) if num_consumers == 1 else 0
    return rows * layout.head_dim * 2 + 2 * rows * 4 + wide_bytes + _RESERVED_BYTES


def _wide_bytes(layout: KVLayout) -> int:
    return 2 * chunk_rows(layout.block_size) * 2 * layout.head_dim if layout.is_scaled else 0


def choose_tiling(
    spec: AttentionSpec,
    num_heads: int,
    num_tokens: int,
    num_rows: int,
    table_width: int,
    num_lists: int = 1,
) -> Tiling:
    """Return the tiling for a call of these sizes; `num_lists`: lists of rows over parts of the contexts."""
    group = num_heads // spec.layout.num_kv_heads
    prompt_tokens = num_tokens - num_rows
    fits_registers = spec.kind.soft_cap is None or spec.layout.head_dim <= _MAX_CAPPED_HEAD_DIM
    tiling = None
    if fits_registers and prompt_tokens >= num_rows and prompt_tokens * group > TILE_ROWS:
        tiling = wide_tiling(spec.layout, group)
    tiling = tiling or narrow_tiling(spec.layout, group)
    max_keys = table_width * spec.layout.block_size
    if spec.kind.sliding_window is not None:
        max_keys = min(max_keys, spec.kind.sliding_window + tiling.tile_tokens)
    merged_bytes = num_lists * num_tokens * num_heads * spec.layout.head_dim * 4
    max_parts = min(tiling.wanted_items, max_keys // _MIN_PART_TOKENS, _MERGE_BYTES // merged_bytes)
    return dataclasses.replace(tiling, max_parts=max(1, max_parts))


def narrow_tiling(layout: KVLayout, group: int) -> Tiling:
    """Return tiles of 64 rows, without splitting of contexts."""
    fixed, stage = fixed_bytes(layout), stage_bytes(layout)
    limit = _HALF_PROCESSOR_BYTES if fixed + 2 * stage <= _HALF_PROCESSOR_BYTES else SHARED_BYTES
    return _tiling(layout, group, 1, min(MAX_STAGES, (limit - fixed) // stage))


def wide_tiling(layout: KVLayout, group: int) -> Tiling | None:
    """Return tiles of 128 rows, without splitting of contexts; None if shared memory is too small."""
    room = SHARED_BYTES - fixed_bytes(layout, _NUM_CONSUMERS)
    stages = min(MAX_STAGES, room // stage_bytes(layout, _NUM_CONSUMERS)) // _NUM_CONSUMERS * _NUM_CONSUMERS
    if stages == 0:
        return None
    producer, consumer = _REGISTERS_OF_8_BITS if layout.is_scaled else _REGISTERS
    return dataclasses.replace(
        _tiling(layout, group, _NUM_CONSUMERS, stages), producer_registers=producer, consumer_registers=consumer
    )


def _tiling(layout: KVLayout, group: int, num_consumers: int, stages: int) -> Tiling:
    rows = chunk_rows(layout.block_size)
    chunk_blocks = rows // layout.block_size
    chunk_tokens = chunk_blocks * layout.block_size
    blocks_per_processor = 2 if num_consumers == 1 else 1
    return Tiling(
        group=group,
        tile_tokens=TILE_ROWS * num_consumers // group,
        chunk_blocks=chunk_blocks,
        chunk_tokens=chunk_tokens,
        chunk_rows=rows,
        stages=stages,
        max_parts=1,
        wanted_items=max(1, blocks_per_processor * NUM_PROCESSORS // layout.num_kv_heads),
        min_chunks=-(-_MIN_PART_TOKENS // chunk_tokens),
        num_consumers=num_consumers,
    )


_FINENESS = 16
"""Lengths of parts that are tried between a processor's share and twice that."""
_NO_WINDOW = 1 << 30
"""A window that no context fills."""


class QueryPlaces(NamedTuple):
    """Places of queries and results in the kernel's arrays. L is the number of lists of rows.

    Attributes:
        tokens_m: the token of each query row that the kernel reads; each tile begins at a multiple of 8 rows.
        heads_m: its head within the group of a key/value head.
        items_lt: the first of the items with each token's results.
        parts_lt: number of consecutive items with its results; none if the token sees no key.
        first_rows_lt: the first of the token's rows in each of them.
    """

    tokens_m: jax.Array
    heads_m: jax.Array
    items_lt: jax.Array
    parts_lt: jax.Array
    first_rows_lt: jax.Array


class _GpuTiles(NamedTuple):
    """Tiles of one list of rows, [n]: their row, contents and visible keys; and the place of each token, [t]."""

    row_n: jax.Array
    first_token_n: jax.Array
    size_n: jax.Array
    position_n: jax.Array
    begin_n: jax.Array
    end_n: jax.Array
    window_n: jax.Array
    is_bad_n: jax.Array
    tile_t: jax.Array
    first_row_t: jax.Array
    is_row_t: jax.Array


def plan(parts: Sequence[ContextPart], tiling: Tiling, num_tokens: int) -> tuple[Int[Array, "n F"], QueryPlaces]:
    """Return items as the kernel reads them (`kernel.ItemField`), and the places of queries and results.

    Args:
        parts: lists of rows over the same packed tokens; a token may be in one of each, over other keys.
        tiling: sizes of the work.
        num_tokens: T.
    """
    found = [_tiles(part, tiling, num_tokens) for part in parts]
    row_n, first_token_n, size_n, position_n, begin_n, end_n, window_n, is_bad_n = (
        jnp.concatenate([getattr(tiles, name) for tiles in found])
        for name in ("row_n", "first_token_n", "size_n", "position_n", "begin_n", "end_n", "window_n", "is_bad_n")
    )
    eighth_ends_n = jnp.cumsum((size_n * tiling.group + 7) // 8)
    eighth_starts_n = _starts(eighth_ends_n)

    first_chunk_n = begin_n // tiling.chunk_tokens
    chunks_n = jnp.where(size_n > 0, -(-end_n // tiling.chunk_tokens) - first_chunk_n, 0)
    share_n = _share(chunks_n, tiling)
    parts_n = -(-chunks_n // share_n)
    item_ends_n = jnp.cumsum(parts_n)
    item_starts_n = _starts(item_ends_n)
    items = jnp.arange(tiling.num_items(num_tokens, [part.rows.kv_lens_s.shape[0] for part in parts]))
    tile_i = jnp.minimum(_first_above(item_ends_n, items), len(size_n) - 1)
    skipped_i = (items - item_starts_n[tile_i]) * share_n[tile_i]
    fields = (
        row_n[tile_i],
        eighth_starts_n[tile_i] * 8,
        jnp.where(items < item_ends_n[-1], size_n[tile_i], 0),
        position_n[tile_i],
        begin_n[tile_i],
        end_n[tile_i],
        first_chunk_n[tile_i] + skipped_i,
        jnp.clip(chunks_n[tile_i] - skipped_i, 0, share_n[tile_i]),
        window_n[tile_i],
        is_bad_n[tile_i],
    )
    items_nf = jnp.stack([field.astype(jnp.int32) for field in fields], axis=1)

    # Query rows in groups of eight. The last tile may extend beyond the last token.
    num_eighths = (len(parts) * num_tokens * tiling.group + 7 * len(size_n)) // 8 + tiling.tile_rows // 8
    eighths = jnp.arange(num_eighths)
    tile_e = jnp.minimum(_first_above(eighth_ends_n, eighths), len(size_n) - 1)
    row_m = (((eighths - eighth_starts_n[tile_e]) * 8)[:, None] + jnp.arange(8)).reshape(-1)
    token_m = jnp.clip(jnp.repeat(first_token_n[tile_e], 8) + row_m // tiling.group, 0, num_tokens - 1)

    num_tiles = [len(tiles.size_n) for tiles in found]
    tile_lt = jnp.stack([tiles.tile_t + sum(num_tiles[:i]) for i, tiles in enumerate(found)])
    is_row_lt, first_row_lt = (jnp.stack([getattr(x, name) for x in found]) for name in ("is_row_t", "first_row_t"))
    parts_lt = jnp.where(is_row_lt, parts_n[tile_lt], 0)
    return items_nf, QueryPlaces(token_m, row_m % tiling.group, item_starts_n[tile_lt], parts_lt, first_row_lt)


def _tiles(part: ContextPart, tiling: Tiling, num_tokens: int) -> _GpuTiles:
    rows, spec = part.rows, part.spec
    num_rows = rows.kv_lens_s.shape[0]
    is_used_s = (jnp.arange(num_rows) < rows.num_rows) & (rows.kv_lens_s > rows.begins)
    starts_s = rows.query_starts_s1[:-1]
    counts_s = jnp.where(is_used_s, rows.query_starts_s1[1:] - starts_s, 0)
    tile_ends_s = jnp.cumsum(-(-counts_s // tiling.tile_tokens))
    tile_starts_s = _starts(tile_ends_s)

    tiles_n = jnp.arange(tiling.num_tiles(num_tokens, num_rows))
    row_n = jnp.minimum(_first_above(tile_ends_s, tiles_n), num_rows - 1)
    offset_n = (tiles_n - tile_starts_s[row_n]) * tiling.tile_tokens
    size_n = jnp.where(tiles_n < tile_ends_s[-1], jnp.clip(counts_s[row_n] - offset_n, 0, tiling.tile_tokens), 0)
    position_n = rows.positions[row_n] + offset_n
    begin_n, end_n = rows.begins[row_n], jnp.minimum(rows.kv_lens_s[row_n], position_n + size_n)
    window = _NO_WINDOW if spec.kind.sliding_window is None else spec.kind.sliding_window
    begin_n = jnp.maximum(begin_n, position_n - (window - 1))
    size_n = jnp.where(begin_n < end_n, size_n, 0)

    tokens_t = jnp.arange(num_tokens)
    ends_s = jnp.where(jnp.arange(num_rows) < rows.num_rows, rows.query_starts_s1[1:], num_tokens)
    row_t = jnp.minimum(_first_above(ends_s, tokens_t), num_rows - 1)
    offset_t = tokens_t - starts_s[row_t]
    is_row_t = (offset_t >= 0) & (offset_t < counts_s[row_t])
    offset_t = jnp.where(is_row_t, offset_t, 0)
    return _GpuTiles(
        row_n=row_n if part.table_rows_s is None else part.table_rows_s[row_n],
        first_token_n=starts_s[row_n] + offset_n,
        size_n=size_n,
        position_n=position_n,
        begin_n=begin_n,
        end_n=end_n,
        window_n=jnp.full_like(row_n, window),
        is_bad_n=_has_bad_ids(rows, spec)[row_n],
        tile_t=jnp.minimum(tile_starts_s[row_t] + offset_t // tiling.tile_tokens, len(tiles_n) - 1),
        first_row_t=offset_t % tiling.tile_tokens * tiling.group,
        is_row_t=is_row_t,
    )


def _share(chunks_n: jax.Array, tiling: Tiling) -> jax.Array:
    """Return the chunks of each tile's parts.

    It is the smallest length at which all parts fit on the chip at once: a part that is left over would double the
    time. If the tiles alone exceed that, the longer ones are split.
    """
    if tiling.max_parts == 1:
        return jnp.maximum(chunks_n, 1)
    mean = -(-chunks_n.sum() // tiling.wanted_items)
    limits_c = jnp.maximum(mean + mean * jnp.arange(_FINENESS + 1) // _FINENESS, tiling.min_chunks)
    parts_cn = jnp.minimum(-(-chunks_n // limits_c[:, None]), tiling.max_parts)
    highest = 2**31 - 1
    limit = jnp.where(parts_cn.sum(axis=1) <= tiling.wanted_items, limits_c, highest).min()
    limit = jnp.where(limit == highest, limits_c[0], limit)
    parts_n = jnp.clip(-(-chunks_n // limit), 1, tiling.max_parts)
    return jnp.maximum(-(-chunks_n // parts_n), 1)


def _starts(ends_n: jax.Array) -> jax.Array:
    return jnp.concatenate((jnp.zeros(1, ends_n.dtype), ends_n[:-1]))


def _first_above(ends_s: jax.Array, numbers_n: jax.Array) -> jax.Array:
    """Count for each number the ends not above it. One fused pass: a binary search would launch a loop of kernels."""
    return (ends_s[None, :] <= numbers_n[:, None]).sum(axis=1)


def _has_bad_ids(rows: RaggedRows, spec: AttentionSpec) -> Int[Array, "S"]:
    """Return True for each row whose table names blocks outside the layer, as far as its context needs the table."""
    layout, tables_sm = spec.layout, rows.block_tables_sm
    first_keys_m = jnp.arange(tables_sm.shape[1]) * layout.block_size
    is_needed_sm = (first_keys_m >= rows.begins[:, None]) & (first_keys_m < rows.kv_lens_s[:, None])
    is_bad_sm = (tables_sm < 0) | (tables_sm >= layout.blocks_per_layer)
    return (is_needed_sm & is_bad_sm).any(axis=1)
