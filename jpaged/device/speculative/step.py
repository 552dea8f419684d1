"""Rounds of proposals and their verification as one program, and the lowering of the draft's programs.

    speculate[R]   (params, draft params, pools, last tokens, inputs) -> (pools, last tokens, outputs)   pools donated

    position       p     p+1   p+2   p+3
    the draft      x ──> a ──> b ──> c           one after another, sampled as the model samples: with the same noise
    the model      x     a     b     c           in one step, a row each: what single decode steps compute, to the bit
    it samples     a     b     y     .           accepted: proposals equal to the sampled tokens, and the token after
        them
    continues with             y at p + 3

The acceptance rule is documented in `jpaged.engine.speculative.drafts`. Benchmarks may pin the number of accepted
proposals (`DraftStep.pinned_length`): a row then continues with these, whatever the model samples. A row writes keys
only at positions for which it has blocks. Later positions write to the null block, and their samples are ignored.

Missing or wrong keys of the draft, for example of tokens that only the model has run, reduce acceptance and have no
other effect. Ids that a draft computed from NaN are harmless, too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jpaged.device.compilation.compile import ProgramSpec, compiler_options
from jpaged.device.mesh import POOL_SPEC, first_device, replicated
from jpaged.device.speculative.dispatch import (
    DeviceProposer,
    Dispatch,
    Reached,
    SpeculatePacking,
    VerifiedRound,
    num_columns,
    unpack_words,
)
from jpaged.device.speculative.draft_model import ModelProposer, packed_keys
from jpaged.device.speculative.drafter import abstract_states
from jpaged.device.speculative.eagle import HeadPool, HeadProposer, packed_follow
from jpaged.device.step import DraftStep, Step, forward_packing
from jpaged.device.transfers import lower_move
from jpaged.engine.executor import MAX_NUM_ROUNDS, Detail, Geometry
from jpaged.errors import InternalError
from jpaged.kernels.recurrence import StatefulPool
from jpaged.kernels.sampling import RowSampling
from jpaged.models.layers import Params
from jpaged.models.model import dense_formats

if TYPE_CHECKING:
    from jaxtyping import Array, Int

Pools = tuple[Any, Any]
"""Pools of the model and of the draft: the model's may have recurrent states, and a head's has hidden states."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class _RoundState:
    """State of the loop over rounds.

    Attributes:
        num_rounds: rounds that were run.
        pool: as the last round left it, with recurrent states, if any.
        kept: the proposer's state, with the draft's pool.
        reached: progress of the rows.
        outputs_nrc: the columns of each round.
    """

    num_rounds: Int[Array, ""]
    pool: Any
    kept: Any
    reached: Reached
    outputs_nrc: Int[Array, "N R C"]


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Rounds of a dispatch."""

    dispatch: Dispatch
    proposer: DeviceProposer[Any]

    def run(self, state: _RoundState) -> _RoundState:
        """Run one round."""
        dispatch, reached = self.dispatch, state.reached
        step, num_tokens = dispatch.step, dispatch.draft.num_tokens
        proposals_rk, kept = self.proposer.propose(state.kept, reached)
        ids_rw = jnp.concatenate([reached.ids_r[:, None], proposals_rk], axis=1)
        offsets_w = jnp.arange(num_tokens + 1)
        positions_rw, is_written_rw = dispatch.positions(reached, offsets_w)
        rows = dispatch.rows_at(positions_rw, is_written_rw, dispatch.inputs["block_tables_gsm"])
        if reached.states is not None:
            rows |= reached.states.get_inputs(is_written_rw)
        hidden_te, pool, features = step.run_watched(dispatch.params, state.pool, ids_rw.reshape(-1), rows)
        how = dispatch.sampling_at(reached.num_done_r[:, None] + offsets_w)
        sampled = step.sample(dispatch.params, hidden_te, how, Detail.TOKENS)
        drawn_rw, is_sound_rw = (x.reshape(ids_rw.shape) for x in (sampled.token_ids_r, sampled.is_sound_r))

        left_r = dispatch.left(reached)
        is_drawn_rk = proposals_rk == drawn_rw[:, :-1]
        if (length := dispatch.draft.pinned_length) is not None:
            is_drawn_rk = offsets_w[:-1] < num_pinned(dispatch.starts(reached), length)[:, None]
            drawn_rw = drawn_rw.at[:, :-1].set(jnp.where(is_drawn_rk, proposals_rk, drawn_rw[:, :-1]))
        is_drawn_rk &= offsets_w[1:] < left_r[:, None]
        accepted_r = jnp.cumprod(is_drawn_rk.astype(jnp.int32), axis=1).sum(axis=1)
        counts_r = jnp.minimum(accepted_r + 1, left_r)
        is_end_rw = dispatch.ends(drawn_rw) & (offsets_w < counts_r[:, None])
        has_end_r = jnp.any(is_end_rw, axis=1)
        counts_r = jnp.where(has_end_r, jnp.argmax(is_end_rw, axis=1).astype(jnp.int32) + 1, counts_r)
        lasts_r1 = jnp.maximum(counts_r - 1, 0)[:, None]
        states = None if reached.states is None else reached.states.accept(counts_r)
        slots_r = jnp.zeros_like(counts_r) if states is None else states.slots_rw[:, 0]
        columns = [counts_r, jnp.clip(left_r - 1, 0, num_tokens), accepted_r, slots_r]
        columns_rc = jnp.concatenate([jnp.stack(columns, axis=1), drawn_rw, is_sound_rw.astype(jnp.int32)], axis=1)
        return _RoundState(
            num_rounds=state.num_rounds + 1,
            pool=pool,
            kept=self.proposer.verified(kept, reached, VerifiedRound(proposals_rk, drawn_rw, counts_r, features)),
            reached=Reached(
                ids_r=jnp.where(counts_r > 0, jnp.take_along_axis(drawn_rw, lasts_r1, axis=1)[:, 0], reached.ids_r),
                num_done_r=reached.num_done_r + counts_r,
                has_ended_r=reached.has_ended_r | has_end_r | (counts_r == left_r),
                states=states,
            ),
            outputs_nrc=lax.dynamic_update_index_in_dim(state.outputs_nrc, columns_rc, state.num_rounds, 0),
        )


def num_pinned(positions_r: Int[Array, "R"], length: int) -> Int[Array, "R"]:
    """Return the number of proposals that a round accepts after tokens at these positions, at a pinned mean length.

    Rounds end at multiples of the length, rounded up, so the mean over a sequence is exact. The number depends only on
    the position.

    Args:
        length: thousandths of the mean tokens of a round, at least 1000.
    """
    ends_r = ((positions_r * 1000) // length + 1) * length
    return -(-ends_r // 1000) - positions_r - 1


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
    (first, num_rounds, ending_rx, rows), num_left_r, states = unpack_words(words, packing)
    dispatch = Dispatch(step, step.draft, params, draft_params, first, ending_rx, num_left_r, RowSampling(**rows))
    proposer = HeadProposer(dispatch) if step.draft.is_head else ModelProposer(dispatch)
    rounds = _Rounds(dispatch, proposer)
    ids_r = jnp.where(first["is_prev_sampled_t"], last_tokens_s[first["prev_sampled_rows_t"]], first["token_ids_t"])
    has_ended_r = ~dispatch.is_used_r | (first["is_prev_sampled_t"] & dispatch.ends(ids_r)) | (num_left_r <= 0)
    reached = Reached(ids_r, jnp.zeros_like(ids_r), has_ended_r, states)
    shape = (MAX_NUM_ROUNDS, packing.num_rows, num_columns(step.draft.num_tokens))
    pool, of_draft = pools
    state = _RoundState(
        num_rounds=jnp.int32(0),
        pool=pool,
        kept=proposer.begin(of_draft, reached),
        reached=reached,
        outputs_nrc=jnp.zeros(shape, jnp.int32),
    )
    state = lax.while_loop(
        lambda state: (state.num_rounds < num_rounds) & ~jnp.all(state.reached.has_ended_r), rounds.run, state
    )
    last_tokens_s = jnp.pad(state.reached.ids_r, (0, step.max_sample_rows - packing.num_rows))
    return (state.pool, proposer.complete(state.kept, state.reached)), last_tokens_s, state.outputs_nrc


def lower_speculation(
    spec: ProgramSpec, step: Step, geometry: Geometry, params: tuple[Params, Params]
) -> jax.stages.Lowered:
    """Trace and lower a program.

    Args:
        params: the model's and the draft's, or shapes of them.
    """
    draft = step.draft
    if draft is None:
        raise InternalError(f"{spec} requires a draft model")
    if spec.kind == "draft_copy" and not draft.is_head:
        return lower_move(spec, draft.step.layout, step.mesh)
    device, whole, of_pool = first_device(step.mesh), replicated(step.mesh), NamedSharding(step.mesh, POOL_SPEC)

    def shape(dims: tuple[int, ...], dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=whole)

    def pool_of(step: Step) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(step.layout.shape, step.layout.storage_dtype, sharding=of_pool)

    last_tokens, config = shape((step.max_sample_rows,)), draft.step.model.config
    pool: Any = pool_of(draft.step)
    if draft.is_head:
        pool = pool, abstract_states(draft)
    placed = jax.tree.map(lambda struct: struct.sharding, pool)
    if spec.kind == "draft_copy":
        copy = jax.jit(functools.partial(copy_blocks, draft), donate_argnums=0, out_shardings=placed)
        return copy.lower(pool, shape((2, spec.size)))
    if spec.kind == "draft":
        packing = forward_packing(spec.size, geometry)
        formats, words = dense_formats(config, "layers"), shape((packing.size,))
        options = compiler_options(device, formats, overlaps_sums=draft.step.overlaps_sums)
        run = functools.partial(packed_follow if draft.is_head else packed_keys, draft, packing=packing)
        jitted = jax.jit(run, donate_argnums=1, out_shardings=placed, compiler_options=options)
        if not draft.is_head:
            return jitted.lower(params[1], pool, words)
        features = shape((spec.size, len(draft.watched) * step.model.config.hidden_size), step.model.dtype)
        return jitted.lower(params[1], pool, last_tokens, words, features)
    rounds = SpeculatePacking.of(spec.size, geometry)
    of_both = (*dense_formats(step.model.config), *dense_formats(config))
    overlaps = step.overlaps_sums or draft.step.overlaps_sums
    options = compiler_options(device, of_both, overlaps_sums=overlaps)
    speculate = functools.partial(packed_speculate, step, packing=rounds)
    of_model: Any = pool_of(step)
    states, routes = step.abstract_states(geometry.num_state_slots), step.abstract_routes
    if states or routes is not None:
        of_model = StatefulPool(of_model, states, routes=routes)
    results = (jax.tree.map(lambda struct: struct.sharding, of_model), placed), whole, whole
    jitted = jax.jit(speculate, donate_argnums=2, out_shardings=results, compiler_options=options)
    return jitted.lower(*params, (of_model, pool), last_tokens, shape((rounds.size,)))


def copy_blocks(draft: DraftStep, pool: HeadPool, ids_2c: jax.Array) -> HeadPool:
    """Copy blocks of a head's pool, and the states that belong to them."""
    (keys, states_ne), (sources, destinations), layout = pool, ids_2c, draft.step.layout
    copied_ne = states_ne.at[destinations].set(states_ne[sources])
    return layout.write_blocks(keys, destinations, layout.read_blocks(keys, sources)), copied_ne
