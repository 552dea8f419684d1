"""Paged attention on GPUs since Ampere: prefill chunks and decodes of ragged rows, in kernels of CUDA C++.

kernel.cu has the kernels, of the library of `jpaged/kernels/cuda_library.py`; this module has the call, and the list of
work items.

    rows -> tiles of 16 (query, head) pairs -> items: a tile and one part of the context, or all -> kernel
                                               parts of a tile -> a second kernel merges them in order

Several warps compute the scores of latents, each for other columns of the values.

Parts have a fixed number of keys, which follows from the width of the block tables, and are merged in the order of the
context, within an item and between items with the same operations. So the bits of a query's result follow from the
query's context alone: they do not depend on the batch, the chunks of a prefill, or which tiles are divided.

The traced program lists the items, once for all layers of a step. Their number is fixed, and unused ones do nothing.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels import cuda_library as library
from jpaged.kernels.cuda_library import unsupported_gpu_reason
from jpaged.kernels.kv_layout import KVLayout, output_dim
from jpaged.kernels.paged_attention.cpu import NUMBERS
from jpaged.kernels.paged_attention.spec import (
    Attended,
    AttentionCall,
    AttentionSpec,
    ContextPart,
    Queries,
    RaggedRows,
    merge,
)

_QUERY_DTYPES = ("float32", "bfloat16", "float16")
_MAX_HEAD_DIM = 256
_MAX_LATENT_DIM, _MAX_VALUE_DIM = 576, 512
TILE_PAIRS = 16
"""(query, head) pairs of a tile: the rows of a product of the tensor core."""
_MIN_PART_KEYS = 256
"""Keys of a part, unless contexts can have more than `_MAX_PARTS` of them."""
_MAX_PARTS = 64
_MAX_DIVIDED_TILES = 8
"""Maximum tiles of a row whose context is divided over warps: more tiles fill the processors by themselves."""
_PART_BYTES = 32 << 20
"""Maximum bytes of the parts of divided tiles."""
_MIN_SLOTS = 64
"""The maximum number of such parts of each key/value head is at least this."""


def unsupported_reason(layout: KVLayout, queries: Queries) -> str | None:
    """Return why a call cannot run here, or None."""
    if queries.dtype.name not in _QUERY_DTYPES:
        return f"queries are {queries.dtype.name}; they must be {', '.join(_QUERY_DTYPES)}"
    if layout.value_dim is not None:
        if layout.head_dim % 16 or layout.head_dim > _MAX_LATENT_DIM:
            return f"latents of {layout.head_dim} numbers are not multiples of 16 up to {_MAX_LATENT_DIM}"
        if layout.value_dim % 16 or layout.value_dim > _MAX_VALUE_DIM:
            return f"values of {layout.value_dim} numbers are not multiples of 16 up to {_MAX_VALUE_DIM}"
        return None
    if layout.head_dim % 16 or layout.head_dim > _MAX_HEAD_DIM:
        return f"head_dim {layout.head_dim} is not a multiple of 16 up to {_MAX_HEAD_DIM}"
    return None


def unsupported_device_reason(device: jax.Device) -> str | None:
    """Return why it does not run on this device, or in this installation, or None."""
    missing = unsupported_gpu_reason(device) or library.missing_reason()
    return missing or library.unbuilt_reason(str(device.compute_capability))


def attend(call: AttentionCall, division: Division | None = None, dtype: np.dtype | None = None) -> Attended:
    """See `jpaged.kernels.paged_attention.paged_attention`.

    Args:
        division: overrides the default.
        dtype: of the outputs, float32 or the queries' (default).
    """
    library.missing_reason()  # registers the library if there is one; a program is lowered without it
    q_thd, rows, spec = call.q_thd, call.rows, call.spec
    num_tokens, num_heads, _ = q_thd.shape
    layout = spec.layout
    value_dim = output_dim(layout)
    division = division or choose_division(spec, call.queries)
    work = plan(rows, spec, division, num_tokens)
    scales = jnp.zeros((0,), jnp.float32) if call.scales_lk2 is None else call.scales_lk2.astype(jnp.float32)
    parts_shape = (layout.num_kv_heads, max(1, division.num_slots), TILE_PAIRS)
    results = (
        jax.ShapeDtypeStruct((num_tokens, num_heads, value_dim), dtype or q_thd.dtype),
        jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
        jax.ShapeDtypeStruct((*parts_shape, value_dim), jnp.float32),
        jax.ShapeDtypeStruct((*parts_shape, 2), jnp.float32),
    )
    out_thd, lse_th, *_ = jax.ffi.ffi_call(library.TARGET, results)(
        q_thd,
        call.pool,
        jnp.asarray(call.layer, jnp.int32),
        scales,
        rows.block_tables_sm.astype(jnp.int32),
        *work,
        scale=np.float32(spec.kind.scale),
        soft_cap=np.float32(spec.kind.soft_cap or 0),
        window=np.int64(spec.kind.sliding_window or 0),
        blocks_per_layer=np.int64(layout.blocks_per_layer),
        kv_number=np.int64(NUMBERS.index(layout.dtype.name)),
        part_keys=np.int64(division.part_keys),
        value_dim=np.int64(layout.value_dim or 0),
    )
    return out_thd, lse_th


def attend_parts(call: AttentionCall, parts: Sequence[ContextPart]) -> Attended:
    """Run `attend` over each part of the contexts of the call's rows, and merge the results in float32."""
    calls = (replace(call, rows=part.rows, spec=part.spec) for part in parts)
    out_thd, lse_th = functools.reduce(merge, (attend(one, dtype=np.dtype(np.float32)) for one in calls))
    return out_thd.astype(call.q_thd.dtype), lse_th


