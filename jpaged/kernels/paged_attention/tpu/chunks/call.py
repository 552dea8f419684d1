"""The call of the kernel for rows of several queries: its inputs, and the places of the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.kernels.paged_attention.spec import Attended, AttentionCall

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from jpaged.kernels.paged_attention.tpu.lists import CallLists


def attend(
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
