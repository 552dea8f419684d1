"""The work of the Triton kernels: tiles of queries, chunks of keys, and parts of a context.

    tile     16, 32, 64 or 128 rows: the queries of some tokens of one row times the query heads of one KV head; for
             latents times some of the heads, because all read the same key and their outputs are wide
    chunk    16 to 64 keys, wherever their blocks are
    part     whole chunks of a tile's visible keys, which one program reads
    item     a part of a tile: the work of one program per KV head

    tiles    | row 0 . . . . | row 1 | row 2 . | padding |         items   0 0 0 0 | 1 | 2 2 | 3

Parts are as short as possible without exceeding the number of programs, and have equal lengths. The length follows from
the step's contexts, so that long ones have more parts. Tokens that belong to no row are tiles too, which see nothing:
they become zeros.

Rows that share a prefix are a second list of rows over the same tokens (`cascade.py`): its tiles are larger, because
each of them reads the prefix once. A token's results from several parts or lists are merged by log-sum-exps.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.spec import AttentionSpec, ContextPart

MIN_TILE_ROWS = 16
"""The rows of the smallest matmul of a tensor core."""
NUM_PROGRAMS = 512
"""Programs that fill the largest of these GPUs (170 multiprocessors) three times."""
MIN_PART_TOKENS = 256
"""Keys below which another part costs more in merging than it gains."""
_PROMPT_ROWS, _LATENT_ROWS = 64, 32
_MOST_LATENT_GROUP = 16
_SHARED_ROWS = 32
"""Maximum rows of tiles that read shared prefixes.

