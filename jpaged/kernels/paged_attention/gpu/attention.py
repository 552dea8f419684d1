"""Paged attention on Hopper: prefill chunks and decodes of ragged rows in one launch of a Pallas Mosaic GPU kernel.

    rows -> tiles -> kernel -> outputs of tiles -> outputs of tokens
                      └ each part of a context by itself, where it was cut; merged here

The list of tiles is made in the traced program, from arrays: its length is fixed, and tiles beyond the rows do nothing.
The kernel is in `kernel.py`, which is imported when a call is traced: it takes a quarter of a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.gpu.tiling import (
    SHARED_BYTES,
    TILE_ROWS,
    Tiling,
    choose_tiling,
    fixed_bytes,
    stage_bytes,
)
from jpaged.kernels.paged_attention.spec import Attended, AttentionCall, AttentionSpec, Queries, RaggedRows

if TYPE_CHECKING:
    from jaxtyping import Array, Int

_QUERY_DTYPES = ("bfloat16", "float16")
_KV_DTYPES = (*_QUERY_DTYPES, "int8", "float8_e4m3fn")
_MAX_BLOCK_SIZE = 128
_MAX_HEAD_DIM = 256


def unsupported_reason(layout: KVLayout, queries: Queries) -> str | None:
    """Why a call cannot run here, or None. Queries have to be of 16 bits, and of the pool's type where that is."""
    group, dtype = queries.num_heads // layout.num_kv_heads, queries.dtype.name
    if layout.dtype.name not in _KV_DTYPES:
        return f"the pool holds {layout.dtype.name}; its tensor-core products take {', '.join(_KV_DTYPES)}: use xla"
    if dtype not in _QUERY_DTYPES or (not layout.is_scaled and layout.dtype.name != dtype):
        return (
            f"queries are {dtype} and the pool holds {layout.dtype.name}; queries are {' or '.join(_QUERY_DTYPES)}, "
            "and the pool's type is theirs or one of 8 bits: use xla"
        )
    if layout.block_size % 8 or layout.block_size > _MAX_BLOCK_SIZE:
        return f"block_size {layout.block_size} is not a multiple of 8 up to {_MAX_BLOCK_SIZE}"
    if layout.head_dim % 16 or layout.head_dim > _MAX_HEAD_DIM:
        return f"head_dim {layout.head_dim} is not a multiple of 16 up to {_MAX_HEAD_DIM}"
    if group > TILE_ROWS:
        return f"{group} query heads share a key/value head; the limit is {TILE_ROWS}"
    fixed, stage = fixed_bytes(layout), stage_bytes(layout)
    if fixed + 2 * stage > SHARED_BYTES:
        return (
            f"block_size {layout.block_size} with head_dim {layout.head_dim} in {layout.dtype.name} takes "
            f"{fixed + 2 * stage} bytes of shared memory (twice {stage}, and {fixed}); the limit is "
            f"{SHARED_BYTES}"
        )
    return None


def unsupported_device_reason(device: jax.Device) -> str | None:
    """Why it does not run on this device, or None."""
    if device.platform != "gpu":
        return f"runs on Hopper GPUs (sm_90); this is a {device.platform}"
    capability = str(device.compute_capability)
    if capability != "9.0":
        return f"runs on Hopper (sm_90); this is {device.device_kind}, sm_{capability.replace('.', '')}: use xla"
    return None


def attend(call: AttentionCall, tiling: Tiling | None = None, interpret: Any = None) -> Attended:
    """See `jpaged.kernels.paged_attention.paged_attention`.

    Args:
        call: which it is.
        tiling: another cut than that of the rule.
        interpret: parameters of Pallas' GPU interpreter, with which it runs on CPUs.
    """
    from jpaged.kernels.paged_attention.gpu import kernel

    q_thd, rows, spec = call.q_thd, call.rows, call.spec
    num_tokens, num_heads, head_dim = q_thd.shape
    num_kv_heads = spec.layout.num_kv_heads
    tiling = tiling or choose_tiling(spec, num_heads, num_tokens, *rows.block_tables_sm.shape)
    tiles, places = plan(rows, spec, tiling, num_tokens)
    q_tkgd = q_thd.reshape(num_tokens, num_kv_heads, -1, head_dim)
    q_kmd = q_tkgd[places.tokens_m, :, places.heads_m].transpose(1, 0, 2)
    out, largest, total = kernel.attend_tiles(
        q_kmd,
        call.pool.reshape(*call.pool.shape[:2], num_kv_heads, 2 * head_dim),
        rows.block_tables_sm,
        tiles,
        jnp.asarray(call.layer, jnp.int32).reshape(1),
        None if call.scales_lk2 is None else call.scales_lk2.astype(jnp.float32).reshape(-1),
        kernel.Static(spec, tiling, is_interpreted=interpret is not None),
        interpret,
    )
    o_tkgd, lse_tkg = _merge(out, largest, total, places, tiling)
    is_row_t = places.is_row_t[:, None]
    lse_th = jnp.where(is_row_t, lse_tkg.reshape(num_tokens, num_heads), -jnp.inf)
    o_thd = jnp.where(is_row_t[..., None], o_tkgd.reshape(q_thd.shape), 0)
    return o_thd.astype(q_thd.dtype), lse_th


class Places(NamedTuple):
    """Where queries and results lie in the kernel's arrays.

    Attributes:
        tokens_m: the token of each row of queries that the kernel reads; each tile begins at a multiple of 8 rows.
        heads_m: and which of the heads that share a key/value head.
        tiles_t: the tile that has each token's results.
        first_rows_t: the first of its rows there.
        is_row_t: whether the token belongs to a row at all.
    """

    tokens_m: jax.Array
    heads_m: jax.Array
    tiles_t: jax.Array
    first_rows_t: jax.Array
    is_row_t: jax.Array


