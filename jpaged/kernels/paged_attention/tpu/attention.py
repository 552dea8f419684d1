"""Paged attention on TPUs: a kernel for rows that decode, and one for chunks of prompts.

    rows of one query     decode/   the rows of a matmul are query heads
    rows of more          chunks/   the packed queries in tiles; each row meets each tile that it has a part of

    packed tokens | a a a a a a a b | c d d d d d - - |        segments of the second call: a/0 b/0, d/1
                    └ tile 0 ───────┘ └ tile 1 ───────┘        of the first: c

XLA computes the list of segments from the rows, once per step (lists.py); the grid is as long as the list. The first
call also stores the new keys and values: both see them. Its outputs are the array that the second writes into, tile by
tile: results of other rows in a tile are read first, and preserved.

Verified by interpretation, with checks for races, and by compiling for v5e, v5p, v6e and tpu7x. If a device has two
cores, as in a v5p, they share the rows of one query and the heads of chunks: half of the key/value heads each, or half
of the query heads of a single one; heads that cannot be halved run on one core.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels.kv_layout import KVLayout, output_dim
from jpaged.kernels.paged_attention.spec import Attended, AttentionCall, NewKV, Queries, Updated
from jpaged.kernels.paged_attention.tpu import sizes as sizing
from jpaged.kernels.paged_attention.tpu.chunks import call as chunks
from jpaged.kernels.paged_attention.tpu.chunks import sizes as chunk_sizes
from jpaged.kernels.paged_attention.tpu.decode import call as decode
from jpaged.kernels.paged_attention.tpu.decode import sizes as decode_sizes
from jpaged.kernels.paged_attention.tpu.lists import num_padding, prepare, step_lists

__all__ = ["attend", "prepare", "unsupported_device_reason", "unsupported_reason", "update"]

_QUERY_DTYPES = ("float32", "bfloat16")
_KV_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8")
_MAX_HEAD_DIM = 512
_MAX_LATENT_DIM = 640


def unsupported_reason(layout: KVLayout, queries: Queries) -> str | None:
    """Return why there is no kernel for it, or None. Lists of rows and tokens must fit into the small scalar memory."""
    if queries.dtype.name not in _QUERY_DTYPES:
        return f"queries are {queries.dtype}; they must be {' or '.join(_QUERY_DTYPES)}"
    if layout.num_shards > 1:
        return f"the pool has {layout.num_shards} shards; each device must use its own, under jax.shard_map"
    if layout.dtype.name not in _KV_DTYPES:
        return f"kv_dtype {layout.dtype.name} is not one of {', '.join(_KV_DTYPES)}"
    if layout.block_size not in sizing.BLOCK_SIZES:
        return f"block_size {layout.block_size} is not one of {', '.join(map(str, sizing.BLOCK_SIZES))}"
    most = _MAX_HEAD_DIM if layout.value_dim is None else _MAX_LATENT_DIM
    if layout.head_dim > most:
        return f"head_dim {layout.head_dim} is above the limit of {most}"
    refusal = decode_sizes.refusal(layout, queries.num_heads) or chunk_sizes.refusal(layout, queries.num_heads)
    if refusal is not None:
        return refusal
    num_tiles = decode_sizes.num_tiles(layout, queries.num_heads, queries.num_tokens)
    return sizing.lists_refusal(queries, layout.num_kv_heads, num_tiles)


def unsupported_device_reason(device: jax.Device) -> str | None:
    """Return why a device cannot run it, or None; only TPUs can."""
    return None if device.platform == "tpu" else f"requires a TPU; this device's platform is {device.platform}"


def attend(call: AttentionCall) -> Attended:
    """See `jpaged.kernels.paged_attention.paged_attention`."""
    o_thd, lse_th, _ = update(call, None)
    return o_thd, lse_th


def update(call: AttentionCall, new_kv: NewKV | None) -> Updated:
    """Store keys and values, which are divided by their scales, then `attend`; None stores none.

    The lists that were prepared for the rows determine the places.
    """
    lists = call.rows.lists
    if lists is None:
        lists = step_lists(call.rows, None if new_kv is None else new_kv[2], call.spec, call.queries)

    layout, (num_tokens, num_heads, head_dim) = call.spec.layout, call.q_thd.shape
    # A token's heads are concatenated, as the projection produces them, and as the next matmul takes the outputs.
    padding = ((0, num_padding(call.spec, call.queries)), (0, 0), (0, sizing.key_lanes(layout) - head_dim))
    q_tw = jnp.pad(call.q_thd, padding).reshape(num_tokens + padding[0][1], -1)
    o_tw, lse, pool = decode.attend(call, q_tw, lists, new_kv)
    lse_th = jnp.where(lists.decodes.is_ours_t[:, None], lse, -jnp.inf)
    if lists.chunks is not None:
        o_tw, lse = chunks.attend(call, lists.chunks, lists.tables, _scales(call), pool, q_tw, o_tw)
        lse_th = jnp.where(lists.chunks.is_ours_t[:, None], lse, lse_th)
    first_lane = layout.lanes // 2 if layout.is_joined else 0
    o_thl = o_tw.reshape(-1, num_heads, sizing.value_lanes(layout))[:num_tokens]
    return o_thl[:, :, first_lane : first_lane + output_dim(layout)], lse_th, pool


def _scales(call: AttentionCall) -> jax.Array:
    """Return alternating scales of keys and values of each head [2K]; those of the keys include the softmax scale."""
    layout, factors = call.spec.layout, np.asarray([call.spec.kind.scale, 1.0], np.float32)
    if call.scales_lk2 is None:
        return jnp.asarray(np.tile(factors, layout.num_kv_heads))
    return (call.scales_lk2[call.layer].astype(jnp.float32) * factors).reshape(-1)
