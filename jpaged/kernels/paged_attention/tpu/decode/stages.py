"""The arithmetic of an item at each of the three stages, and a tile of tokens before the first and after the last row.

Queries of the tile are unpacked into rows of heads, and outputs are packed again:

    [places, H * lanes]                 a token's heads concatenated, the layout of matmuls before and after
    [places, bundles, rows, lanes]      the heads of a bundle stacked, the layout of the bundle's matmul

Outputs of latents have fewer lanes than queries.

Each copy moves one head of all tokens, as strided rows. If two heads' keys share lanes, the head with the other half
is rotated by half: queries come in the lower half, and outputs go into the upper one, as the other kernel writes them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.paged_attention.tpu import words
from jpaged.kernels.paged_attention.tpu.decode.items import repeat, seen
from jpaged.kernels.paged_attention.tpu.decode.plan import LIFT, LOG2_E, DecodePlan, DecodeRefs, DecodeScalars, Kept

LOWEST = -1e30
"""Start of the running maximum: finite, so that an item without a visible key leaves no NaN."""
_LN_2 = math.log(2)


def _columns(bundle: int, plan: DecodePlan) -> range:
    """Return the columns of lanes of a bundle, as indices among those of all heads."""
    first = bundle * plan.sizes.bundle
    last = min(first + plan.sizes.bundle, plan.spec.layout.num_kv_heads)
    return range(first // plan.column_heads, -(-last // plan.column_heads))


def _is_alone(column: int, plan: DecodePlan) -> bool:
    """Return True if the column is the key | value of the last head, which has no other head to share it with."""
    return plan.spec.layout.is_joined and 2 * column + 1 == plan.spec.layout.num_kv_heads


def _reader(chunk_ref: Any, plan: DecodePlan) -> Callable[..., Any]:
    """Return a function that reads the numbers of each token in a row of the pool's lanes, by the row's index."""
    layout, pitch = plan.spec.layout, plan.sizes.pitch * plan.folds
    num_parts = words.tokens_a_word(layout.dtype, takes_fp8=plan.takes_fp8)
    num_tokens = plan.sizes.chunk_tokens // num_parts
    # Distance to the part used together: heads that share lanes pair with the next head, others with the next matmul
    # operand, and a latent's pieces with each other.
    apart = 1 if layout.is_joined or layout.value_dim is not None else 2 if plan.sizes.bundle > 1 else 0

    @functools.cache
    def parts(row: int) -> list[Any]:
        return [words.read(chunk_ref, row + i * num_tokens * pitch, num_tokens, pitch) for i in range(num_parts)]

    def numbers(row: int, fold: int = 0) -> Any:
        tile_row, j = divmod(row, layout.pack)
        its_parts = parts(tile_row * plan.folds + fold)
        return words.numbers(its_parts, j, layout.dtype, takes_fp8=plan.takes_fp8, apart=apart)

    return numbers


def _pieces(numbers: Callable[..., Any], lanes: int) -> list[Any]:
    """Return the prefix of a latent, whose pieces are in separate rows."""
    return [numbers(row) for row in range(lanes // words.LANES)]


def _beside(columns: list[Any], plan: DecodePlan, axis: int = 1) -> Any:
    """Concatenate columns of numbers into one operand of a matmul [W, columns * lanes].

    Transposed columns are stacked instead (axis 0).
    """
    if plan.compute_dtype == jnp.float32 or plan.spec.layout.dtype == jnp.int8:
        columns = [column.astype(plan.compute_dtype) for column in columns]
    return columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=axis)


def _keys(buffer: Any, bundle: int, kept: Kept, plan: DecodePlan) -> Any:
    """Return keys of a bundle's heads, transposed if `plan.turns_keys`.

    If two heads share a column, their values are separated, and kept for stage 3.
    """
    numbers = _reader(kept.chunks.at[buffer], plan)
    columns = _pieces(numbers, plan.key_lanes) if plan.spec.layout.value_dim is not None else []
    for column in () if columns else _columns(bundle, plan):
        if _is_alone(column, plan):
            columns.append(numbers(2 * column))
        elif plan.spec.layout.is_joined:
            k, v = words.parted(numbers(2 * column), numbers(2 * column + 1))
            kept.values[buffer, column] = pltpu.bitcast(v, jnp.int32)
            columns.append(k)
        else:
            columns += [numbers(2 * column, fold) for fold in range(plan.folds)]
    if plan.turns_keys:
        return _beside([column.T for column in columns], plan, axis=0)
    return _beside(columns, plan)


def _values(buffer: Any, bundle: int, kept: Kept, plan: DecodePlan) -> Any:
    """Return values of a bundle's heads."""
    dtype = words.numbers_dtype(plan.spec.layout.dtype, takes_fp8=plan.takes_fp8)
    numbers = _reader(kept.chunks.at[buffer], plan)
    columns = _pieces(numbers, plan.value_lanes) if plan.spec.layout.value_dim is not None else []
    for column in () if columns else _columns(bundle, plan):
        if _is_alone(column, plan):
            columns.append(numbers(2 * column))
        elif plan.spec.layout.is_joined:
            columns.append(pltpu.bitcast(kept.values[buffer, column], dtype))
        else:
            columns += [numbers(2 * column + 1, fold) for fold in range(plan.folds)]
    return _beside(columns, plan)


