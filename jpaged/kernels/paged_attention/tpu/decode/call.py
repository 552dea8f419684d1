"""The call of the kernel for rows that decode: its inputs, and the places of the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jpaged.kernels.paged_attention.spec import AttentionCall, NewKV, Updated

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from jpaged.kernels.paged_attention.tpu.decode.plan import DecodePlan
    from jpaged.kernels.paged_attention.tpu.lists import StepLists


def attend(call: AttentionCall, q_tw: Float[Array, "T W"], lists: StepLists, new_kv: NewKV | None) -> Updated:
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
    o_xw, lse_x1l, pool = call_kernel(scalars, q_tw, _scales(call, plan), lists.tables, new, call.pool, plan)
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


def _scales(call: AttentionCall, plan: DecodePlan) -> Float[Array, "2 bundles rows 128"]:
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
