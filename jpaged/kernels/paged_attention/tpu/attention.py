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

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.kernels.kv_layout import KVLayout, output_dim
from jpaged.kernels.paged_attention.spec import Attended, AttentionCall, NewKV, Queries, Updated
from jpaged.kernels.paged_attention.tpu import sizes as sizing
from jpaged.kernels.paged_attention.tpu.chunks import sizes as chunk_sizes
from jpaged.kernels.paged_attention.tpu.decode import sizes as decode_sizes
from jpaged.kernels.paged_attention.tpu.lists import num_padding, prepare, step_lists

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from jpaged.kernels.paged_attention.tpu.decode.plan import DecodePlan
    from jpaged.kernels.paged_attention.tpu.lists import CallLists, StepLists

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
    o_tw, lse, pool = _attend_decodes(call, q_tw, lists, new_kv)
    lse_th = jnp.where(lists.decodes.is_ours_t[:, None], lse, -jnp.inf)
    if lists.chunks is not None:
        o_tw, lse = _attend_chunks(call, lists.chunks, lists.tables, _head_scales(call), pool, q_tw, o_tw)
        lse_th = jnp.where(lists.chunks.is_ours_t[:, None], lse, lse_th)
    first_lane = layout.lanes // 2 if layout.is_joined else 0
    o_thl = o_tw.reshape(-1, num_heads, sizing.value_lanes(layout))[:num_tokens]
    return o_thl[:, :, first_lane : first_lane + output_dim(layout)], lse_th, pool


def _head_scales(call: AttentionCall) -> jax.Array:
    """Return alternating scales of keys and values of each head [2K]; those of the keys include the softmax scale."""
    layout, factors = call.spec.layout, np.asarray([call.spec.kind.scale, 1.0], np.float32)
    if call.scales_lk2 is None:
        return jnp.asarray(np.tile(factors, layout.num_kv_heads))
    return (call.scales_lk2[call.layer].astype(jnp.float32) * factors).reshape(-1)


def _attend_decodes(call: AttentionCall, q_tw: Float[Array, "T W"], lists: StepLists, new_kv: NewKV | None) -> Updated:
    """Compute attention of the rows of one query, and store the new keys and values of all tokens.

    Args:
        call: of all rows.
        q_tw: its queries, as both kernels take them.
        lists: of the step.
        new_kv: the new keys and values; None stores none.

    Returns:
        outputs in the queries' layout, 0 for tokens of no row; log-sum-exp [T, H], undefined for tokens of other rows;
        the pool. Outputs of tiles that only have tokens of prompt chunks are undefined.
    """
    from jpaged.kernels.paged_attention.tpu.decode.kernel import call as call_kernel
    from jpaged.kernels.paged_attention.tpu.decode.plan import DecodeScalars
    from jpaged.kernels.paged_attention.tpu.lists import decode_plan_for

    plan = decode_plan_for(call.spec, call.queries, has_writes=new_kv is not None)
    scalars = DecodeScalars(
        layer=jnp.asarray(call.layer, jnp.int32).reshape(1),
        cores=lists.cores,
        segments=lists.decodes.segments,
        tiles=lists.tiles,
        writes=() if new_kv is None else lists.writes,
    )
    new = None if new_kv is None else call.spec.layout.token_rows(*new_kv[:2])
    o_xw, lse_x1l, pool = call_kernel(scalars, q_tw, _row_scales(call, plan), lists.tables, new, call.pool, plan)
    num_tokens, num_heads, _ = call.q_thd.shape
    lse_xbr = lse_x1l[:, 0, : plan.num_bundles * plan.rows].reshape(len(o_xw), plan.num_bundles, -1)
    lse_xh = lse_xbr[:, :, : plan.sizes.bundle * plan.group].reshape(len(o_xw), -1)[:, :num_heads]
    return _of_all_cores(o_xw, lists.starts), _of_all_cores(lse_xh, lists.starts)[:num_tokens], pool


