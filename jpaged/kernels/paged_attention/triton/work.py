"""How the Triton kernels cut their work: into tiles of queries, chunks of keys, and parts of a context.

    tile     16, 64 or 128 rows: the queries of some tokens of one row by the query heads of one KV head
    chunk    16 to 64 keys, wherever their blocks lie
    part     whole chunks of what a tile sees, which one program reads; a tile of several is merged by its log-sum-exp
    item     a part of a tile: what the programs of all KV heads do

    tiles    | row 0 . . . . | row 1 | row 2 . | padding |         items   0 0 0 0 | 1 | 2 2 | 3

Parts are as short as leaves all programs busy, and all of one length: it follows from the contexts that are there, so
that a long one has more of them. Tokens that belong to no row are tiles too, which see nothing: they become zeros.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpaged.kernels.paged_attention.spec import AttentionSpec, RaggedRows

MIN_TILE_ROWS = 16
"""The rows of the smallest product of a tensor core."""
NUM_PROGRAMS = 512
"""As many programs fill the largest of these GPUs (170 multiprocessors) three times."""
MIN_PART_TOKENS = 256
"""Keys below which another part costs more in merging than it gains."""
_PREFILL_ROWS = 64
_CHUNK_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to cut the work of a call.

    Attributes:
        group: query heads of a key/value head.
        tile_rows: rows of a tile, a power of two.
        chunk_tokens: keys of a chunk, a power of two.
        part_chunks: chunks of the shortest part.
        num_tiles: tiles at most.
        num_parts: parts of divided tiles at most; 0 where no context can be long enough.
        max_chunks: chunks of the longest context.
    """

    group: int
    tile_rows: int
    chunk_tokens: int
    part_chunks: int
    num_tiles: int
    num_parts: int
    max_chunks: int

    @property
    def tile_tokens(self) -> int:
        """Queries of a row that one tile holds."""
        return self.tile_rows // self.group

    @property
    def num_items(self) -> int:
        """Items at most."""
        return max(self.num_tiles, self.num_parts)