With 128-number heads, an A100 processor holds three thread blocks with such tiles next to decoding rows, but two with
tiles of 64 rows; an L4 holds two, and one. Decoding rows alone fit four times and twice.
"""
_WARPS_BYTES = 64 * 128 * 2
"""Bytes of a tile that fits, with its sums, into the registers of four warps."""
_CHUNK_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program's work.

    Attributes:
        group: query heads of a program.
        rows: of queries, a power of two.
        chunk_tokens: keys of a chunk, a power of two.
    """

    group: int
    rows: int
    chunk_tokens: int

    @property
    def num_tokens(self) -> int:
        """Queries of a row in a tile."""
        return self.rows // self.group

    def num_warps(self, layout: KVLayout, dtype: jnp.dtype) -> int:
        """Return the number of warps whose registers hold a tile with its converted 8-bit numbers.

        Args:
            dtype: of queries.
        """
        return 4 if _tile_bytes(self.rows, layout, dtype) <= _WARPS_BYTES else 8

    def max_num(self, num_tokens: int, num_rows: int) -> int:
        """Return the maximum number of tiles for this many tokens and rows: only a row's last tile is partly filled."""
        return min(num_tokens, (num_tokens + num_rows * (self.num_tokens - 1)) // self.num_tokens)


@dataclass(frozen=True, slots=True)
class Cut:
    """Sizes of the work of a call; each list of rows has its own tile.

    Attributes:
        tiles: of each list.
        nums_tiles: maximum tiles of each list.
        part_tokens: keys of the shortest part, in whole chunks of all tiles.
        num_parts: maximum parts of divided tiles; 0 if no context can be long enough.
        max_tokens: keys of the longest context.
    """

    tiles: tuple[Tile, ...]
    nums_tiles: tuple[int, ...]
    part_tokens: int
    num_parts: int
    max_tokens: int

    @property
    def num_items(self) -> int:
        """Maximum number of items."""
        return max(sum(self.nums_tiles), self.num_parts)

    @property
    def merged_tile(self) -> Tile:
        """Tile of the merge: the smallest, because a program holds the sums of two."""
        return replace(self.tiles[0], rows=_fitting(MIN_TILE_ROWS, self.tiles[0].group))

    @property
    def merged_rows(self) -> int:
        """Maximum rows of results to be merged; 0 if none ever is."""
        whole = sum(count * tile.rows for count, tile in zip(self.nums_tiles, self.tiles, strict=True))
        divided = self.num_parts * max(tile.rows for tile in self.tiles)
        return max(divided, whole if len(self.tiles) > 1 else 0)


def choose_cut(
    spec: AttentionSpec,
    dtype: jnp.dtype,
    num_heads: int,
    sizes: tuple[int, int, int],
    are_shared: Sequence[bool] = (False,),
) -> Cut:
    """Return the cut for a call.

    Args:
        spec: of the first list of rows.
        dtype: of queries.
        num_heads: query heads.
        sizes: tokens, rows, and the width of their tables.
        are_shared: for each list of rows, whether it covers shared prefixes.
    """
    layout = spec.layout
    num_tokens, num_rows, table_width = sizes
    group = get_group(layout, num_heads)
    has_prompts = num_tokens > num_rows
    tiles = tuple(_choose_tile(layout, dtype, group, is_shared, has_prompts) for is_shared in are_shared)
    max_tokens = table_width * layout.block_size
    if spec.kind.sliding_window is not None and len(tiles) == 1:  # other parts of contexts do not end with the window
        seen = max(tile.num_tokens + tile.chunk_tokens for tile in tiles)
        max_tokens = min(max_tokens, spec.kind.sliding_window + seen)
    return Cut(
        tiles=tiles,
        # Padding counts as one more row.
        nums_tiles=tuple(tile.max_num(num_tokens, num_rows + 1) for tile in tiles),
        part_tokens=MIN_PART_TOKENS,
        num_parts=max(2, NUM_PROGRAMS // (num_heads // group)) if max_tokens > MIN_PART_TOKENS else 0,
        max_tokens=max_tokens,
    )


def get_group(layout: KVLayout, num_heads: int) -> int:
    """Return the query heads of a program: all of a key/value head; for latents an equal part of them."""
    group = num_heads // layout.num_kv_heads
    if layout.value_dim is None:
        return group
    return max(size for size in range(1, _MOST_LATENT_GROUP + 1) if group % size == 0)


def latent_bytes(layout: KVLayout, dtype: jnp.dtype) -> int:
    """Return the shared memory of the smallest tile of latents: its queries, and two of the shortest chunks."""
    itemsize = max(2, layout.dtype.itemsize, dtype.itemsize)
    return 3 * MIN_TILE_ROWS * layout.head_dim * itemsize


def _choose_tile(layout: KVLayout, dtype: jnp.dtype, group: int, is_shared: bool, has_prompts: bool) -> Tile:
    prompt_rows = _PROMPT_ROWS if layout.value_dim is None else _LATENT_ROWS
    rows = prompt_rows if has_prompts else shared_rows(layout, dtype) if is_shared else MIN_TILE_ROWS
    rows = _fitting(rows, group)
    itemsize = max(2, layout.dtype.itemsize, dtype.itemsize)
    if layout.is_scaled and rows > MIN_TILE_ROWS:
        itemsize = 4  # converted 8-bit numbers are in registers, next to a large tile's sums
    chunk_tokens = 64
    while chunk_tokens > 16 and chunk_tokens * layout.head_dim * itemsize > _CHUNK_BYTES:
        chunk_tokens //= 2
    return Tile(group, rows, chunk_tokens)


def _fitting(rows: int, group: int) -> int:
    """Return `rows`, doubled until a token's group fits."""
    while rows < group:
        rows *= 2
    return rows


def shared_rows(layout: KVLayout, dtype: jnp.dtype) -> int:
    """Return the rows of tiles that read prefixes next to decoding rows: more, without needing more warps."""
    rows = _SHARED_ROWS
    while rows > MIN_TILE_ROWS and _tile_bytes(rows, layout, dtype) > _WARPS_BYTES:
        rows //= 2
    return rows


def _tile_bytes(rows: int, layout: KVLayout, dtype: jnp.dtype) -> int:
    itemsize = 2 * dtype.itemsize if layout.is_scaled else max(layout.dtype.itemsize, dtype.itemsize)
    return rows * layout.head_dim * itemsize


class TritonItemField(enum.IntEnum):
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
    """First key that the row sees, and the end of the visible keys."""
    FIRST_KEY = 6
    NUM_CHUNKS = 7
    """The part's beginning, at a multiple of a chunk, and its length in chunks."""
    MERGED_ROW = 8
    """The first of its result's rows among those to be merged; negative if its result is final."""
    LIST = 9
    """The item's list of rows."""


class MergeField(enum.IntEnum):
    """Columns of the array that locates a token's results to be merged."""

    FIRST_ROW = 0
    """Row of the first part; the next one is a tile further."""
    NUM_PARTS = 1
    """0 if the token's result is final."""


class AttentionWork(NamedTuple):
    """A step's work.

    Attributes:
        items: [items, len(TritonItemField)].
        merges: [lists, tokens, len(MergeField)].
    """

    items: jax.Array
    merges: jax.Array


class _TritonTiles(NamedTuple):
    """Tiles of one list of rows, [n]: their row, contents and visible keys; and the place of each token, [t]."""

    row_n: jax.Array
    first_token_n: jax.Array
    size_n: jax.Array
    position_n: jax.Array
    begin_n: jax.Array
    end_n: jax.Array
    first_key_n: jax.Array
    seen_n: jax.Array
    tile_t: jax.Array
    first_row_t: jax.Array
    is_row_t: jax.Array


def plan(parts: Sequence[ContextPart], cut: Cut, num_tokens: int) -> AttentionWork:
    """List the work of a call. It is the same in all layers of a kind, so that XLA computes it once.

    Args:
        parts: lists of rows over the same packed tokens; a token may be in one of each, over other keys. Tokens that
            belong to no row of the first list see nothing.
        cut: sizes of the work.
        num_tokens: T.
    """
    found = [_tiles(part, cut, place, num_tokens) for place, part in enumerate(parts)]
    row_n, first_token_n, size_n, position_n, begin_n, end_n, first_key_n, seen_n = (
        jnp.concatenate(field) for field in zip(*(tiles[:8] for tiles in found), strict=True)
    )
    list_n, chunk_n, rows_n = (
        jnp.concatenate([jnp.full(count, number) for count, number in zip(cut.nums_tiles, numbers, strict=True)])
        for numbers in (
            range(len(parts)),
            [tile.chunk_tokens for tile in cut.tiles],
            [tile.rows for tile in cut.tiles],
        )
    )
    part_tokens, parts_n = _divide(seen_n, size_n > 0, cut)

    first_tiles = [sum(cut.nums_tiles[:place]) for place in range(len(parts))]
    tile_lt = jnp.stack([tiles.tile_t + first for tiles, first in zip(found, first_tiles, strict=True)])
    parts_lt = jnp.where(jnp.stack([tiles.is_row_t for tiles in found]), parts_n[tile_lt], 0)
    # A tile's result is final if it is the only one of each token in it.
    num_many_t = jnp.append(0, jnp.cumsum(parts_lt.sum(axis=0) > 1))
    ends_n = jnp.minimum(first_token_n + size_n, num_tokens)
    is_merged_n = num_many_t[ends_n] > num_many_t[jnp.minimum(first_token_n, num_tokens)]
    merged_ends_n = jnp.cumsum(jnp.where(is_merged_n, parts_n * rows_n, 0))
    merged_starts_n = merged_ends_n - jnp.where(is_merged_n, parts_n * rows_n, 0)

    item_ends_n = jnp.cumsum(parts_n)
    items_i = jnp.arange(cut.num_items)
    tile_i = jnp.minimum(_first_above(item_ends_n, items_i), len(size_n) - 1)
    part_i = items_i - (item_ends_n - parts_n)[tile_i]
    tokens_i = jnp.clip(seen_n[tile_i] - part_i * part_tokens, 0, part_tokens)
    fields = {
        TritonItemField.ROW: row_n[tile_i],
        TritonItemField.FIRST_TOKEN: first_token_n[tile_i],
        TritonItemField.NUM_TOKENS: jnp.where(items_i < item_ends_n[-1], size_n[tile_i], 0),
        TritonItemField.POSITION: position_n[tile_i],
        TritonItemField.KV_BEGIN: begin_n[tile_i],
        TritonItemField.KV_END: end_n[tile_i],
        TritonItemField.FIRST_KEY: first_key_n[tile_i] + part_i * part_tokens,
        TritonItemField.NUM_CHUNKS: (tokens_i + chunk_n[tile_i] - 1) // chunk_n[tile_i],
        TritonItemField.MERGED_ROW: jnp.where(
            is_merged_n[tile_i], merged_starts_n[tile_i] + part_i * rows_n[tile_i], -1
        ),
        TritonItemField.LIST: list_n[tile_i],
    }
    first_row_lt = merged_starts_n[tile_lt] + jnp.stack([tiles.first_row_t for tiles in found])
    merges = first_row_lt, jnp.where(is_merged_n[tile_lt], parts_lt, 0)
    return AttentionWork(_columns([fields[field] for field in TritonItemField]), _columns(merges))


def _tiles(part: ContextPart, cut: Cut, place: int, num_tokens: int) -> _TritonTiles:
    """Return the tiles of one of the lists of rows; the first list also has tiles of padding."""
    rows, spec, tile = part.rows, part.spec, cut.tiles[place]
    num_rows, table_width = rows.kv_lens_s.shape[0], rows.block_tables_sm.shape[1]
    lens_s = jnp.minimum(rows.kv_lens_s, table_width * spec.layout.block_size)
    used = jnp.minimum(rows.num_rows, num_rows)
    is_used_s = jnp.arange(num_rows) < used
    if place > 0:
        is_used_s &= lens_s > rows.begins
    starts_r = jnp.append(rows.query_starts_s1[:-1], rows.query_starts_s1[used])  # the last is no row: padding
    counts_s = jnp.where(is_used_s, rows.query_starts_s1[1:] - rows.query_starts_s1[:-1], 0)
    counts_r = jnp.append(counts_s, num_tokens - rows.query_starts_s1[used] if place == 0 else 0)
    tile_ends_r = jnp.cumsum((counts_r + tile.num_tokens - 1) // tile.num_tokens)
    tile_starts_r = jnp.append(0, tile_ends_r[:-1])

    tiles_n = jnp.arange(cut.nums_tiles[place])
    row_n = jnp.minimum(_first_above(tile_ends_r, tiles_n), num_rows)
    offset_n = (tiles_n - tile_starts_r[row_n]) * tile.num_tokens
    size_n = jnp.where(tiles_n < tile_ends_r[-1], jnp.clip(counts_r[row_n] - offset_n, 0, tile.num_tokens), 0)
    position_n, begin_n, end_n = (jnp.append(x, 0)[row_n] for x in (rows.positions, rows.begins, lens_s))
    position_n += offset_n
    if spec.kind.sliding_window is not None:  # earlier blocks were freed, and are not read
        begin_n = jnp.maximum(begin_n, position_n - spec.kind.sliding_window + 1)
    first_n = begin_n
    last_n = jnp.minimum(end_n, position_n + size_n)
    if place > 0:
        size_n = jnp.where(first_n < last_n, size_n, 0)
    first_n = first_n // tile.chunk_tokens * tile.chunk_tokens

    tokens_t = jnp.arange(num_tokens)
    ends_s = jnp.where(jnp.arange(num_rows) < used, rows.query_starts_s1[1:], num_tokens)
    row_t = _first_above(ends_s, tokens_t)
    offset_t = tokens_t - starts_r[row_t]
    is_row_t = (offset_t >= 0) & (offset_t < counts_r[row_t])
    offset_t = jnp.where(is_row_t, offset_t, 0)
    table_row_n = jnp.minimum(row_n, num_rows - 1)
    return _TritonTiles(
        row_n=table_row_n if part.table_rows_s is None else part.table_rows_s[table_row_n],
        first_token_n=starts_r[row_n] + offset_n,
        size_n=size_n,
        position_n=position_n,
        begin_n=begin_n,
        end_n=end_n,
        first_key_n=first_n,
        seen_n=jnp.where(size_n > 0, jnp.maximum(last_n - first_n, 0), 0),
        tile_t=jnp.minimum(tile_starts_r[row_t] + offset_t // tile.num_tokens, cut.nums_tiles[place] - 1),
        first_row_t=offset_t % tile.num_tokens * tile.group,
        is_row_t=is_row_t,
    )


def _columns(fields: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([field.astype(jnp.int32) for field in fields], axis=-1)


def _divide(seen_n: jax.Array, is_used_n: jax.Array, cut: Cut) -> tuple[jax.Array, jax.Array]:
    """Return the keys of a part, and the parts of each tile: the shortest parts whose number is within the limit."""
    whole_n = is_used_n.astype(jnp.int32)
    if cut.num_parts == 0:
        return jnp.int32(cut.max_tokens + MIN_PART_TOKENS), whole_n
    lengths = [cut.part_tokens]
    while lengths[-1] < cut.max_tokens + MIN_PART_TOKENS:
        lengths.append(2 * lengths[-1])
    lengths_c = jnp.array(lengths, jnp.int32)
    parts_cn = jnp.maximum((seen_n + lengths_c[:, None] - 1) // lengths_c[:, None], whole_n)
    # The longest part is a whole context; if there are still too many, none is divided.
    choice = jnp.minimum((parts_cn.sum(axis=1) > cut.num_parts).sum(), len(lengths) - 1)
    return lengths_c[choice], parts_cn[choice]


def _first_above(ends_s: jax.Array, numbers_n: jax.Array) -> jax.Array:
    """Count for each number the ends not above it. One fused pass: a binary search would launch a loop of kernels."""
    return (ends_s[None, :] <= numbers_n[:, None]).sum(axis=1)
