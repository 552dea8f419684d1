"""Proposals of a head: it runs each token together with the model's hidden state of the previous position.

    position in its pool   p - 1     p     p + 1   p + 2
    token                  x_p       a     b       c         x_p is a row's last token; a, b and c are proposed after it
    state                  g         h     h       h         g is the model's state at p - 1, h is the head's own

The head's key for a token and the previous state has the position of that state: the token's own position has no model
state before the model has run it. After a round, states that the head computed are replaced by the model's states of
the accepted tokens, so that keys depend on those alone. For each block, the state of the last position that the model
has run is kept next to the pool. The next run begins there: a round, a forward, or another request that found the
block.

After each forward of the model the head runs over the same tokens, with the model's hidden states of them:

    draft[T]   (head params, head's pool, last tokens, inputs, features) -> head's pool      donated, updated in place

    tokens of a row         x4   x5   x6        a chunk, or the one of a decode
    previous state          g3   g4   g5        g3 was kept by the step before (see above); this one keeps g6
    position in its pool     3    4    5

A row that begins its sequence has no state before its first token. Its positions are 0, 1, ..., with the tokens after
them; the last of those tokens is not known yet, and its key goes to the null block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.device.model_runner import Packing
from jpaged.device.speculative.dispatch import Dispatch, Reached, VerifiedRound
from jpaged.device.step import DraftStep
from jpaged.models.layers import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Shaped

HeadPool = tuple[jax.Array, jax.Array]
"""The head's pool, and states `[N + 1, E]` of the last position that the model has run in each block."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Due:
    """The head's pool, and the tokens of each row that it has yet to run with the model's states.

    Attributes:
        ids_rw: the first `counts_r` are in use; the last of them is the row's last token.
        states_rwe: the model's states of the position before each token.
        pool_positions_r: the position of the first token's state.
    """

    pool: Shaped[Array, "P B ..."]
    states_ne: Float[Array, "N E"]
    ids_rw: Int[Array, "R W"]
    states_rwe: Float[Array, "R W E"]
    pool_positions_r: Int[Array, "R"]
    counts_r: Int[Array, "R"]


