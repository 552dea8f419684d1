"""The draft model over the tokens of a forward, so that its pool has their keys when it is to propose.

    draft[T]   (draft params, draft pool, last tokens, inputs) -> draft pool      donated, updated in place

It takes the words of the forward as they are, and gives no hidden state: XLA leaves out what only those would need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jpaged.device.step.forward import Draft
from jpaged.device.step.runner import Packing
from jpaged.models.layers import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Shaped

_READ = ("positions_t", "rope_lens_t", "query_starts_s1", "kv_lens_s", "num_rows")


def packed_keys(
    draft: Draft,
    params: Params,
    pool: Shaped[Array, "P B ..."],
    last_tokens_s: Int[Array, "S"],
    words: Int[Array, "W"],
    *,
    packing: Packing,
) -> Shaped[Array, "P B ..."]:
    """Runs the draft's layers on inputs that are packed; the pool, with the keys and values of their tokens."""
    inputs = packing.unpack(words)
    sampled_t = last_tokens_s[inputs["prev_sampled_rows_t"]]
    ids_t = jnp.where(inputs["is_prev_sampled_t"], sampled_t, inputs["token_ids_t"])
    by_group = {name: inputs[name][draft.group][None] for name in ("slots_gt", "block_tables_gsm")}
    return draft.step.run(params, pool, ids_t, {**{name: inputs[name] for name in _READ}, **by_group})[1]
