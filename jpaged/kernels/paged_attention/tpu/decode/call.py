"""The call of the kernel for rows that decode: what it reads, and where its results go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jpaged.kernels.paged_attention.spec import AttentionCall, NewKV, Updated

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

    from jpaged.kernels.paged_attention.tpu.decode.plan import Plan
    from jpaged.kernels.paged_attention.tpu.lists import StepLists


def attend(call: AttentionCall, lists: StepLists, new_kv: NewKV | None) -> Updated:
    """Attention of the rows of one query, and the pool with the new keys and values of all tokens.

    Args:
        call: of all rows.
        lists: of the step.
        new_kv: see there; None stores none.

    Returns:
        See `Updated`; tokens of other rows have anything.
    """
    from jpaged.kernels.paged_attention.tpu.decode.kernel import call as call_kernel
    from jpaged.kernels.paged_attention.tpu.decode.plan import Scalars
    from jpaged.kernels.paged_attention.tpu.lists import decode_plan_for

    ours, q, num_tokens = lists.decodes, call.q_thd, call.q_thd.shape[0]
    plan = decode_plan_for(call.spec, call.queries, has_writes=new_kv is not None)
    is_gathered = plan.is_gathered(num_tokens)
    if is_gathered:
        q = _whole(q).at[lists.decode_tokens_n].get(mode="clip").reshape(-1, *q.shape[1:])
    scalars = Scalars(
        layer=jnp.asarray(call.layer, jnp.int32).reshape(1),
        cores=lists.cores,
        segments=ours.segments,
        writes=() if new_kv is None else lists.writes,
    )
    new = None if new_kv is None else call.spec.layout.token_rows(*new_kv[:2])
    o, lse, pool = call_kernel(scalars, _pack(q, plan), _scales(call, plan), lists.tables, new, call.pool, plan)
    o_xhd, lse_xh = _unpack(o, lse, plan, call.queries.num_heads)
    if is_gathered:
        return _whole(o_xhd)[ours.row_t].reshape(call.q_thd.shape), lse_xh[ours.row_t], pool
    o_thd, lse_th = o_xhd[:num_tokens], lse_xh[:num_tokens]
    for core in range(1, plan.num_cores):
        begin = core * num_tokens
        is_its_t1 = (ours.row_t >= begin)[:, None]
        o_thd = jnp.where(is_its_t1[..., None], o_xhd[begin : begin + num_tokens], o_thd)
        lse_th = jnp.where(is_its_t1, lse_xh[begin : begin + num_tokens], lse_th)
    return o_thd, lse_th, pool


def _whole(x_xhd: Float[Array, "X H D"]) -> Float[Array, "X H*D"]:
    """The heads of a token beside each other: rows are found whole, where XLA would move sublane by sublane."""
    return x_xhd.reshape(x_xhd.shape[0], -1)


def _pack(q_xhd: Float[Array, "X H D"], plan: Plan) -> Float[Array, "places bundles rows lanes"]:
    """The queries of the heads of a bundle below each other."""
    layout, (num, _, head_dim) = plan.spec.layout, q_xhd.shape
    q_xkgd = q_xhd.reshape(num, layout.num_kv_heads, plan.group, head_dim)
    missing = plan.num_bundles * plan.sizes.bundle - layout.num_kv_heads
    q_xkgd = jnp.pad(q_xkgd, ((0, 0), (0, missing), (0, 0), (0, layout.lanes // plan.column_heads - head_dim)))
    if layout.is_joined:
        is_odd = _is_odd(q_xkgd.shape[1])
        q_xkgd = jnp.concatenate((jnp.where(is_odd, 0, q_xkgd), jnp.where(is_odd, q_xkgd, 0)), axis=3)
    q_xbrd = q_xkgd.reshape(num, plan.num_bundles, -1, layout.lanes)
    return jnp.pad(q_xbrd, ((0, 0), (0, 0), (0, plan.rows - q_xbrd.shape[2]), (0, 0)))


def _unpack(
    o: Float[Array, "places bundles rows lanes"],
    lse: Float[Array, "places 1 lanes"],
    plan: Plan,
    num_heads: int,
) -> tuple[Float[Array, "X H D"], Float[Array, "X H"]]:
    """Outputs and log-sum-exp in the order of the heads."""
    layout, num, head_dim = plan.spec.layout, len(o), plan.spec.layout.head_dim
    used = plan.sizes.bundle * plan.group
    o_xkgl = o[:, :, :used].reshape(num, -1, plan.group, layout.lanes)
    o_xkgd = o_xkgl[..., :head_dim]
    if layout.is_joined:
        half = layout.lanes // 2
        # A head that has its lanes alone has its values where they were.
        is_last = (jnp.arange(o_xkgl.shape[1]) == layout.num_kv_heads - 1)[:, None, None]
        o_xkgd = jnp.where(_is_odd(o_xkgl.shape[1]) | is_last, o_xkgl[..., half : half + head_dim], o_xkgd)
    lse_xbr = lse[:, 0, : plan.num_bundles * plan.rows].reshape(num, plan.num_bundles, plan.rows)[:, :, :used]
    return o_xkgd.reshape(num, -1, head_dim)[:, :num_heads], lse_xbr.reshape(num, -1)[:, :num_heads]


def _is_odd(num_heads: int) -> Bool[Array, "K 1 1"]:
    """Which key/value heads have the upper half of the lanes, where two share them."""
    return (jnp.arange(num_heads) % 2 == 1)[:, None, None]


def _scales(call: AttentionCall, plan: Plan) -> Float[Array, "2 bundles rows 128"]:
    """What the scores of each row of a bundle are multiplied by, in powers of two unless they are capped, and outputs.

    A product of queries with keys that come too small is too small by what the queries were not lifted.
    """
    from jpaged.kernels.paged_attention.tpu.decode.plan import LIFT, LOG2_E
    from jpaged.kernels.paged_attention.tpu.words import FP8_SHIFT

    layout, kind = call.spec.layout, call.spec.kind
    # Without scales in the pool all of it is a constant: XLA for TPUs would make it again in every layer.
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
