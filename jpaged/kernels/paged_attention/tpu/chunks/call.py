"""The call of the kernel for rows of several queries: what it reads, and where its results go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.kernels.paged_attention.spec import Attended, AttentionCall

if TYPE_CHECKING:
    from jpaged.kernels.paged_attention.tpu.lists import CallLists


def attend(
    call: AttentionCall, ours: CallLists, block_tables: jax.Array, scales_2k: jax.Array, pool: jax.Array
) -> Attended:
    """Attention of the rows of several queries.

    Args:
        call: of all rows; its pool is not read.
        ours: the lists of these rows.
        block_tables: of whole pages [S, N].
        scales_2k: of keys and values of each head in turns, the softmax scale multiplied into those of the keys.
        pool: with the new keys and values.

    Returns:
        See `Attended`; tokens of other rows have anything.
    """
    from jpaged.kernels.paged_attention.tpu.chunks.kernel import call as call_kernel
    from jpaged.kernels.paged_attention.tpu.chunks.plan import Scalars
    from jpaged.kernels.paged_attention.tpu.lists import chunk_plan_for

    plan, layout = chunk_plan_for(call.spec, call.queries), call.spec.layout
    num_tokens, num_heads, head_dim = call.q_thd.shape
    scalars = Scalars(
        layer=jnp.asarray(call.layer, jnp.int32).reshape(1),
        num_segments=ours.num_segments,
        segments=ours.segments,
        scales=scales_2k,
    )
    # The kernel takes a head's queries out of a tile by itself: nothing is transposed.
    q_thl = jnp.pad(call.q_thd, ((0, -num_tokens % plan.tile), (0, 0), (0, layout.lanes - head_dim)))
    o, lse = call_kernel(scalars, q_thl.reshape(q_thl.shape[0], -1), block_tables, pool, plan)
    o_thl = o[:num_tokens].reshape(num_tokens, num_heads, layout.lanes)
    first_lane = layout.lanes // 2 if layout.is_joined else 0
    return o_thl[:, :, first_lane : first_lane + head_dim], lse[:num_tokens, :num_heads]