def _dot(plan: DecodePlan) -> Callable[..., Any]:
    precision = lax.Precision.HIGHEST if plan.compute_dtype == jnp.float32 else lax.Precision.DEFAULT
    return functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)


def score(
    scalars: DecodeScalars, segment: Any, item: Any, buffer: Any, refs: DecodeRefs, kept: Kept, plan: DecodePlan
) -> None:
    """Stage 1: compute scores to base 2, minus infinity for keys that are not seen."""
    tokens, cap = plan.sizes.chunk_tokens, plan.spec.kind.soft_cap
    num_parts = words.tokens_a_word(plan.spec.layout.dtype, takes_fp8=plan.takes_fp8)
    column = lax.broadcasted_iota(jnp.int32, (plan.rows, tokens), 1)
    token = column // num_parts + (column % num_parts) * (tokens // num_parts)
    begin, end = seen(scalars, segment, item, plan)
    is_seen = (token >= begin) & (token < end)
    place, dot = scalars.segments.place[segment], _dot(plan)
    column_of_row = lax.broadcasted_iota(jnp.int32, (plan.rows, plan.key_lanes), 0) // (plan.group * plan.column_heads)
    for bundle in range(plan.num_bundles):
        q_rd = refs.q[place, bundle].astype(jnp.float32)
        if plan.is_tiny:
            q_rd = q_rd * 2.0**LIFT
        num_columns = len(_columns(bundle, plan))
        if num_columns > 1:
            q_rd = jnp.concatenate([jnp.where(column_of_row == i, q_rd, 0.0) for i in range(num_columns)], axis=1)
        keys = _keys(buffer, bundle, kept, plan)
        s_rw = dot(q_rd.astype(plan.compute_dtype), keys, (((1,), (0 if plan.turns_keys else 1,)), ((), ())))
        s_rw = s_rw * jnp.tile(refs.scale[0, bundle], (1, tokens // words.LANES))
        if cap is not None:
            s_rw = cap * LOG2_E * jnp.tanh(s_rw / cap)
        kept.scores[bundle] = jnp.where(is_seen, s_rw, -jnp.inf)


def weigh(place: Any, is_first: Any, kept: Kept, plan: DecodePlan) -> None:
    """Stage 2: update the running maximum and sum of the row, and compute the weights of this item's values."""
    for bundle in range(plan.num_bundles):
        s_rw = kept.scores[bundle]
        m_rl = jnp.where(is_first, LOWEST, kept.m[place, bundle])
        m_new_rl = jnp.maximum(m_rl, s_rw.max(axis=1, keepdims=True))
        fade_rl = jnp.exp2(m_rl - m_new_rl)
        level_rl = m_new_rl - float(LIFT) if plan.is_tiny else m_new_rl
        parts = [s_rw[:, i : i + words.LANES] for i in range(0, s_rw.shape[1], words.LANES)]
        parts = [jnp.exp2(part - level_rl) for part in parts]
        l_rl = jnp.where(is_first, 0.0, kept.l[place, bundle]) * fade_rl
        kept.l[place, bundle] = l_rl + functools.reduce(lambda a, b: a + b, parts)
        kept.m[place, bundle] = m_new_rl
        kept.fade[bundle] = fade_rl
        kept.weights[bundle] = jnp.concatenate(parts, axis=1)


def add(place: Any, is_first: Any, buffer: Any, kept: Kept, plan: DecodePlan) -> None:
    """Stage 3: add weighted values to the output of the row."""
    lanes, dot = plan.value_lanes, _dot(plan)
    column_of_row = lax.broadcasted_iota(jnp.int32, (plan.rows, lanes), 0) // (plan.group * plan.column_heads)
    for bundle in range(plan.num_bundles):
        v_wd = _values(buffer, bundle, kept, plan)
        pv_rd = dot(kept.weights[bundle].astype(plan.compute_dtype), v_wd, (((1,), (0,)), ((), ())))
        o_rd = pv_rd[:, :lanes]
        for i in range(1, len(_columns(bundle, plan))):
            o_rd = jnp.where(column_of_row == i, pv_rd[:, i * lanes : (i + 1) * lanes], o_rd)
        fade_rd = jnp.tile(kept.fade[bundle], (1, lanes // words.LANES))
        kept.o[place, bundle] = jnp.where(is_first, 0.0, kept.o[place, bundle] * fade_rd) + o_rd


def finish(place: Any, refs: DecodeRefs, kept: Kept, plan: DecodePlan) -> None:
    """Write a row's output and its log-sum-exp, a lane for each head."""
    lane = lax.broadcasted_iota(jnp.int32, (plan.rows, plan.lse_lanes), 1)
    row = lax.broadcasted_iota(jnp.int32, (plan.rows, plan.lse_lanes), 0)
    lse = jnp.zeros((plan.rows, plan.lse_lanes), jnp.float32)
    for bundle in range(plan.num_bundles):
        l_r1 = kept.l[place, bundle].sum(axis=1, keepdims=True)
        has_keys_r1 = l_r1 > 0
        l_r1 = jnp.where(has_keys_r1, l_r1, 1.0)
        scale_rd = jnp.tile(refs.scale[1, bundle], (1, plan.value_lanes // words.LANES))
        o_rd = (kept.o[place, bundle] * (scale_rd / l_r1)).astype(refs.o.dtype)
        refs.o[place, bundle, :, : plan.value_lanes] = o_rd
        log2_r1 = jnp.log(l_r1) * LOG2_E - (float(LIFT) if plan.is_tiny else 0.0)
        lse_r1 = jnp.where(has_keys_r1, (kept.m[place, bundle][:, :1] + log2_r1) * _LN_2, -jnp.inf)
        # Converts a column to a row of lanes: everything except the diagonal is zero in the sum.
        lse = jnp.where(lane == bundle * plan.rows + row, lse_r1, lse)
    refs.lse[place] = lse.sum(axis=0, keepdims=True)


def take_apart(q_ref: Any, kept: Kept, plan: DecodePlan) -> None:
    """Unpack the queries of all tokens, as rows of 32-bit numbers."""
    for head, row in enumerate(plan.rows_of_heads):
        q_pl = q_ref[:, _lanes(head, plan.key_lanes)].astype(jnp.float32)
        is_turned = plan.spec.layout.is_joined and head // plan.group % 2 == 1
        words.spread(kept.q, row, _turned(q_pl) if is_turned else q_pl)


def put_together(o_ref: Any, kept: Kept, plan: DecodePlan) -> None:
    """Pack the outputs of all tokens, in the queries' type."""
    layout = plan.spec.layout
    for head, row in enumerate(plan.rows_of_heads):
        kv_head, o_pl = head // plan.group, words.gather(kept.q, row)[:, : plan.value_lanes]
        # A head without a partner has its values in the upper half already.
        is_turned = layout.is_joined and kv_head % 2 == 0 and kv_head < layout.num_kv_heads - 1
        o_ref[:, _lanes(head, plan.value_lanes)] = (_turned(o_pl) if is_turned else o_pl).astype(o_ref.dtype)


def clear(kept: Kept, plan: DecodePlan) -> None:
    """Clear every token: query rows without a head stay finite, and a token of no row has zero as output."""

    def place(i: Any) -> None:
        kept.q[i] = jnp.zeros(kept.q.shape[1:], kept.q.dtype)

    repeat(0, plan.sizes.places, place)


def _turned(x_pl: Any) -> Any:
    return pltpu.roll(x_pl, words.LANES // 2, 1)


def _lanes(head: int, lanes: int) -> slice:
    return slice(head * lanes, (head + 1) * lanes)
