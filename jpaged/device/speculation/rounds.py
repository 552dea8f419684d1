"""Rounds of proposals and their verification as one program.

    speculate[R]   (params, draft params, pools, last tokens, inputs) -> (pools, last tokens, outputs)   pools donated

    position       p     p+1   p+2   p+3
    the draft      x ──> a ──> b ──> c           one after another, sampled as the model samples: with the same noise
    the model      x     a     b     c           in one step, a row each: what single decode steps compute, to the bit
    it draws       a     b     y     .           the proposals that were drawn, and the draw behind them, are tokens
    goes on with               y at p + 3

Which draws count is told in `jpaged.engine.speculation.verification`. A row writes keys at positions that it has blocks
for and nowhere else; what lies behind goes to the null block, and what is drawn there means nothing.

Behind a round in which everything was accepted the draft lacks the keys of its last proposal. So the first step of a
round is over the last two tokens of each row, and one more step follows the last round where it has to. Keys that are
missing or are another's, as of tokens that the model alone has run and the draft was not shown, cost acceptance and
nothing else; nor do ids that NaN made of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.device.speculation.packing import SpeculatePacking, num_columns, unpack_words
from jpaged.device.step.forward import Draft, Step
from jpaged.engine.executor import MAX_NUM_ROUNDS, Detail
from jpaged.errors import InternalError
from jpaged.kernels.sampling import RowSampling
from jpaged.models.layers import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Shaped

Pools = tuple[jax.Array, jax.Array]
"""The model's, and the draft's."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class _State:
    """What rounds hand on.

    Attributes:
        num_rounds: that were run.
        pools: as the last round left them.
        ids_r: the last token of each row, whose keys are in neither pool.
        before_r: the token in front of it.
        is_missing_r: whether the draft's pool lacks the keys of that one.
        num_done_r: tokens that each row has sampled.
        has_ended_r: rows that sample no more.
        outputs_nrc: the columns of each round.
    """

    num_rounds: Int[Array, ""]
    pools: Pools
    ids_r: Int[Array, "R"]
    before_r: Int[Array, "R"]
    is_missing_r: Bool[Array, "R"]
    num_done_r: Int[Array, "R"]
    has_ended_r: Bool[Array, "R"]
    outputs_nrc: Int[Array, "N R C"]


