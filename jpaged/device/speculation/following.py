"""The head's run after a forward of the model, over the same tokens and the model's hidden states of them.

    draft[T]   (head params, head's pool, last tokens, inputs, features) -> head's pool      donated, updated in place

    tokens of a row        x4   x5   x6        a chunk, or the one of a decode
    previous state         g3   g4   g5        g3 was kept by the step before (`by_head`); this one keeps g6
    place in its pool       3    4    5

A row that begins its sequence has no state before its first token. Its places are 0, 1, ..., with the tokens after
them; the last of those tokens is not known yet, and its key goes to the null block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jpaged.device.speculation.by_head import HeadPool, is_last_of_block
from jpaged.device.step.forward import Draft
from jpaged.device.step.runner import Packing
from jpaged.models.layers import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def packed_follow(
    draft: Draft,
    params: Params,
    pool: HeadPool,
    last_tokens_s: Int[Array, "S"],
    words: Int[Array, "W"],
    features_tf: Float[Array, "T F"],
    *,
    packing: Packing,
) -> HeadPool:
    """Run the head on packed inputs of the forward; return its pool, with keys and states."""
    inputs, (keys, states_ne) = packing.unpack(words), pool
    sampled_t = last_tokens_s[inputs["prev_sampled_rows_t"]]
    ids_t = jnp.where(inputs["is_prev_sampled_t"], sampled_t, inputs["token_ids_t"])
    positions_t, starts_s1, kv_lens_s = inputs["positions_t"], inputs["query_starts_s1"], inputs["kv_lens_s"]
    block_size, table_sm = draft.step.layout.block_size, inputs["block_tables_gsm"][draft.group]
    places, num_tokens = jnp.arange(len(ids_t)), starts_s1[-1]
    is_used_t = places < num_tokens
    rows_t = jnp.clip(jnp.searchsorted(starts_s1, places, side="right") - 1, 0, len(kv_lens_s) - 1)
    is_first_t, is_last_t = places == starts_s1[rows_t], places + 1 == starts_s1[rows_t + 1]
    begins_s = kv_lens_s == starts_s1[1:] - starts_s1[:-1]  # rows that begin their sequence
    begins_t = begins_s[rows_t]

    def blocks(places_t: jax.Array) -> jax.Array:
        return jnp.where(is_used_t, table_sm[rows_t, places_t // block_size], 0)

    made_te = draft.step.model.combine(params, features_tf, num_tokens)
    before_te = jnp.where(is_first_t[:, None], states_ne[blocks(jnp.maximum(positions_t - 1, 0))], _behind(made_te))
    places_t = jnp.where(begins_t, positions_t, jnp.maximum(positions_t - 1, 0))
    is_written_t = is_used_t & ~(begins_t & is_last_t)
    rows = {
        "positions_t": places_t,
        "rope_lens_t": inputs["rope_lens_t"],
        "slots_gt": jnp.where(is_written_t, blocks(places_t) * block_size + places_t % block_size, 0)[None],
        "query_starts_s1": starts_s1,
        "kv_lens_s": jnp.where(begins_s, kv_lens_s, jnp.maximum(kv_lens_s - 1, 0)),
        "block_tables_gsm": table_sm[None],
        "num_rows": inputs["num_rows"],
    }
    shown_t = jnp.where(begins_t, jnp.roll(ids_t, -1), ids_t)
    shown_te = jnp.where(begins_t[:, None], made_te, before_te)
    _, keys = draft.step.run(params, keys, shown_t, rows, shown_te)
    is_kept_t = is_last_t | is_last_of_block(positions_t, block_size)
    return keys, states_ne.at[jnp.where(is_kept_t, blocks(positions_t), 0)].set(made_te)


def _behind(states_te: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """Shift each state to the next place."""
    return jnp.roll(states_te, 1, axis=0)
