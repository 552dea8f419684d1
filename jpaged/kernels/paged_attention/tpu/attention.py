"""Paged attention on TPUs: the same kernel twice, for rows that decode and for chunks of prompts.

    rows of one query     tile 1:   a product's rows are the heads that share a key/value head, padded to 16
    rows of more          tile n:   the packed queries in tiles of n; each row meets each tile that it has a part of

    packed tokens | a a a a a a a b | c d d d d d - - |        segments of the second call: a/0 b/0, d/1
                    └ tile 0 ───────┘ └ tile 1 ───────┘        of the first: b, c

Which segments there are is computed from the rows by XLA, once per call, a few hundred integers; the grid is as long as
the list. The first call also stores the new keys and values: both see them.

Verified by interpretation, with races looked for, and by compiling for v5e, v5p, v6e and tpu7x; a core of a v4 or v5p
chip that shows its two as one device is used alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.paged_attention.spec import Attended, AttentionCall, NewKV, Queries, RaggedRows, Updated
from jpaged.kernels.paged_attention.tpu import sizes as sizing

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int

    from jpaged.kernels.paged_attention.tpu.kernel import Plan, Scalars, Segments

_QUERY_DTYPES = ("float32", "bfloat16")
_KV_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8")
_MAX_HEAD_DIM = 256


def unsupported_reason(layout: KVLayout, queries: Queries) -> str | None:
    """Why there is no kernel for it, or None. Block tables lie in scalar memory, which is small."""
    if queries.dtype.name not in _QUERY_DTYPES:
        return f"queries of {queries.dtype} are none of {', '.join(_QUERY_DTYPES)}"
    if layout.num_shards > 1:
        return f"the pool is of {layout.num_shards} shards; each device runs its own, under jax.shard_map"
    if layout.dtype.name not in _KV_DTYPES:
        return f"kv_dtype {layout.dtype.name} is none of {', '.join(_KV_DTYPES)}"
    if layout.block_size not in sizing.BLOCK_SIZES:
        return f"block_size {layout.block_size} is none of {', '.join(map(str, sizing.BLOCK_SIZES))}"
    if layout.head_dim > _MAX_HEAD_DIM:
        return f"head_dim {layout.head_dim} is above the limit of {_MAX_HEAD_DIM}"
    return sizing.refusal(layout, queries.num_heads) or sizing.tables_refusal(queries, layout.num_kv_heads)


def unsupported_device_reason(device: jax.Device) -> str | None:
    """Why a device cannot run it; None for TPUs, which alone can."""
    return None if device.platform == "tpu" else f"needs a TPU; this device's platform is {device.platform}"


def attend(call: AttentionCall) -> Attended:
    """See `jpaged.kernels.paged_attention.paged_attention`."""
    o_thd, lse_th, _ = update(call, None)
    return o_thd, lse_th


def update(call: AttentionCall, new_kv: NewKV | None) -> Updated:
    """`attend` with keys and values, which come divided by their scales, stored before; None stores none."""
    from jpaged.kernels.paged_attention.tpu.kernel import Scalars

    q_thd, pool, rows, spec, scales_lk2 = call.q_thd, call.pool, call.rows, call.spec, call.scales_lk2
    num_tokens, num_heads, _ = q_thd.shape
    scales_k2 = jnp.ones((spec.layout.num_kv_heads, 2), jnp.float32) if scales_lk2 is None else scales_lk2[call.layer]
    scales_2k = (scales_k2.astype(jnp.float32) * jnp.asarray([spec.kind.scale, 1.0], jnp.float32)).reshape(-1)
    nums_s = rows.query_starts_s1[1:] - rows.query_starts_s1[:-1]
    is_used_s = jnp.arange(nums_s.shape[0]) < rows.num_rows

    o_thd, lse_th = jnp.zeros_like(q_thd), jnp.full((num_tokens, num_heads), -jnp.inf, jnp.float32)
    for is_decode in (True, False) if num_tokens > 1 else (True,):
        is_ours_s = is_used_s & ((nums_s == 1) if is_decode else (nums_s > 1))
        row_t, is_ours_t = _rows_of_tokens(rows, is_ours_s, num_tokens)
        plan = _plan(call, is_decode=is_decode, has_writes=is_decode and new_kv is not None)
        segments, num_segments = _segments(rows, is_ours_s, num_tokens, plan)
        q = q_thd
        if is_few_rows := is_decode and nums_s.shape[0] < num_tokens:
            # One query a row, not all tokens: each is padded to the rows of a product, up to 16 times its size.
            segments, q = segments._replace(tile=segments.row), q_thd.at[rows.query_starts_s1[:-1]].get(mode="clip")
        scalars = Scalars(
            layer=jnp.asarray(call.layer, jnp.int32).reshape(1),
            num_segments=num_segments.astype(jnp.int32).reshape(1),
            segments=segments,
            tables=rows.block_tables_sm.astype(jnp.int32).reshape(-1),
            scales=scales_2k,
            writes=(),
        )
        o, lse, pool = _call(scalars, q, new_kv, pool, plan)
        if is_few_rows:
            o, lse = o[row_t], lse[row_t]
        o_thd = jnp.where(is_ours_t[:, None, None], o, o_thd)
        lse_th = jnp.where(is_ours_t[:, None], lse, lse_th)
    return o_thd, lse_th, pool


def _plan(call: AttentionCall, *, is_decode: bool, has_writes: bool) -> Plan:
    from jpaged.kernels.paged_attention.tpu.kernel import Plan

    num_tokens, num_heads, _ = call.q_thd.shape
    layout = call.spec.layout
    sizes = sizing.choose(layout, num_heads, is_decode=is_decode, device_kind=_device_kind())
    if not is_decode:
        # A step of fewer tokens than a tile needs no whole one.
        sizes = sizing.Sizes(min(sizes.tile, max(16, 1 << (num_tokens - 1).bit_length())), sizes.fetch_blocks)
    is_wide = jnp.float32 in (call.q_thd.dtype, layout.dtype)
    return Plan(
        spec=call.spec,
        tile=sizes.tile,
        rows=sizing.rows_of(sizes, layout, num_heads),
        fetch_blocks=sizes.fetch_blocks,
        table_width=call.rows.block_tables_sm.shape[1],
        compute_dtype=jnp.dtype(jnp.float32 if is_wide else jnp.bfloat16),
        has_writes=has_writes,
    )


def _device_kind() -> str:
    """The kind of the device that is compiled for, if the mesh says so, or else of those that are here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return str((jax.devices()[0] if device is None else device).device_kind)


