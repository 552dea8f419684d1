"""Faults of the Triton kernels and of the lists of work that they get."""

from __future__ import annotations

from tests.mutation.planting import Fault

_KERNEL = "kernel.py"
_WORK = "work.py"
_CHUNKS = ("right and chunks",)
_PARTS = ("right and parts",)
_CUT = ("every_query",)
_PLACES = ("merged",)
_CASCADE = ("all_parts",)

TRITON_FAULTS = (
    Fault(
        "the layer offset is ignored",
        _KERNEL,
        "first_place=memory.layer[0] * layout.blocks_per_layer",
        "first_place=memory.layer[0] * 0",
        _CHUNKS,
    ),
    Fault("a query sees the key after it", _KERNEL, "(distances >= 0)", "(distances >= -1)", _CHUNKS),
    Fault(
        "the window is one key too wide",
        _KERNEL,
        "is_seen &= distances < spec.kind.sliding_window",
        "is_seen &= distances <= spec.kind.sliding_window",
        _PARTS,
    ),
    Fault(
        "the running sums are not rescaled to the new maximum",
        _KERNEL,
        "fade = jnp.exp2(state.max - new_max)",
        "fade = jnp.exp2(state.max - state.max)",
        _CHUNKS,
    ),
    Fault(
        "the key after the context is read",
        _KERNEL,
        "& (keys < item.end)",
        "& (keys < item.end + 1)",
        _CHUNKS,
    ),
    Fault(
        "skipped keys are read",
        _KERNEL,
        "(keys >= item.begin) &",
        "(keys >= 0) &",
        ("what_lies_around",),
    ),
    Fault(
        "a block id beyond the layer counts as valid",
        _KERNEL,
        "is_read = is_context & (ids >= 0) & (ids < spec.layout.blocks_per_layer)",
        "is_read = is_context & (ids >= 0)",
        ("what_lies_around",),
    ),
    Fault(
        "keys use the scale of values",
        _KERNEL,
        "spec.kind.scale * (_scale(0, kv_head, memory)",
        "spec.kind.scale * (_scale(1, kv_head, memory)",
        ("right and int8",),
    ),
    Fault(
        "odd and even columns are swapped",
        _KERNEL,
        "bits = words >> 8 if lane else (words << 8) >> 8",
        "bits = (words << 8) >> 8 if lane else words >> 8",
        ("right and int8",),
    ),
    Fault(
        "8-bit floats lose their sign",
        _KERNEL,
        "bits = (bits & -0x8000) | ((bits & 0x7F) << 7)",
        "bits = (bits & 0x7F) << 7",
        ("right and fp8",),
    ),
    Fault(
        "all pieces of a head begin at the same column",
        _KERNEL,
        "begin, left = begin + size, left - size",
        "begin, left = begin, left - size",
        ("right and pieces",),
    ),
    Fault(
        "the first part to merge is not stored",
        _KERNEL,
        "@pl.when(first_row >= 0)",
        "@pl.when(first_row > 0)",
        _PARTS,
    ),
    Fault(
        "merged parts are not rescaled to the new maximum",
        _KERNEL,
        "share = jnp.exp2(max_ - new_max), jnp.exp2(their_max - new_max)",
        "share = jnp.exp2(max_ - new_max), jnp.exp2(their_max - their_max)",
        _PARTS,
    ),
    Fault(
        "parts of a context overlap",
        _WORK,
        "jnp.clip(seen_n[tile_i] - part_i * part_tokens, 0, part_tokens)",
        "jnp.maximum(seen_n[tile_i] - part_i * part_tokens, 0)",
        _CUT,
    ),
    Fault(
        "a context is split into more parts than fit",
        _WORK,
        "(parts_cn.sum(axis=1) > cut.num_parts)",
        "(parts_cn.sum(axis=1) > cut.num_parts + 8)",
        _CUT,
    ),
    Fault(
        "padding tokens are in no tile",
        _WORK,
        "jnp.append(counts_s, num_tokens - rows.query_starts_s1[used] if place == 0 else 0)",
        "jnp.append(counts_s, 0)",
        _CUT,
    ),
    Fault(
        "the window starts at the tile's last query",
        _WORK,
        "jnp.maximum(begin_n, position_n - spec.kind.sliding_window + 1)",
        "jnp.maximum(begin_n, position_n + size_n - spec.kind.sliding_window)",
        _CUT,
    ),
    Fault(
        "all query heads of a group use the last one",
        _KERNEL,
        "head * tile.group + lax.rem(rows, jnp.int32(tile.group))",
        "head * tile.group + tile.group - 1 - lax.rem(rows, jnp.int32(tile.group)) * 0",
        _CHUNKS,
    ),
    Fault(
        "a shared prefix is read through the wrong block table",
        _WORK,
        "if part.table_rows_s is None else part.table_rows_s[table_row_n]",
        "if part.table_rows_s is None else table_row_n",
        _CASCADE,
    ),
    Fault(
        "a row's own part is not merged with its shared prefix",
        _WORK,
        "jnp.cumsum(parts_lt.sum(axis=0) > 1)",
        "jnp.cumsum(parts_lt.max(axis=0) > 1)",
        _CASCADE,
    ),
    Fault(
        "parts to merge overwrite each other",
        _WORK,
        "merged_starts_n[tile_i] + part_i * rows_n[tile_i]",
        "merged_starts_n[tile_i]",
        _PLACES,
    ),
    Fault(
        "parts to merge are read at the tile's first row",
        _WORK,
        "merged_starts_n[tile_lt] + jnp.stack([tiles.first_row_t for tiles in found])",
        "merged_starts_n[tile_lt]",
        _PLACES,
    ),
    Fault(
        "every list of parts has the tile size of the first",
        _KERNEL,
        "first_rows + i * kinds[place].tile.rows",
        "first_rows + i * kinds[0].tile.rows",
        _CASCADE,
    ),
    Fault(
        "only tiles of the first kind are computed",
        _KERNEL,
        "if its == kind\n            ]",
        "if its == kinds[0]]",
        _CASCADE,
    ),
    Fault(
        "a merge ignores the lists after the second",
        _KERNEL,
        "for place in range(len(kinds)):\n            state",
        "for place in range(min(2, len(kinds))):\n            state",
        _CASCADE,
    ),
)