def plan(rows: RaggedRows, spec: AttentionSpec, tiling: Tiling, num_tokens: int) -> tuple[jax.Array, Places]:
    """Tiles as the kernel reads them: see `kernel.TileField`."""
    num_rows = rows.kv_lens_s.shape[0]
    is_used_s = jnp.arange(num_rows) < rows.num_rows
    starts_s = rows.query_starts_s1[:-1]
    counts_s = jnp.where(is_used_s, rows.query_starts_s1[1:] - starts_s, 0)
    tile_ends_s = jnp.cumsum((counts_s + tiling.tile_tokens - 1) // tiling.tile_tokens)
    tile_starts_s = jnp.concatenate((jnp.zeros(1, tile_ends_s.dtype), tile_ends_s[:-1]))

    tiles_n = jnp.arange(tiling.num_tiles(num_tokens, num_rows))
    row_n = jnp.minimum(_first_above(tile_ends_s, tiles_n), num_rows - 1)
    offset_n = (tiles_n - tile_starts_s[row_n]) * tiling.tile_tokens
    size_n = jnp.where(tiles_n < tile_ends_s[-1], jnp.clip(counts_s[row_n] - offset_n, 0, tiling.tile_tokens), 0)
    eighth_ends_n = jnp.cumsum((size_n * tiling.group + 7) // 8)
    eighth_starts_n = jnp.concatenate((jnp.zeros(1, eighth_ends_n.dtype), eighth_ends_n[:-1]))
    fields = (
        row_n,
        eighth_starts_n * 8,
        size_n,
        rows.positions[row_n] + offset_n,
        rows.begins[row_n],
        rows.kv_lens_s[row_n],
        _has_bad_ids(rows, spec)[row_n],
    )
    tiles = jnp.stack([field.astype(jnp.int32) for field in fields], axis=1)

    # Rows of queries in eights. The last tile may reach beyond the last token.
    num_eighths = (num_tokens * tiling.group + 7 * len(tiles_n)) // 8 + TILE_ROWS // 8
    eighths = jnp.arange(num_eighths)
    tile_e = jnp.minimum(_first_above(eighth_ends_n, eighths), len(tiles_n) - 1)
    row_m = (((eighths - eighth_starts_n[tile_e]) * 8)[:, None] + jnp.arange(8)).reshape(-1)
    token_m = jnp.repeat(starts_s[row_n[tile_e]] + offset_n[tile_e], 8) + row_m // tiling.group
    token_m = jnp.clip(token_m, 0, num_tokens - 1)

    tokens_t = jnp.arange(num_tokens)
    ends_s = jnp.where(is_used_s, rows.query_starts_s1[1:], num_tokens)
    row_t = jnp.minimum(_first_above(ends_s, tokens_t), num_rows - 1)
    offset_t = tokens_t - starts_s[row_t]
    is_row_t = (offset_t >= 0) & (offset_t < counts_s[row_t])
    offset_t = jnp.where(is_row_t, offset_t, 0)
    tile_t = tile_starts_s[row_t] + offset_t // tiling.tile_tokens
    first_row_t = offset_t % tiling.tile_tokens * tiling.group
    return tiles, Places(token_m, row_m % tiling.group, tile_t, first_row_t, is_row_t)


def _first_above(ends_s: jax.Array, numbers_n: jax.Array) -> jax.Array:
    """Counts for each number the ends not above it. One fused pass: a binary search would be a loop of launches."""
    return (ends_s[None, :] <= numbers_n[:, None]).sum(axis=1)


def _has_bad_ids(rows: RaggedRows, spec: AttentionSpec) -> Int[Array, "S"]:
    """Whether a row's table names blocks outside of the layer, as far as its context needs the table."""
    layout, tables_sm = spec.layout, rows.block_tables_sm
    first_keys_m = jnp.arange(tables_sm.shape[1]) * layout.block_size
    is_needed_sm = (first_keys_m >= rows.begins[:, None]) & (first_keys_m < rows.kv_lens_s[:, None])
    is_bad_sm = (tables_sm < 0) | (tables_sm >= layout.blocks_per_layer)
    return (is_needed_sm & is_bad_sm).any(axis=1)


def _merge(
    out: jax.Array, largest: jax.Array, total: jax.Array, places: Places, tiling: Tiling
) -> tuple[jax.Array, jax.Array]:
    """Outputs [T, K, G, D] and log-sum-exps [T, K, G] from those of the tiles' parts."""
    num_kv_heads = out.shape[1]
    tiles = places.tiles_t[:, None, None]
    heads = jnp.arange(num_kv_heads)[None, :, None]
    rows = (places.first_rows_t[:, None] + jnp.arange(tiling.group))[:, None, :]
    if tiling.splits == 1:
        out, largest, total = (x[tiles, heads, 0, rows] for x in (out, largest, total))
        return out, _log_sum(largest, total)
    parts = jnp.arange(tiling.splits)[:, None, None, None]
    out, largest, total = (x[tiles[None], heads[None], parts, rows[None]] for x in (out, largest, total))
    top = largest.max(axis=0)
    share = jnp.exp2(largest - top) * total
    whole = share.sum(axis=0)
    share = share / jnp.where(whole > 0, whole, 1)
    return (out * share[..., None]).sum(axis=0), _log_sum(top, whole)


def _log_sum(largest: jax.Array, total: jax.Array) -> jax.Array:
    has_keys = total > 0
    return jnp.where(has_keys, largest * jnp.log(2.0) + jnp.log(jnp.where(has_keys, total, 1)), -jnp.inf)
