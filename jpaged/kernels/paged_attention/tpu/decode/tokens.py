"""Queries of a tile of tokens taken apart, and outputs put together: heads beside each other, or below.

    [places, H * lanes]                 a token's heads beside each other, as products leave and take them
    [places, bundles, rows, lanes]      the heads of a bundle below each other, as its product takes them

Outputs of latents have fewer lanes than queries.

One head of all tokens at a time: its lanes are rows that lie as far from each other as a token has rows. Where two
heads' keys share lanes, a head that has the other half of them is turned by half: queries come in the lower half, and
outputs go into the upper one, as the other kernel leaves them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from jpaged.kernels.paged_attention.tpu import words
from jpaged.kernels.paged_attention.tpu.decode.items import repeat
from jpaged.kernels.paged_attention.tpu.decode.plan import Kept, Plan


def take_apart(q_ref: Any, kept: Kept, plan: Plan) -> None:
    """The queries of all tokens, as rows of numbers of 32 bits."""
    for head, row in enumerate(plan.rows_of_heads):
        q_pl = q_ref[:, _lanes(head, plan.key_lanes)].astype(jnp.float32)
        is_turned = plan.spec.layout.is_joined and head // plan.group % 2 == 1
        words.spread(kept.q, row, _turned(q_pl) if is_turned else q_pl)


def put_together(o_ref: Any, kept: Kept, plan: Plan) -> None:
    """The outputs of all tokens, in the queries' type."""
    layout = plan.spec.layout
    for head, row in enumerate(plan.rows_of_heads):
        kv_head, o_pl = head // plan.group, words.gather(kept.q, row)[:, : plan.value_lanes]
        # A head that has its lanes alone has its values in the upper half.
        is_turned = layout.is_joined and kv_head % 2 == 0 and kv_head < layout.num_kv_heads - 1
        o_ref[:, _lanes(head, plan.value_lanes)] = (_turned(o_pl) if is_turned else o_pl).astype(o_ref.dtype)


def clear(kept: Kept, plan: Plan) -> None:
    """Zero for every token: queries that no head has stay finite, and a token of no row has this output."""

    def place(i: Any) -> None:
        kept.q[i] = jnp.zeros(kept.q.shape[1:], kept.q.dtype)

    repeat(0, plan.sizes.places, place)


def _turned(x_pl: Any) -> Any:
    return pltpu.roll(x_pl, words.LANES // 2, 1)


def _lanes(head: int, lanes: int) -> slice:
    return slice(head * lanes, (head + 1) * lanes)
