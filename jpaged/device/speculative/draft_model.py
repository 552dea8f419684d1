"""Proposals of a draft model: it runs the tokens one after another, over its own keys.

After a round in which everything was accepted, the pool lacks the keys of the last proposal. So the first step of a
round runs the last two tokens of each row, and one more step follows the last round if keys are missing.

The draft model also runs over tokens that only the model has run, so that its pool has their keys before it proposes:

    draft[T]   (draft params, draft pool, inputs) -> draft pool      donated, updated in place

This program takes inputs as a forward does, with tokens known to the host. It returns no hidden states: XLA removes
what only they would need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.device.model_runner import Packing
from jpaged.device.speculative.dispatch import Dispatch, Reached, VerifiedRound
from jpaged.device.step import DraftStep
from jpaged.models.layers import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Shaped


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class DraftModelState:
    """State carried between rounds.

    Attributes:
        array: the draft's pool.
        before_r: the token before each row's last one.
        is_missing_r: True if the pool lacks the keys of that token.
    """

    array: Shaped[Array, "P B ..."]
    before_r: Int[Array, "R"]
    is_missing_r: Bool[Array, "R"]


@dataclass(frozen=True, slots=True)
class ModelProposer:
    """See `Proposer`."""

    dispatch: Dispatch

    def begin(self, pool: jax.Array, reached: Reached) -> DraftModelState:
        """See `Proposer`."""
        zeros_r = jnp.zeros_like(reached.ids_r)
        return DraftModelState(pool, zeros_r, zeros_r > 0)

    def propose(self, kept: DraftModelState, reached: Reached) -> tuple[Int[Array, "R K"], DraftModelState]:
        """See `Proposer`."""
        dispatch = self.dispatch
        num_tokens = dispatch.draft.num_tokens

        def follow(offset: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            proposals_rk, pool = carry
            ids_r1 = lax.dynamic_slice_in_dim(proposals_rk, offset - 1, 1, axis=1)
            hidden_re, pool = self._run(pool, ids_r1, *dispatch.positions(reached, offset[None]))
            proposed_r1 = dispatch.propose_from(hidden_re, reached, offset)[:, None]
            return lax.dynamic_update_slice_in_dim(proposals_rk, proposed_r1, offset, axis=1), pool

        positions_r1, is_written_r1 = dispatch.positions(reached, jnp.arange(1))
        before_r1 = jnp.maximum(dispatch.starts(reached) - 1, 0)[:, None]
        positions_r2 = jnp.concatenate([before_r1, positions_r1], axis=1)
        is_written_r2 = jnp.concatenate([kept.is_missing_r[:, None], is_written_r1], axis=1)
        ids_r2 = jnp.stack([kept.before_r, reached.ids_r], axis=1)
        hidden_re, pool = self._run(kept.array, ids_r2, positions_r2, is_written_r2)
        proposals_rk = jnp.zeros((dispatch.num_rows, num_tokens), jnp.int32)
        proposals_rk = proposals_rk.at[:, 0].set(dispatch.propose_from(hidden_re, reached, 0))
        proposals_rk, pool = lax.fori_loop(1, num_tokens, follow, (proposals_rk, pool))
        return proposals_rk, DraftModelState(pool, kept.before_r, kept.is_missing_r)

    def verified(self, kept: DraftModelState, reached: Reached, verified: VerifiedRound) -> DraftModelState:
        """See `Proposer`."""
        return DraftModelState(
            kept.array, verified.proposals_rk[:, -1], verified.counts_r > self.dispatch.draft.num_tokens
        )

    def complete(self, kept: DraftModelState, reached: Reached) -> Any:
        """See `Proposer`. Adds the keys that the last round left out."""
        positions_r1 = jnp.maximum(self.dispatch.starts(reached) - 1, 0)[:, None]

        def run(pool: jax.Array) -> jax.Array:
            return self._run(pool, kept.before_r[:, None], positions_r1, kept.is_missing_r[:, None])[1]

        return lax.cond(jnp.any(kept.is_missing_r), run, lambda pool: pool, kept.array)

    def _run(
        self, pool: jax.Array, ids_rw: Int[Array, "R W"], positions_rw: jax.Array, is_written_rw: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Run the draft over W tokens of each row; return the hidden state of the last one, and its pool."""
        dispatch = self.dispatch
        rows = dispatch.rows_at(positions_rw, is_written_rw, dispatch.draft_tables_1sm)
        hidden_te, pool = dispatch.draft.step.run(dispatch.draft_params, pool, ids_rw.reshape(-1), rows)
        return hidden_te[ids_rw.shape[1] - 1 :: ids_rw.shape[1]], pool


_READ = ("positions_t", "rope_lens_t", "query_starts_s1", "kv_lens_s", "num_rows")


def packed_keys(
    draft: DraftStep,
    params: Params,
    pool: Shaped[Array, "P B ..."],
    words: Int[Array, "W"],
    *,
    packing: Packing,
) -> Shaped[Array, "P B ..."]:
    """Run the draft's layers on packed inputs; return the pool, with the keys and values of their tokens."""
    inputs = packing.unpack(words)
    by_group = {name: inputs[name][draft.group][None] for name in ("slots_gt", "block_tables_gsm")}
    return draft.step.run(params, pool, inputs["token_ids_t"], {**{name: inputs[name] for name in _READ}, **by_group})[
        1
    ]
