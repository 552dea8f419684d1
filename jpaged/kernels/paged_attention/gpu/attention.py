"""Paged attention on Hopper: prefill chunks and decodes of ragged rows in one launch of a Pallas Mosaic GPU kernel.

    rows -> items -> kernel -> outputs of items -> outputs of tokens
                      └ each part of a split context separately; merged here

The traced program builds the list of items from arrays (`work.py`). The kernel is in `kernel.py`, which is imported
when a call is traced, because its import takes a quarter of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.gpu.work import (
    SHARED_BYTES,
    TILE_ROWS,
    QueryPlaces,
    Tiling,
    choose_tiling,
    fixed_bytes,
    plan,
    stage_bytes,
)
from jpaged.kernels.paged_attention.spec import Attended, AttentionCall, ContextPart, Queries

_QUERY_DTYPES = ("bfloat16", "float16")
_KV_DTYPES = (*_QUERY_DTYPES, "int8", "float8_e4m3fn")
_MAX_BLOCK_SIZE = 128
_MAX_HEAD_DIM = 256


def unsupported_reason(layout: KVLayout, queries: Queries) -> str | None:
    """Return why a call cannot run here, or None. Queries must have 16 bits, and the type of a 16-bit pool."""
    group, dtype = queries.num_heads // layout.num_kv_heads, queries.dtype.name
    if layout.dtype.name not in _KV_DTYPES:
        return f"the pool has {layout.dtype.name}; tensor-core products require {', '.join(_KV_DTYPES)}"
    if dtype not in _QUERY_DTYPES or (not layout.is_scaled and layout.dtype.name != dtype):
        return (
            f"queries are {dtype} and the pool has {layout.dtype.name}; queries must be {' or '.join(_QUERY_DTYPES)}, "
            "and the pool must have the same type or one of 8 bits"
        )
    if layout.value_dim is not None:
        return (
            f"keys are latents of {layout.head_dim} numbers; only keys with separate values of up to {_MAX_HEAD_DIM} "
            "are supported"
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
            f"block_size {layout.block_size} with head_dim {layout.head_dim} in {layout.dtype.name} requires "
            f"{fixed + 2 * stage} bytes of shared memory (twice {stage}, and {fixed}); the limit is {SHARED_BYTES}"
        )
    return None


def unsupported_device_reason(device: jax.Device) -> str | None:
    """Return why it does not run on this device, or None."""
    if device.platform != "gpu":
        return f"runs on Hopper GPUs (sm_90); this is a {device.platform}"
    capability = str(device.compute_capability)
    if capability != "9.0":
        return f"runs on Hopper (sm_90); this is {device.device_kind}, sm_{capability.replace('.', '')}"
    return None


def attend(call: AttentionCall, tiling: Tiling | None = None, interpret: Any = None) -> Attended:
    """See `jpaged.kernels.paged_attention.paged_attention`.

    Args:
        call: the call.
        tiling: overrides the default tiling.
        interpret: parameters of Pallas' GPU interpreter, to run on CPUs.
    """
    return attend_parts(call, [ContextPart(call.rows, call.spec)], tiling, interpret)


def attend_parts(
    call: AttentionCall, parts: Sequence[ContextPart], tiling: Tiling | None = None, interpret: Any = None
) -> Attended:
    """Run `attend` over parts of the contexts of the call's rows, all of them in one launch."""
    from jpaged.kernels.paged_attention.gpu import kernel

    q_thd, tables_sm, spec = call.q_thd, call.rows.block_tables_sm, call.spec
    num_tokens, num_heads, head_dim = q_thd.shape
    num_kv_heads = spec.layout.num_kv_heads
    num_rows, table_width = tables_sm.shape
    tiling = tiling or choose_tiling(spec, num_heads, num_tokens, num_rows, table_width, len(parts))
    items_nf, places = plan(parts, tiling, num_tokens)
    q_tkgd = q_thd.reshape(num_tokens, num_kv_heads, -1, head_dim)
    q_kmd = q_tkgd[places.tokens_m, :, places.heads_m].transpose(1, 0, 2)
    results = kernel.attend_items(
        q_kmd,
        call.pool.reshape(*call.pool.shape[:2], num_kv_heads, 2 * head_dim),
        tables_sm,
        items_nf,
        jnp.asarray(call.layer, jnp.int32).reshape(1),
        None if call.scales_lk2 is None else call.scales_lk2.astype(jnp.float32).reshape(-1),
        kernel.GpuKernelParams(spec, tiling, is_interpreted=interpret is not None),
        interpret,
    )
    o_tkgd, lse_tkg = _merge(*results, places, tiling)
    return o_tkgd.reshape(q_thd.shape).astype(q_thd.dtype), lse_tkg.reshape(num_tokens, num_heads)


def _merge(
    out: jax.Array, largest: jax.Array, total: jax.Array, places: QueryPlaces, tiling: Tiling
) -> tuple[jax.Array, jax.Array]:
    """Merge the items' results into outputs [T, K, G, D] and log-sum-exps [T, K, G]."""
    num_kv_heads = out.shape[1]
    heads = jnp.arange(num_kv_heads)[None, None, :, None]
    parts = jnp.arange(tiling.max_parts)[None, :, None]
    is_part_pt = (parts < places.parts_lt[:, None]).reshape(-1, places.parts_lt.shape[1])
    # After the last part, that part again: it is in the cache.
    items = places.items_lt[:, None] + jnp.minimum(parts, jnp.maximum(places.parts_lt[:, None] - 1, 0))
    items = items.reshape(*is_part_pt.shape, 1, 1)
    rows = jnp.repeat(places.first_rows_lt, tiling.max_parts, axis=0)[..., None] + jnp.arange(tiling.group)
    rows, is_part = rows[:, :, None], is_part_pt[..., None, None]
    largest = jnp.where(is_part, largest[items, heads, rows], -jnp.inf)
    total = jnp.where(is_part, total[items, heads, rows], 0)
    out = jnp.where(is_part[..., None], out[items, heads, :, rows].astype(jnp.float32).sum(axis=-2), 0)
    top = jnp.where(jnp.isneginf(highest := largest.max(axis=0)), 0, highest)
    share = jnp.exp2(largest - top) * total
    whole = share.sum(axis=0)
    share = share / jnp.where(whole > 0, whole, 1)
    return (out * share[..., None]).sum(axis=0), _log_sum(top, whole)


def _log_sum(largest: jax.Array, total: jax.Array) -> jax.Array:
    has_keys = total > 0
    return jnp.where(has_keys, largest * jnp.log(2.0) + jnp.log(jnp.where(has_keys, total, 1)), -jnp.inf)