@dataclass(frozen=True, slots=True)
class _Rounds:
    """A dispatch on the device; `inputs` has the fields of `StepInputs` by name."""

    step: Step
    draft: Draft
    params: Params
    draft_params: Params
    inputs: Mapping[str, jax.Array]
    ending_token_ids_rx: Int[Array, "R X"]
    num_left_r: Int[Array, "R"]
    how: RowSampling

    @property
    def num_rows(self) -> int:
        return len(self.num_left_r)

    @property
    def is_used_r(self) -> Bool[Array, "R"]:
        return jnp.arange(self.num_rows) < self.inputs["num_rows"]

    def ends(self, ids: Int[Array, "R ..."]) -> Bool[Array, "R ..."]:
        """Whether each token ends its row."""
        ending = self.ending_token_ids_rx.reshape(self.num_rows, *[1] * (ids.ndim - 1), -1)
        return jnp.any(ids[..., None] == ending, axis=-1)

    def rows_at(
        self, positions_rw: Int[Array, "R W"], is_written_rw: Bool[Array, "R W"], tables_gsm: Int[Array, "G S M"]
    ) -> dict[str, jax.Array]:
        """A step of a row for each of W tokens of each row; keys that are not to be written go to the null block."""
        num_rows, width = positions_rw.shape
        block_size, num_used = self.step.layout.block_size, self.inputs["num_rows"] * width
        rows_r = jnp.minimum(jnp.arange(num_rows), tables_gsm.shape[1] - 1)
        tables_grm = tables_gsm[:, rows_r]
        blocks_grw = jnp.take_along_axis(tables_grm, (positions_rw // block_size)[None], axis=2, mode="clip")
        slots_grw = jnp.where(is_written_rw, blocks_grw * block_size + positions_rw % block_size, 0)
        positions_t = positions_rw.reshape(-1)
        places = jnp.arange(len(positions_t) + 1)
        return {
            "positions_t": positions_t,
            "rope_lens_t": jnp.maximum(jnp.repeat(self.inputs["rope_lens_t"], width), positions_t + 1),
            "slots_gt": slots_grw.reshape(len(tables_gsm), -1),
            "query_starts_s1": jnp.minimum(places, num_used),
            "kv_lens_s": jnp.where(places[:-1] < num_used, positions_t + 1, 0),
            "block_tables_gsm": jnp.repeat(tables_grm, width, axis=1),
            "num_rows": num_used,
        }

    def sampling_at(self, num_before_rw: Int[Array, "R W"]) -> RowSampling:
        """How W tokens of each row are sampled, behind so many that it has sampled before."""
        width = num_before_rw.shape[1]
        how: RowSampling = jax.tree.map(lambda field: jnp.repeat(field, width, axis=0), self.how)
        return dataclasses.replace(how, positions_r=how.positions_r + num_before_rw.reshape(-1))

    def run_draft(
        self, pool: jax.Array, ids_rw: Int[Array, "R W"], positions_rw: jax.Array, is_written_rw: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The draft over W tokens of each row: the hidden state of the last one, and its pool."""
        tables_gsm = self.inputs["block_tables_gsm"][self.draft.group][None]
        rows = self.rows_at(positions_rw, is_written_rw, tables_gsm)
        hidden_te, pool = self.draft.step.run(self.draft_params, pool, ids_rw.reshape(-1), rows)
        return hidden_te[ids_rw.shape[1] - 1 :: ids_rw.shape[1]], pool

    def propose(self, state: _State) -> tuple[Int[Array, "R K"], jax.Array]:
        """The draft's tokens for each row, and its pool."""
        starts_r, num_tokens, last_id = self._starts(state), self.draft.num_tokens, self.step.vocab_size - 1

        def sample(hidden_re: jax.Array, place: int | jax.Array) -> jax.Array:
            how = self.sampling_at((state.num_done_r + place)[:, None])
            sampled = self.draft.step.sample(self.draft_params, hidden_re, how, Detail.TOKENS)
            return jnp.clip(sampled.token_ids_r, 0, last_id)

        def follow(place: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            proposals_rk, pool = carry
            ids_r1 = lax.dynamic_slice_in_dim(proposals_rk, place - 1, 1, axis=1)
            hidden_re, pool = self.run_draft(pool, ids_r1, *self._places(state, place[None]))
            proposed_r1 = sample(hidden_re, place)[:, None]
            return lax.dynamic_update_slice_in_dim(proposals_rk, proposed_r1, place, axis=1), pool

        positions_r1, is_written_r1 = self._places(state, jnp.arange(1))
        positions_r2 = jnp.concatenate([jnp.maximum(starts_r - 1, 0)[:, None], positions_r1], axis=1)
        is_written_r2 = jnp.concatenate([state.is_missing_r[:, None], is_written_r1], axis=1)
        ids_r2 = jnp.stack([state.before_r, state.ids_r], axis=1)
        hidden_re, pool = self.run_draft(state.pools[1], ids_r2, positions_r2, is_written_r2)
        proposals_rk = jnp.zeros((self.num_rows, num_tokens), jnp.int32).at[:, 0].set(sample(hidden_re, 0))
        return lax.fori_loop(1, num_tokens, follow, (proposals_rk, pool))

    def run(self, state: _State) -> _State:
        """One round."""
        num_tokens = self.draft.num_tokens
        proposals_rk, draft_pool = self.propose(state)
        ids_rw = jnp.concatenate([state.ids_r[:, None], proposals_rk], axis=1)
        places_w = jnp.arange(num_tokens + 1)
        rows = self.rows_at(*self._places(state, places_w), self.inputs["block_tables_gsm"])
        hidden_te, pool = self.step.run(self.params, state.pools[0], ids_rw.reshape(-1), rows)
        how = self.sampling_at(state.num_done_r[:, None] + places_w)
        sampled = self.step.sample(self.params, hidden_te, how, Detail.TOKENS)
        drawn_rw, is_sound_rw = (x.reshape(ids_rw.shape) for x in (sampled.token_ids_r, sampled.is_sound_r))

        left_r = jnp.where(state.has_ended_r, 0, self.num_left_r - state.num_done_r)
        is_drawn_rk = (proposals_rk == drawn_rw[:, :-1]) & (places_w[1:] < left_r[:, None])
        accepted_r = jnp.cumprod(is_drawn_rk.astype(jnp.int32), axis=1).sum(axis=1)
        counts_r = jnp.minimum(accepted_r + 1, left_r)
        is_end_rw = self.ends(drawn_rw) & (places_w < counts_r[:, None])
        has_end_r = jnp.any(is_end_rw, axis=1)
        counts_r = jnp.where(has_end_r, jnp.argmax(is_end_rw, axis=1).astype(jnp.int32) + 1, counts_r)
        lasts_r1 = jnp.maximum(counts_r - 1, 0)[:, None]
        columns = [counts_r, jnp.clip(left_r - 1, 0, num_tokens), accepted_r]
        columns_rc = jnp.concatenate([jnp.stack(columns, axis=1), drawn_rw, is_sound_rw.astype(jnp.int32)], axis=1)
        return _State(
            num_rounds=state.num_rounds + 1,
            pools=(pool, draft_pool),
            ids_r=jnp.where(counts_r > 0, jnp.take_along_axis(drawn_rw, lasts_r1, axis=1)[:, 0], state.ids_r),
            before_r=proposals_rk[:, -1],
            is_missing_r=counts_r > num_tokens,
            num_done_r=state.num_done_r + counts_r,
            has_ended_r=state.has_ended_r | has_end_r | (counts_r == left_r),
            outputs_nrc=lax.dynamic_update_index_in_dim(state.outputs_nrc, columns_rc, state.num_rounds, 0),
        )

    def complete(self, state: _State) -> Pools:
        """The pools, with the keys that the last round left out of the draft's."""
        positions_r1 = jnp.maximum(self._starts(state) - 1, 0)[:, None]

        def run(pool: jax.Array) -> jax.Array:
            return self.run_draft(pool, state.before_r[:, None], positions_r1, state.is_missing_r[:, None])[1]

        pool, draft_pool = state.pools
        return pool, lax.cond(jnp.any(state.is_missing_r), run, lambda pool: pool, draft_pool)

    def _starts(self, state: _State) -> Int[Array, "R"]:
        """The position of each row's last token."""
        return self.inputs["positions_t"] + state.num_done_r

    def _places(self, state: _State, places_w: Int[Array, "W"]) -> tuple[Int[Array, "R W"], Bool[Array, "R W"]]:
        """Positions behind the last token of each row, as far as it has blocks, and whether it has."""
        left_r1 = jnp.where(state.has_ended_r, 0, self.num_left_r - state.num_done_r)[:, None]
        positions_rw = self._starts(state)[:, None] + jnp.clip(places_w, 0, jnp.maximum(left_r1 - 1, 0))
        return positions_rw, places_w < left_r1


def packed_speculate(
    step: Step,
    params: Params,
    draft_params: Params,
    pools: tuple[Shaped[Array, "P B ..."], Shaped[Array, "P B ..."]],
    last_tokens_s: Int[Array, "S"],
    words: Int[Array, "W"],
    *,
    packing: SpeculatePacking,
) -> tuple[Pools, Int[Array, "S"], Int[Array, "N R C"]]:
    """Runs the rounds, on inputs that are packed, until every row has ended.

    Returns:
        the pools, the tokens that the rows sampled last, and of each round the columns that `unpack_rounds` takes
        apart.
    """
    if step.draft is None:
        raise InternalError("rounds of proposals without a draft model")
    (first, num_rounds, ending_rx, rows), num_left_r = unpack_words(words, packing)
    rounds = _Rounds(step, step.draft, params, draft_params, first, ending_rx, num_left_r, RowSampling(**rows))
    ids_r = jnp.where(first["is_prev_sampled_t"], last_tokens_s[first["prev_sampled_rows_t"]], first["token_ids_t"])
    has_ended_r = ~rounds.is_used_r | (first["is_prev_sampled_t"] & rounds.ends(ids_r)) | (num_left_r <= 0)
    zeros_r, shape = jnp.zeros_like(ids_r), (MAX_NUM_ROUNDS, packing.num_rows, num_columns(step.draft.num_tokens))
    state = _State(
        num_rounds=jnp.int32(0),
        pools=pools,
        ids_r=ids_r,
        before_r=zeros_r,
        is_missing_r=zeros_r > 0,
        num_done_r=zeros_r,
        has_ended_r=has_ended_r,
        outputs_nrc=jnp.zeros(shape, jnp.int32),
    )
    state = lax.while_loop(
        lambda state: (state.num_rounds < num_rounds) & ~jnp.all(state.has_ended_r), rounds.run, state
    )
    last_tokens_s = jnp.pad(state.ids_r, (0, step.num_places - packing.num_rows))
    return rounds.complete(state), last_tokens_s, state.outputs_nrc