def choose_cut(spec: AttentionSpec, dtype: jnp.dtype, num_heads: int, sizes: tuple[int, int, int]) -> Cut:
    """The cut for a call of these sizes: tokens, rows, and the width of their tables."""
    layout = spec.layout
    num_tokens, num_rows, table_width = sizes
    group = num_heads // layout.num_kv_heads
    tile_rows = MIN_TILE_ROWS if num_tokens <= num_rows else _PREFILL_ROWS
    while tile_rows < group:
        tile_rows *= 2
    itemsize = max(2, layout.dtype.itemsize, dtype.itemsize)
    if layout.is_scaled and tile_rows > MIN_TILE_ROWS:
        itemsize = 4  # what 8 bits become on their way lies in registers, beside a large tile's sums
    chunk_tokens = 64
    while chunk_tokens > 16 and chunk_tokens * layout.head_dim * itemsize > _CHUNK_BYTES:
        chunk_tokens //= 2
    max_keys = table_width * layout.block_size
    if spec.kind.sliding_window is not None:
        max_keys = min(max_keys, spec.kind.sliding_window + tile_rows // group + chunk_tokens)
    tile_tokens = tile_rows // group
    return Cut(
        group=group,
        tile_rows=tile_rows,
        chunk_tokens=chunk_tokens,
        part_chunks=MIN_PART_TOKENS // chunk_tokens,
        # Only the last tile of a row has room left, and what belongs to no row is one more.
        num_tiles=min(num_tokens, (num_tokens + (num_rows + 1) * (tile_tokens - 1)) // tile_tokens),
        num_parts=max(2, NUM_PROGRAMS // layout.num_kv_heads) if max_keys > MIN_PART_TOKENS else 0,
        max_chunks=-(-max_keys // chunk_tokens),
    )


class ItemField(enum.IntEnum):
    """Columns of the array that describes the items."""

    ROW = 0
    """The row whose block table is read."""
    FIRST_TOKEN = 1
    NUM_TOKENS = 2
    """0 for an item that is not used."""
    POSITION = 3
    """The position of the first token."""
    KV_BEGIN = 4
    KV_END = 5
    """First key that the row sees, and the first behind them."""
    FIRST_KEY = 6
    NUM_CHUNKS = 7
    """Where the part begins, at a multiple of a chunk, and how long it is."""
    IS_PART = 8
    """Whether the tile has others, and the result goes where they are merged."""


class TileField(enum.IntEnum):
    """Columns of the array that describes the tiles for those who merge them."""

    FIRST_TOKEN = 0
    NUM_TOKENS = 1
    FIRST_ITEM = 2
    NUM_ITEMS = 3
    """1 where there is nothing to merge."""


class Work(NamedTuple):
    """A step's work.

    Attributes:
        items: [items, len(ItemField)].
        tiles: [tiles, len(TileField)].
    """

    items: jax.Array
    tiles: jax.Array


def plan(rows: RaggedRows, spec: AttentionSpec, cut: Cut, num_tokens: int) -> Work:
    """Lists the work of a call. It is the same in all layers of a kind, so that XLA makes it once."""
    num_rows = rows.block_tables_sm.shape[0]
    used = jnp.minimum(rows.num_rows, num_rows)
    starts_r = jnp.append(rows.query_starts_s1[:-1], rows.query_starts_s1[used])  # the last is no row: padding
    counts_s = jnp.where(jnp.arange(num_rows) < used, rows.query_starts_s1[1:] - rows.query_starts_s1[:-1], 0)
    counts_r = jnp.append(counts_s, num_tokens - rows.query_starts_s1[used])
    tile_ends_r = jnp.cumsum((counts_r + cut.tile_tokens - 1) // cut.tile_tokens)

    tiles_n = jnp.arange(cut.num_tiles)
    row_n = jnp.minimum(_first_above(tile_ends_r, tiles_n), num_rows)
    starts_n = jnp.where(row_n > 0, tile_ends_r[row_n - 1], 0)
    offset_n = (tiles_n - starts_n) * cut.tile_tokens
    size_n = jnp.where(tiles_n < tile_ends_r[-1], jnp.clip(counts_r[row_n] - offset_n, 0, cut.tile_tokens), 0)
    lens_s = jnp.minimum(rows.kv_lens_s, rows.block_tables_sm.shape[1] * spec.layout.block_size)
    position_n, begin_n, end_n = (jnp.append(x, 0)[row_n] for x in (rows.positions, rows.begins, lens_s))
    position_n += offset_n
    first_n = begin_n
    if spec.kind.sliding_window is not None:
        first_n = jnp.maximum(first_n, position_n - spec.kind.sliding_window + 1)
    first_n = first_n // cut.chunk_tokens * cut.chunk_tokens
    seen_n = jnp.maximum(jnp.minimum(end_n, position_n + size_n) - first_n, 0)
    chunks_n = jnp.where(size_n > 0, (seen_n + cut.chunk_tokens - 1) // cut.chunk_tokens, 0)
    part_chunks, parts_n = _divide(chunks_n, size_n > 0, cut)

    item_ends_n = jnp.cumsum(parts_n)
    items_i = jnp.arange(cut.num_items)
    tile_i = jnp.minimum(_first_above(item_ends_n, items_i), cut.num_tiles - 1)
    done_i = (items_i - (item_ends_n - parts_n)[tile_i]) * part_chunks
    is_used_i = items_i < item_ends_n[-1]
    fields = {
        ItemField.ROW: jnp.minimum(row_n, num_rows - 1)[tile_i],
        ItemField.FIRST_TOKEN: (starts_r[row_n] + offset_n)[tile_i],
        ItemField.NUM_TOKENS: jnp.where(is_used_i, size_n[tile_i], 0),
        ItemField.POSITION: position_n[tile_i],
        ItemField.KV_BEGIN: begin_n[tile_i],
        ItemField.KV_END: end_n[tile_i],
        ItemField.FIRST_KEY: first_n[tile_i] + done_i * cut.chunk_tokens,
        ItemField.NUM_CHUNKS: jnp.clip(chunks_n[tile_i] - done_i, 0, part_chunks),
        ItemField.IS_PART: parts_n[tile_i] > 1,
    }
    merged = (starts_r[row_n] + offset_n, size_n, item_ends_n - parts_n, parts_n)
    return Work(_columns([fields[field] for field in ItemField]), _columns(merged))


def _columns(fields: list[jax.Array] | tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack([field.astype(jnp.int32) for field in fields], axis=1)


def _divide(chunks_n: jax.Array, is_used_n: jax.Array, cut: Cut) -> tuple[jax.Array, jax.Array]:
    """Chunks of a part, and parts of each tile: the shortest parts of which there are not too many."""
    whole_n = is_used_n.astype(jnp.int32)
    if cut.num_parts == 0:
        return jnp.int32(cut.max_chunks), whole_n
    lengths = [cut.part_chunks]
    while lengths[-1] < cut.max_chunks:
        lengths.append(2 * lengths[-1])
    lengths_c = jnp.array(lengths, jnp.int32)
    parts_cn = jnp.maximum((chunks_n + lengths_c[:, None] - 1) // lengths_c[:, None], whole_n)
    # The longest part is a whole context; where even so there are too many, none is divided either.
    choice = jnp.minimum((parts_cn.sum(axis=1) > cut.num_parts).sum(), len(lengths) - 1)
    return lengths_c[choice], parts_cn[choice]


def _first_above(ends_s: jax.Array, numbers_n: jax.Array) -> jax.Array:
    """Counts for each number the ends not above it. One fused pass: a binary search would be a loop of launches."""
    return (ends_s[None, :] <= numbers_n[:, None]).sum(axis=1)
