"""The three pipeline stages of an item, one per turn."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jpaged.kernels.paged_attention.tpu.chunks.keys import key_order
from jpaged.kernels.paged_attention.tpu.chunks.plan import LANES, Chunk, ChunkPlan, ChunkScalars, Item, Scratch

LOG2_E = math.log2(math.e)
_NO_KEY = 2**30


def scores(
    scalars: ChunkScalars, chunk: Chunk, part: Any, head: Any, q_ref: Any, kept: Scratch, plan: ChunkPlan
) -> Any:
    """First stage: compute the scores of a part and one of the core's heads, in units of log 2."""
    kind = plan.spec.kind
    queries = pl.ds(pl.multiple_of(part * plan.part, plan.part), plan.part)

    def lanes_of(g: int) -> Any:
        lanes = plan.key_lanes
        return pl.ds(pl.multiple_of((head * plan.group + g) * lanes, lanes), lanes)

    q_rd = jnp.concatenate([q_ref[queries, lanes_of(g)] for g in range(plan.group)], axis=0)
    key_row = chunk.first_row + plan.head_rows * head
    s_rw = _dot(q_rd.astype(plan.compute_dtype), kept.rows[key_row], 1, plan)
    scale = scalars.scales[2 * (chunk.first_head + head)]
    if kind.soft_cap is None:
        return s_rw * (scale * LOG2_E)
    return kind.soft_cap * LOG2_E * jnp.tanh(s_rw * (scale / kind.soft_cap))


def is_seen(scalars: ChunkScalars, segment: Any, chunk: Chunk, part: Any, plan: ChunkPlan) -> Any:
    """Return which keys of the chunk each row of a part's matmuls sees."""
    segments, window = scalars.segments, plan.spec.kind.sliding_window
    key_1w = chunk.first_key + key_order((1, plan.chunk_tokens), 1, plan)
    is_there_1w = (key_1w >= segments.begin[segment]) & (key_1w < segments.end[segment])
    key_1w = jnp.where(is_there_1w, key_1w, _NO_KEY)
    query_r1 = lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0) & (plan.part - 1)
    position_r1 = segments.position[segment] + part * plan.part + query_r1
    is_seen_rw = key_1w <= position_r1
    return is_seen_rw if window is None else is_seen_rw & (position_r1 - key_1w < window)


def weights(items: list[Item], kept: Scratch, plan: ChunkPlan) -> None:
    """Second stage: compute the weights of the items' keys, and their sums."""
    for place, item in enumerate(items):
        s_rw, m_rl = kept.s[place], kept.m[item.slot]
        m_new_rl = jnp.maximum(m_rl, s_rw.max(axis=1, keepdims=True))
        p_rw, fade_rl = jnp.exp2(s_rw - wide(m_new_rl, plan.chunk_tokens)), jnp.exp2(m_rl - m_new_rl)
        sums_rl = functools.reduce(jnp.add, jnp.split(p_rw, plan.chunk_tokens // LANES, axis=1))
        kept.m[item.slot] = m_new_rl
        kept.l[item.slot] = kept.l[item.slot] * fade_rl + sums_rl
        kept.p[place], kept.fade[place] = p_rw.astype(plan.compute_dtype), fade_rl


def values(items: list[Item], kept: Scratch, plan: ChunkPlan) -> None:
    """Third stage: add the weighted values of the items' keys to their outputs."""
    for place, item in enumerate(items):
        pv_rd = _dot(kept.p[place], kept.rows[item.value_row, :, : plan.value_lanes], 0, plan)
        kept.o[item.slot] = kept.o[item.slot] * wide(kept.fade[place], plan.value_lanes) + pv_rd


def _dot(a: Any, b: Any, b_axis: int, plan: ChunkPlan) -> Any:
    precision = lax.Precision.HIGHEST if plan.compute_dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((1,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def wide(x_rl: Any, width: int) -> Any:
    """Repeat a column that fills 128 lanes to a multiple of 128 lanes."""
    return jnp.concatenate([x_rl] * (width // LANES), axis=1)