def _of_all_cores(results_xn: Float[Array, "X N"], starts: Int[Array, "cores+1"]) -> Float[Array, "T N"]:
    """Combine the results of all tokens from those of each core."""
    num_cores = len(starts) - 1
    num_tokens = len(results_xn) // num_cores
    token_t1 = jnp.arange(num_tokens)[:, None]
    found_tn = results_xn[:num_tokens]
    for core in range(1, num_cores):
        its_tn = results_xn[core * num_tokens :][:num_tokens]
        found_tn = jnp.where(token_t1 >= starts[core], its_tn, found_tn)
    return found_tn


def _row_scales(call: AttentionCall, plan: DecodePlan) -> Float[Array, "2 bundles rows 128"]:
    """Return the factors of the scores of each row of a bundle (to base 2, unless they are capped), and of outputs.

    For float8 keys that come too small (`is_tiny`), they correct the part of the factor that the queries' scaling does
    not.
    """
    from jpaged.kernels.paged_attention.tpu.decode.plan import LIFT, LOG2_E
    from jpaged.kernels.paged_attention.tpu.words import FP8_SHIFT

    layout, kind = call.spec.layout, call.spec.kind
    # Without scales in the pool this is a constant: XLA for TPUs would otherwise compute it in every layer.
    xnp: Any = np if call.scales_lk2 is None else jnp
    scales_k2: Any = np.ones((layout.num_kv_heads, 2), np.float32)
    if call.scales_lk2 is not None:
        scales_k2 = call.scales_lk2[call.layer].astype(jnp.float32)
    tiny = (2.0 ** (FP8_SHIFT - LIFT), 2.0**FP8_SHIFT) if plan.is_tiny else (1.0, 1.0)
    factors = (kind.scale * (1.0 if kind.soft_cap is not None else LOG2_E) * tiny[0], tiny[1])
    scales_2k = (scales_k2 * np.asarray(factors, np.float32)).T
    missing = plan.num_bundles * plan.sizes.bundle - layout.num_kv_heads
    scales_2bh = xnp.pad(scales_2k, ((0, 0), (0, missing))).reshape(2, plan.num_bundles, -1)
    scales_2br = xnp.repeat(scales_2bh, plan.group, axis=2)
    scales_2br = xnp.pad(scales_2br, ((0, 0), (0, 0), (0, plan.rows - scales_2br.shape[2])))
    return jnp.asarray(xnp.broadcast_to(scales_2br[..., None], (*scales_2br.shape, 128)))


def _attend_chunks(
    call: AttentionCall,
    ours: CallLists,
    block_tables: jax.Array,
    scales_2k: jax.Array,
    pool: jax.Array,
    q_tw: Float[Array, "T W"],
    before_tw: Float[Array, "T W"],
) -> Attended:
    """Compute attention of the rows of several queries.

    Args:
        call: of all rows; its pool is not read.
        ours: the lists of these rows.
        block_tables: of whole pages [S, N].
        scales_2k: alternating scales of keys and values of each head; those of the keys include the softmax scale.
        pool: with the new keys and values.
        q_tw: the queries, as both kernels take them.
        before_tw: outputs of the tokens of other rows, in the array that becomes the result.

    Returns:
        outputs of all tokens in the queries' layout; log-sum-exp [T, H], undefined for tokens of other rows.
    """
    from jpaged.kernels.paged_attention.tpu.chunks.kernel import call as call_kernel
    from jpaged.kernels.paged_attention.tpu.chunks.plan import ChunkScalars
    from jpaged.kernels.paged_attention.tpu.lists import chunk_plan_for

    num_tokens, num_heads, _ = call.q_thd.shape
    scalars = ChunkScalars(
        layer=jnp.asarray(call.layer, jnp.int32).reshape(1),
        num_segments=ours.num_segments,
        segments=ours.segments,
        scales=scales_2k,
    )
    plan = chunk_plan_for(call.spec, call.queries)
    o_tw, lse = call_kernel(scalars, q_tw, block_tables, pool, before_tw, plan)
    lse_tch = lse.reshape(len(lse), plan.num_cores, -1)[:num_tokens, :, : num_heads // plan.num_cores]
    return o_tw, lse_tch.reshape(num_tokens, num_heads)