def _segments(
    rows: RaggedRows, is_ours_s: Bool[Array, "S"], num_tokens: int, plan: Plan
) -> tuple[Segments, Int[Array, ""]]:
    """The tiles that each of our rows has a part of, row by row, and how many they are."""
    from jpaged.kernels.paged_attention.tpu.kernel import Segments

    spec, tile = plan.spec, plan.tile
    starts_s, ends_s = rows.query_starts_s1[:-1], rows.query_starts_s1[1:]
    num_rows, num_tiles = starts_s.shape[0], -(-num_tokens // tile)
    nums_s = jnp.where(is_ours_s, (ends_s - 1) // tile - starts_s // tile + 1, 0)
    lasts_s = jnp.cumsum(nums_s)
    # A row of several queries shares a tile with others at its two ends only.
    most = min(num_rows, num_tokens) if tile == 1 else num_tiles + min(num_rows, num_tokens // 2)
    i_n = jnp.arange(most, dtype=jnp.int32)
    row_n = jnp.minimum((i_n[:, None] >= lasts_s[None, :]).sum(axis=1, dtype=jnp.int32), num_rows - 1)
    start_n, end_n = starts_s[row_n], ends_s[row_n]
    tile_n = jnp.clip(start_n // tile + i_n - (lasts_s - nums_s)[row_n], 0, num_tiles - 1)
    lo_n = jnp.maximum(start_n - tile_n * tile, 0)
    hi_n = jnp.minimum(end_n - tile_n * tile, tile)
    position_n = rows.positions[row_n] + tile_n * tile - start_n
    begin_n = jnp.maximum(rows.begins[row_n], 0)
    if spec.kind.sliding_window is not None:
        begin_n = jnp.maximum(begin_n, position_n + lo_n - spec.kind.sliding_window + 1)
    table_len = rows.block_tables_sm.shape[1] * spec.layout.block_size
    end_n = jnp.minimum(jnp.minimum(rows.kv_lens_s[row_n], position_n + hi_n), table_len)
    fields = (row_n, tile_n, lo_n, hi_n, position_n, begin_n, end_n)
    return Segments(*(field.astype(jnp.int32) for field in fields)), lasts_s[-1]


def _rows_of_tokens(
    rows: RaggedRows, is_ours_s: Bool[Array, "S"], num_tokens: int
) -> tuple[Int[Array, "T"], Bool[Array, "T"]]:
    """Which of our rows each token is in, and whether it is in any."""
    t_t1 = jnp.arange(num_tokens)[:, None]
    is_in_ts = (t_t1 >= rows.query_starts_s1[:-1]) & (t_t1 < rows.query_starts_s1[1:]) & is_ours_s
    return is_in_ts.argmax(axis=1), is_in_ts.any(axis=1)


def _call(
    scalars: Scalars,
    q_thd: jax.Array,
    new_kv: NewKV | None,
    pool: jax.Array,
    plan: Plan,
) -> Updated:
    """One kernel, its queries and results moved to where it wants them and back."""
    from jpaged.kernels.paged_attention.tpu.kernel import call

    layout, (num_tokens, num_heads, head_dim) = plan.spec.layout, q_thd.shape
    heads, group = layout.num_kv_heads, num_heads // layout.num_kv_heads
    new = None
    if plan.has_writes and new_kv is not None:
        k_tkd, v_tkd, slots_t = new_kv
        new = layout.token_rows(k_tkd, v_tkd)
        slots_t = slots_t.astype(jnp.int32)
        scalars = scalars._replace(writes=(slots_t, _starts_whole_block(slots_t, layout.block_size)))

    q_tkgd = jnp.pad(q_thd, ((0, 0), (0, 0), (0, layout.lanes - head_dim))).reshape(num_tokens, heads, group, -1)
    first_lane = layout.lanes // 2 if layout.is_joined else 0
    lanes = slice(first_lane, first_lane + head_dim)
    if plan.tile == 1:
        q = jnp.pad(q_tkgd, ((0, 0), (0, 0), (0, plan.rows - group), (0, 0)))
        o, lse, pool = call(scalars, q, new, pool, plan)
        return o[:, :, :group, lanes].reshape(q_thd.shape), lse[:, :, :group].reshape(num_tokens, num_heads), pool
    q = jnp.pad(q_tkgd.transpose(1, 2, 0, 3), ((0, 0), (0, 0), (0, -num_tokens % plan.tile), (0, 0)))
    o, lse, pool = call(scalars, q, new, pool, plan)
    o_tkgd = o[:, :, :num_tokens, lanes].transpose(2, 0, 1, 3)
    lse_nkgt = lse[:, :, : plan.rows].reshape(-1, heads, group, plan.tile)
    lse_tkg = lse_nkgt.transpose(0, 3, 1, 2).reshape(-1, heads, group)[:num_tokens]
    return o_tkgd.reshape(q_thd.shape), lse_tkg.reshape(num_tokens, num_heads), pool


def _starts_whole_block(slots_t: Int[Array, "T"], block_size: int) -> Int[Array, "T"]:
    """1 where this token and those behind it fill a block in order: they are stored at once."""
    num_tokens = slots_t.shape[0]
    if num_tokens < block_size:
        return jnp.zeros_like(slots_t)
    is_break_t = jnp.concatenate([jnp.zeros(1, jnp.int32), (slots_t[1:] != slots_t[:-1] + 1).astype(jnp.int32)])
    breaks_t = jnp.cumsum(is_break_t)
    last_t = jnp.minimum(jnp.arange(num_tokens) + block_size - 1, num_tokens - 1)
    has_room_t = jnp.arange(num_tokens) + block_size <= num_tokens
    is_whole_t = (slots_t % block_size == 0) & has_room_t & (breaks_t[last_t] == breaks_t)
    return is_whole_t.astype(jnp.int32)
