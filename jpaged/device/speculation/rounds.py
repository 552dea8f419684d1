"""Rounds of proposals and their verification as one program.

    speculate[R]   (params, draft params, pools, last tokens, inputs) -> (pools, last tokens, outputs)   pools donated

    position       p     p+1   p+2   p+3
    the draft      x ──> a ──> b ──> c           one after another, sampled as the model samples: with the same noise
    the model      x     a     b     c           in one step, a row each: what single decode steps compute, to the bit
    it samples     a     b     y     .           accepted: proposals equal to the sampled tokens, and the token after
        them
    continues with             y at p + 3

The acceptance rule is documented in `jpaged.engine.speculation.drafts`. A row writes keys only at positions for
which it has blocks. Later positions write to the null block, and their samples are ignored.

Missing or wrong keys of the draft, for example of tokens that only the model has run, reduce acceptance and have no
other effect. Ids that a draft computed from NaN are harmless, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.device.speculation.by_head import HeadProposer
from jpaged.device.speculation.by_model import ModelProposer
from jpaged.device.speculation.dispatch import Dispatch, Proposer, Reached, Verified
from jpaged.device.speculation.packing import SpeculatePacking, num_columns, unpack_words
from jpaged.device.step.forward import Step
from jpaged.engine.executor import MAX_NUM_ROUNDS, Detail
from jpaged.errors import InternalError
from jpaged.kernels.sampling import RowSampling
from jpaged.models.layers import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Shaped

Pools = tuple[jax.Array, Any]
"""Pools of the model and of the draft; a head's has states next to keys."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class _State:
    """State of the loop over rounds.

    Attributes:
        num_rounds: rounds that were run.
        pool: as the last round left it.
        kept: the proposer's state, with the draft's pool.
        reached: progress of the rows.
        outputs_nrc: the columns of each round.
    """

    num_rounds: Int[Array, ""]
    pool: Shaped[Array, "P B ..."]
    kept: Any
    reached: Reached
    outputs_nrc: Int[Array, "N R C"]


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Rounds of a dispatch."""

    dispatch: Dispatch
    proposer: Proposer[Any]

    def run(self, state: _State) -> _State:
        """Run one round."""
        dispatch, reached = self.dispatch, state.reached
        step, num_tokens = dispatch.step, dispatch.draft.num_tokens
        proposals_rk, kept = self.proposer.propose(state.kept, reached)
        ids_rw = jnp.concatenate([reached.ids_r[:, None], proposals_rk], axis=1)
        places_w = jnp.arange(num_tokens + 1)
        rows = dispatch.rows_at(*dispatch.places(reached, places_w), dispatch.inputs["block_tables_gsm"])
        hidden_te, pool, features = step.run_watched(dispatch.params, state.pool, ids_rw.reshape(-1), rows)
        how = dispatch.sampling_at(reached.num_done_r[:, None] + places_w)
        sampled = step.sample(dispatch.params, hidden_te, how, Detail.TOKENS)
        drawn_rw, is_sound_rw = (x.reshape(ids_rw.shape) for x in (sampled.token_ids_r, sampled.is_sound_r))

        left_r = dispatch.left(reached)
        is_drawn_rk = (proposals_rk == drawn_rw[:, :-1]) & (places_w[1:] < left_r[:, None])
        accepted_r = jnp.cumprod(is_drawn_rk.astype(jnp.int32), axis=1).sum(axis=1)
        counts_r = jnp.minimum(accepted_r + 1, left_r)
        is_end_rw = dispatch.ends(drawn_rw) & (places_w < counts_r[:, None])
        has_end_r = jnp.any(is_end_rw, axis=1)
        counts_r = jnp.where(has_end_r, jnp.argmax(is_end_rw, axis=1).astype(jnp.int32) + 1, counts_r)
        lasts_r1 = jnp.maximum(counts_r - 1, 0)[:, None]
        columns = [counts_r, jnp.clip(left_r - 1, 0, num_tokens), accepted_r]
        columns_rc = jnp.concatenate([jnp.stack(columns, axis=1), drawn_rw, is_sound_rw.astype(jnp.int32)], axis=1)
        return _State(
            num_rounds=state.num_rounds + 1,
            pool=pool,
            kept=self.proposer.verified(kept, reached, Verified(proposals_rk, drawn_rw, counts_r, features)),
            reached=Reached(
                ids_r=jnp.where(counts_r > 0, jnp.take_along_axis(drawn_rw, lasts_r1, axis=1)[:, 0], reached.ids_r),
                num_done_r=reached.num_done_r + counts_r,
                has_ended_r=reached.has_ended_r | has_end_r | (counts_r == left_r),
            ),
            outputs_nrc=lax.dynamic_update_index_in_dim(state.outputs_nrc, columns_rc, state.num_rounds, 0),
        )


def packed_speculate(
    step: Step,
    params: Params,
    draft_params: Params,
    pools: Pools,
    last_tokens_s: Int[Array, "S"],
    words: Int[Array, "W"],
    *,
    packing: SpeculatePacking,
) -> tuple[Pools, Int[Array, "S"], Int[Array, "N R C"]]:
    """Run the rounds on packed inputs until every row has ended.

    Returns:
        the pools, the tokens that the rows sampled last, and for each round the columns that `unpack_rounds` parses.
    """
    if step.draft is None:
        raise InternalError("speculative rounds require a draft model")
    (first, num_rounds, ending_rx, rows), num_left_r = unpack_words(words, packing)
    dispatch = Dispatch(step, step.draft, params, draft_params, first, ending_rx, num_left_r, RowSampling(**rows))
    proposer = HeadProposer(dispatch) if step.draft.is_head else ModelProposer(dispatch)
    rounds = _Rounds(dispatch, proposer)
    ids_r = jnp.where(first["is_prev_sampled_t"], last_tokens_s[first["prev_sampled_rows_t"]], first["token_ids_t"])
    has_ended_r = ~dispatch.is_used_r | (first["is_prev_sampled_t"] & dispatch.ends(ids_r)) | (num_left_r <= 0)
    reached = Reached(ids_r, jnp.zeros_like(ids_r), has_ended_r)
    shape = (MAX_NUM_ROUNDS, packing.num_rows, num_columns(step.draft.num_tokens))
    pool, of_draft = pools
    state = _State(
        num_rounds=jnp.int32(0),
        pool=pool,
        kept=proposer.begin(of_draft, reached),
        reached=reached,
        outputs_nrc=jnp.zeros(shape, jnp.int32),
    )
    state = lax.while_loop(
        lambda state: (state.num_rounds < num_rounds) & ~jnp.all(state.reached.has_ended_r), rounds.run, state
    )
    last_tokens_s = jnp.pad(state.reached.ids_r, (0, step.num_places - packing.num_rows))
    return (state.pool, proposer.complete(state.kept, state.reached)), last_tokens_s, state.outputs_nrc
