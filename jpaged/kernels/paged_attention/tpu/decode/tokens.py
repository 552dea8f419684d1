"""Queries of a tile of tokens unpacked into rows of heads, and outputs packed back.

    [places, H * lanes]                 a token's heads concatenated, the layout of matmuls before and after
    [places, bundles, rows, lanes]      the heads of a bundle stacked, the layout of the bundle's matmul

Outputs of latents have fewer lanes than queries.

Each copy moves one head of all tokens, as strided rows. If two heads' keys share lanes, the head with the other half
is rotated by half: queries come in the lower half, and outputs go into the upper one, as the other kernel writes them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.paged_attention.tpu import words
from jpaged.kernels.paged_attention.tpu.decode.items import repeat
from jpaged.kernels.paged_attention.tpu.decode.plan import DecodePlan, Kept


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