@dataclass(frozen=True, slots=True)
class Division:
    """Sizes of the work of a call.

    Attributes:
        group: query heads of a key/value head.
        num_tiles: maximum number of tiles.
        part_keys: keys of a part.
        num_slots: maximum parts of divided tiles for each key/value head; 0 divides none.
    """

    group: int
    num_tiles: int
    part_keys: int
    num_slots: int


def choose_division(spec: AttentionSpec, queries: Queries) -> Division:
    """Return the division of a call's work."""
    layout, num_tokens = spec.layout, queries.num_tokens
    group = queries.num_heads // layout.num_kv_heads
    # Each row, and the padding before and after all rows, has one tile that is partly filled.
    num_tiles = num_tokens * group // TILE_PAIRS + min(num_tokens, queries.num_rows + 2)
    max_keys = queries.table_width * layout.block_size
    part_keys = _MIN_PART_KEYS
    while part_keys * _MAX_PARTS < max_keys:
        part_keys *= 2
    if spec.kind.sliding_window is not None:
        max_keys = min(max_keys, spec.kind.sliding_window + TILE_PAIRS + part_keys)
    slot_bytes = layout.num_kv_heads * TILE_PAIRS * output_dim(layout) * 4
    num_slots = min(max(_MIN_SLOTS, _PART_BYTES // slot_bytes), num_tiles * -(-max_keys // part_keys))
    return Division(group, num_tiles, part_keys, num_slots if max_keys > part_keys else 0)


class CudaItemField(enum.IntEnum):
    """Columns of the array that describes the items, as in kernel.cu."""

    ROW = 0
    """The row whose block table is read."""
    FIRST_TOKEN = 1
    """The row's first token."""
    FIRST_PAIR = 2
    """The first of the tile's (query, head) pairs, among the row's; and their number, 0 for an unused item."""
    NUM_PAIRS = 3
    POSITION = 4
    """The position of the row's first token."""
    KV_BEGIN = 5
    """The keys that some pair of the tile sees."""
    KV_END = 6
    FIRST_PART = 7
    NUM_PARTS = 8
    SLOT = 9
    """The place of the result among the parts to merge; negative if the result is final."""


class CudaMergeField(enum.IntEnum):
    """Columns of the array that describes the tiles to merge, as in kernel.cu."""

    FIRST_SLOT = 0
    NUM_PARTS = 1
    """0 if the tile is not divided."""
    FIRST_TOKEN = 2
    FIRST_PAIR = 3
    NUM_PAIRS = 4


class CudaWork(NamedTuple):
    """A step's work.

    Attributes:
        items: [items, len(CudaItemField)].
        merges: [tiles, len(CudaMergeField)]; no rows if no tile can be divided.
    """

    items: jax.Array
    merges: jax.Array


def plan(rows: RaggedRows, spec: AttentionSpec, division: Division, num_tokens: int) -> CudaWork:
    """List the work of a call: the same in all layers of a kind, so that XLA computes it once."""
    num_rows, table_width = rows.block_tables_sm.shape
    group, part_keys = division.group, division.part_keys
    # Padding before the first row and after the last are two more rows, without keys.
    used = jnp.minimum(rows.num_rows, num_rows)
    starts_s1 = rows.query_starts_s1[jnp.minimum(jnp.arange(num_rows + 1), used)]
    bounds = jnp.clip(jnp.concatenate([jnp.array([0]), starts_s1, jnp.array([num_tokens])]), 0, num_tokens)
    pairs_r = jnp.maximum(bounds[1:] - bounds[:-1], 0) * group
    lens_s = jnp.minimum(rows.kv_lens_s, table_width * spec.layout.block_size)
    tiles_r = -(-pairs_r // TILE_PAIRS)
    tile_ends_r = jnp.cumsum(tiles_r)

    tiles_n = jnp.arange(division.num_tiles)
    row_n = jnp.minimum(_count_not_above(tile_ends_r, tiles_n), num_rows + 1)
    first_pair_n = (tiles_n - (tile_ends_r - tiles_r)[row_n]) * TILE_PAIRS
    num_pairs_n = jnp.where(tiles_n < tile_ends_r[-1], jnp.clip(pairs_r[row_n] - first_pair_n, 0, TILE_PAIRS), 0)
    position_n, begin_n, end_n = (jnp.pad(x, 1)[row_n] for x in (rows.positions, rows.begins, lens_s))
    begin_n = jnp.maximum(begin_n, 0)
    if spec.kind.sliding_window is not None:  # earlier blocks were freed, and are not read
        begin_n = jnp.maximum(begin_n, position_n + first_pair_n // group - spec.kind.sliding_window + 1)
    last_query_n = (first_pair_n + num_pairs_n - 1) // group
    end_n = jnp.where(num_pairs_n > 0, jnp.minimum(end_n, position_n + last_query_n + 1), 0)
    first_part_n = begin_n // part_keys
    parts_n = jnp.where(end_n > begin_n, (end_n + part_keys - 1) // part_keys - first_part_n, 0)

    can_divide_n = (parts_n > 1) & (tiles_r[row_n] <= _MAX_DIVIDED_TILES)
    slot_ends_n = jnp.cumsum(jnp.where(can_divide_n, parts_n, 0))
    is_divided_n = can_divide_n & (slot_ends_n <= division.num_slots)
    first_slot_n = slot_ends_n - parts_n

    items_n = jnp.where(is_divided_n, parts_n, num_pairs_n > 0)
    item_ends_n = jnp.cumsum(items_n)
    items_i = jnp.arange(division.num_tiles + division.num_slots)
    tile_i = jnp.minimum(_count_not_above(item_ends_n, items_i), division.num_tiles - 1)
    part_i = items_i - (item_ends_n - items_n)[tile_i]
    is_divided_i = is_divided_n[tile_i]
    fields = {
        CudaItemField.ROW: jnp.clip(row_n - 1, 0, num_rows - 1)[tile_i],
        CudaItemField.FIRST_TOKEN: bounds[row_n][tile_i],
        CudaItemField.FIRST_PAIR: first_pair_n[tile_i],
        CudaItemField.NUM_PAIRS: jnp.where(items_i < item_ends_n[-1], num_pairs_n[tile_i], 0),
        CudaItemField.POSITION: position_n[tile_i],
        CudaItemField.KV_BEGIN: begin_n[tile_i],
        CudaItemField.KV_END: end_n[tile_i],
        CudaItemField.FIRST_PART: first_part_n[tile_i] + part_i,
        CudaItemField.NUM_PARTS: jnp.where(is_divided_i, 1, parts_n[tile_i]),
        CudaItemField.SLOT: jnp.where(is_divided_i, first_slot_n[tile_i] + part_i, -1),
    }
    merges = {
        CudaMergeField.FIRST_SLOT: first_slot_n,
        CudaMergeField.NUM_PARTS: jnp.where(is_divided_n, parts_n, 0),
        CudaMergeField.FIRST_TOKEN: bounds[row_n],
        CudaMergeField.FIRST_PAIR: first_pair_n,
        CudaMergeField.NUM_PAIRS: num_pairs_n,
    }
    listed = _columns([merges[field] for field in CudaMergeField])
    return CudaWork(_columns([fields[field] for field in CudaItemField]), listed if division.num_slots else listed[:0])


def _columns(fields: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([field.astype(jnp.int32) for field in fields], axis=-1)


def _count_not_above(ends: jax.Array, numbers_n: jax.Array) -> jax.Array:
    """Count for each number the ends not above it. One fused pass: a binary search would launch a loop of kernels."""
    return (ends[None, :] <= numbers_n[:, None]).sum(axis=1)
