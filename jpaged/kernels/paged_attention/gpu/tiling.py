"""Sizes of the Hopper kernel's work: tiles of queries, chunks of keys, and parts of a context.

tile     64 rows, as required by the tensor core: 64 / group tokens of one row times the query heads of one KV head;
         or 128 rows for prompts, whose keys are then read half as often
chunk    whole blocks, stored in 64 or 128 rows of shared memory, of which two or more are in flight
part     chunks of a context that one thread block works on; merged by the log-sum-exp

`work.py` determines the number of parts of a context from the contexts of the step; this module sets its maximum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.spec import AttentionSpec

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