@dataclass(frozen=True, slots=True)
class HeadProposer:
    """See `Proposer`."""

    dispatch: Dispatch

    def begin(self, pool: HeadPool, reached: Reached) -> Due:
        """See `Proposer`. Each row's last token is to be run."""
        dispatch = self.dispatch
        width = dispatch.draft.num_tokens + 1
        pool_positions_r = jnp.maximum(dispatch.starts(reached) - 1, 0)
        keys, states_ne = pool
        states_re = states_ne[self._blocks(pool_positions_r[:, None])[:, 0]]
        states_rwe = jnp.pad(states_re[:, None], ((0, 0), (0, width - 1), (0, 0)))
        ids_rw = jnp.pad(reached.ids_r[:, None], ((0, 0), (0, width - 1)))
        return Due(keys, states_ne, ids_rw, states_rwe, pool_positions_r, jnp.ones_like(pool_positions_r))

    def propose(self, kept: Due, reached: Reached) -> tuple[Int[Array, "R K"], Due]:
        """See `Proposer`."""
        dispatch = self.dispatch
        hidden_re, keys, states_ne = self._catch_up(kept)

        def follow(offset: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            proposals_rk, keys, hidden_re = carry
            states_re = dispatch.draft.step.model.own_states(dispatch.draft_params, hidden_re)
            positions_r1, is_written_r1 = dispatch.positions(reached, offset[None] - 1)
            ids_r1 = lax.dynamic_slice_in_dim(proposals_rk, offset - 1, 1, axis=1)
            hidden_re, keys = self._run(keys, ids_r1, states_re, positions_r1, is_written_r1)
            proposed_r1 = dispatch.propose_from(hidden_re, reached, offset)[:, None]
            return lax.dynamic_update_slice_in_dim(proposals_rk, proposed_r1, offset, axis=1), keys, hidden_re

        proposals_rk = jnp.zeros((dispatch.num_rows, dispatch.draft.num_tokens), jnp.int32)
        proposals_rk = proposals_rk.at[:, 0].set(dispatch.propose_from(hidden_re, reached, 0))
        proposals_rk, keys, _ = lax.fori_loop(1, dispatch.draft.num_tokens, follow, (proposals_rk, keys, hidden_re))
        return proposals_rk, Due(keys, states_ne, kept.ids_rw, kept.states_rwe, kept.pool_positions_r, kept.counts_r)

    def verified(self, kept: Due, reached: Reached, verified: VerifiedRound) -> Due:
        """See `Proposer`. The sampled tokens are to be run, with the model's states of the positions before them."""
        dispatch, drawn_rw, (features_tf,) = self.dispatch, verified.drawn_rw, verified.features
        num_used = dispatch.inputs["num_rows"] * drawn_rw.shape[1]
        states_te = dispatch.draft.step.model.combine(dispatch.draft_params, features_tf, num_used)
        goes_on_r = verified.counts_r > 0
        return Due(
            kept.pool,
            kept.states_ne,
            jnp.where(goes_on_r[:, None], drawn_rw, kept.ids_rw),
            jnp.where(goes_on_r[:, None, None], states_te.reshape(kept.states_rwe.shape), kept.states_rwe),
            jnp.where(goes_on_r, dispatch.starts(reached), kept.pool_positions_r),
            jnp.where(goes_on_r, verified.counts_r, kept.counts_r),
        )

    def complete(self, kept: Due, reached: Reached) -> HeadPool:
        """See `Proposer`. No token is left to be run."""
        _, keys, states_ne = self._catch_up(kept)
        return keys, states_ne

    def _catch_up(self, kept: Due) -> tuple[Float[Array, "R E"], jax.Array, jax.Array]:
        """Run the pending tokens; return the hidden state of each row's last token, and both arrays of the pool."""
        dispatch = self.dispatch
        offsets_w, lasts_r1 = jnp.arange(kept.ids_rw.shape[1]), kept.counts_r[:, None] - 1
        is_due_rw = (offsets_w <= lasts_r1) & dispatch.is_used_r[:, None]
        positions_rw = kept.pool_positions_r[:, None] + jnp.minimum(offsets_w, lasts_r1)
        states_te = kept.states_rwe.reshape(-1, kept.states_rwe.shape[-1])
        hidden_te, keys = self._run(kept.pool, kept.ids_rw, states_te, positions_rw, is_due_rw)
        hidden_rwe = hidden_te.reshape(kept.states_rwe.shape)
        hidden_re = jnp.take_along_axis(hidden_rwe, lasts_r1[:, :, None], axis=1)[:, 0]
        is_kept_rw = is_due_rw & ((offsets_w == lasts_r1) | is_last_of_block(positions_rw, self._block_size))
        blocks_rw = jnp.where(is_kept_rw, self._blocks(positions_rw), 0)
        return hidden_re, keys, kept.states_ne.at[blocks_rw.reshape(-1)].set(states_te)

    def _run(
        self,
        keys: jax.Array,
        ids_rw: Int[Array, "R W"],
        states_te: Float[Array, "T E"],
        positions_rw: Int[Array, "R W"],
        is_written_rw: Bool[Array, "R W"],
    ) -> tuple[Float[Array, "T E"], jax.Array]:
        """Run the head over W tokens of each row; return the hidden states, and its keys."""
        dispatch = self.dispatch
        rows = dispatch.rows_at(positions_rw, is_written_rw, dispatch.draft_tables_1sm)
        return dispatch.draft.step.run(dispatch.draft_params, keys, ids_rw.reshape(-1), rows, states_te)

    def _blocks(self, positions_rw: Int[Array, "R W"]) -> Int[Array, "R W"]:
        """Return the block of each position; the null block for rows that are not in use."""
        tables_rm = self.dispatch.tables(self.dispatch.draft_tables_1sm)[0]
        blocks_rw = jnp.take_along_axis(tables_rm, positions_rw // self._block_size, axis=1, mode="clip")
        return jnp.where(self.dispatch.is_used_r[:, None], blocks_rw, 0)

    @property
    def _block_size(self) -> int:
        return self.dispatch.step.layout.block_size


def is_last_of_block(positions: Int[Array, "..."], block_size: int) -> Bool[Array, "..."]:
    """Return True for each position that is the last in its block."""
    return positions % block_size == block_size - 1


def packed_follow(
    draft: DraftStep,
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
    indices_t, num_tokens = jnp.arange(len(ids_t)), starts_s1[-1]
    is_used_t = indices_t < num_tokens
    rows_t = jnp.clip(jnp.searchsorted(starts_s1, indices_t, side="right") - 1, 0, len(kv_lens_s) - 1)
    is_first_t, is_last_t = indices_t == starts_s1[rows_t], indices_t + 1 == starts_s1[rows_t + 1]
    begins_s = kv_lens_s == starts_s1[1:] - starts_s1[:-1]  # rows that begin their sequence
    begins_t = begins_s[rows_t]

    def blocks(at_t: jax.Array) -> jax.Array:
        return jnp.where(is_used_t, table_sm[rows_t, at_t // block_size], 0)

    made_te = draft.step.model.combine(params, features_tf, num_tokens)
    before_te = jnp.where(is_first_t[:, None], states_ne[blocks(jnp.maximum(positions_t - 1, 0))], _behind(made_te))
    pool_positions_t = jnp.where(begins_t, positions_t, jnp.maximum(positions_t - 1, 0))
    is_written_t = is_used_t & ~(begins_t & is_last_t)
    rows = {
        "positions_t": pool_positions_t,
        "rope_lens_t": inputs["rope_lens_t"],
        "slots_gt": jnp.where(is_written_t, blocks(pool_positions_t) * block_size + pool_positions_t % block_size, 0)[
            None
        ],
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
    """Shift each state to the next position."""
    return jnp.roll(states_te, 1, axis=0)
