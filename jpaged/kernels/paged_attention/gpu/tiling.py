"""How the Hopper kernel cuts its work: into tiles of queries, chunks of keys, and parts of a context.

tile     64 rows, as the tensor core wants them: 64 / group tokens of one row by the query heads of one KV head;
         or 128 of them for prompts, whose keys are then read half as often
chunk    whole blocks, stored in 64 or 128 rows of shared memory, of which two or more are on their way
part     chunks of a context that one block of threads works on; merged by the log-sum-exp

How many parts a context has is found from the contexts of the step, in `work.py`; here is how many it may have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.spec import AttentionSpec

TILE_ROWS = 64
"""Rows of the smallest product of a warpgroup."""
_NUM_CONSUMERS = 2
"""Warpgroups that share what is fetched for a tile of 128 rows."""
NUM_PROCESSORS = 132
"""The multiprocessors of an H100 SXM or H200. More only cuts a context into fewer parts than would fill the chip."""
SHARED_BYTES = 232_448
"""What one block of threads may take, and `_RESERVED_BYTES` of it are the compiler's."""
MAX_STAGES = 4
_REGISTERS = 56, 224
"""A thread of the producer has the first, of the consumers the second: 504 of three threads, 65536 for 384."""
_MAX_CAPPED_HEAD_DIM = 128
"""With 256 and a cap on scores, a consumer's registers spill in tiles of 128 rows."""
_REGISTERS_OF_8_BITS = 88, 208
"""The same where the producer converts."""

_RESERVED_BYTES = 4096
_HALF_PROCESSOR_BYTES = 233_472 // 2 - 1024
"""So little that two blocks of threads fit a multiprocessor, and the one's products hide the other's softmax."""
_MIN_PART_TOKENS = 256
"""Keys below which another part costs more in merging than it gains."""
_MERGE_BYTES = 8 << 20
"""What merging may read in float32, used or not: some 2 us out of the second-level cache."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to cut the work.

    Attributes:
        group: query heads of a key/value head.
        tile_tokens: queries of a row that one tile can hold.
        chunk_blocks: blocks of a chunk.
        chunk_tokens: keys of a chunk.
        chunk_rows: rows of shared memory for them; those beyond the tokens stay zero.
        stages: chunks that lie in shared memory at a time.
        max_parts: into which a tile's keys are cut at most; 1 cuts none.
        wanted_items: tiles and parts of one key/value head that keep the whole chip busy, and have room at once.
        min_chunks: chunks of a part, but for the last one.
        num_consumers: warpgroups that multiply, each 64 rows: one, which fetches its keys itself, or two with a
            producer beside them; then `stages` is even, so that a slot is always the same one's where they take turns.
        producer_registers: of each of the producer's threads, where there is one.
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
        """The most tiles that so many tokens in so many rows make: only a row's last tile has room left."""
        return max(1, min(num_tokens, (num_tokens + num_rows * (self.tile_tokens - 1)) // self.tile_tokens))

    def num_items(self, num_tokens: int, nums_rows: Sequence[int]) -> int:
        """The most items of lists of so many rows: cutting adds no more than the chip has room for (`work.py`)."""
        num_tiles = sum(self.num_tiles(num_tokens, num_rows) for num_rows in nums_rows)
        return num_tiles if self.max_parts == 1 else min(num_tiles * self.max_parts, num_tiles + self.wanted_items)


def chunk_rows(block_size: int) -> int:
    """Rows of shared memory for a chunk: 64, or 128 where a block needs them."""
    return 64 if block_size <= 64 else 128


def stage_bytes(layout: KVLayout, num_consumers: int = 1) -> int:
    """Shared memory of one chunk on its way; a producer makes 16 bits of 8 beside those."""
    num_bytes = chunk_rows(layout.block_size) * 2 * layout.head_dim * layout.dtype.itemsize
    return num_bytes + (_wide_bytes(layout) if num_consumers > 1 else 0)


def fixed_bytes(layout: KVLayout, num_consumers: int = 1) -> int:
    """Shared memory beside the chunks: queries, sums, and where one warpgroup alone makes 16 bits of 8."""
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
    """The cut for a call of these sizes; `num_lists`: of rows that see parts of the contexts."""
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
    """Tiles of 64 rows, and contexts that are not cut."""
    fixed, stage = fixed_bytes(layout), stage_bytes(layout)
    limit = _HALF_PROCESSOR_BYTES if fixed + 2 * stage <= _HALF_PROCESSOR_BYTES else SHARED_BYTES
    return _tiling(layout, group, 1, min(MAX_STAGES, (limit - fixed) // stage))


def wide_tiling(layout: KVLayout, group: int) -> Tiling | None:
    """Tiles of 128 rows, and contexts that are not cut; None where shared memory has no room for them."""
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
