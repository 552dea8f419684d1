"""A dispatch of speculative rounds on the device: its rows, how they run and are sampled, and the proposer protocol.

The inputs of a dispatch are packed in one buffer. Its outputs are a row of columns per round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jpaged.device.model_runner import NUM_TOKEN_COLUMNS, DecodePacking
from jpaged.device.step import DraftStep, Step, forward_packing
from jpaged.engine.executor import I32, Detail, Geometry, SamplingInputs, Speculated, StepInputs, StepOutputs
from jpaged.kernels.sampling import RowSampling
from jpaged.models.layers import Params

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Reached:
    """Progress of the rows.

    Attributes:
        ids_r: the last token of each row, whose keys are in neither pool.
        num_done_r: tokens that each row has sampled.
        has_ended_r: rows that sample no more.
        states: slots of recurrent state; None without recurrent layers.
    """

    ids_r: Int[Array, "R"]
    num_done_r: Int[Array, "R"]
    has_ended_r: Bool[Array, "R"]
    states: DraftStates | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class DraftStates:
    """Slots of recurrent state of each row: a round writes the state after each token to another slot.

    slots       4  5  6       the row's own, and those for draft tokens
    round 1     w  w  w       two tokens are accepted: 5 is the state
    slots       5  4  6
    round 2     w  w  w       reads 5

    Attributes:
        sources_r: slot that the next round reads.
        slots_rw: slots that it writes, for each token; the first one is the row's state after the last round.
    """

    sources_r: Int[Array, "R"]
    slots_rw: Int[Array, "R W"]

    def get_inputs(self, is_written_rw: Bool[Array, "R W"]) -> dict[str, jax.Array]:
        """Return the fields of a step with a row for each token of each row."""
        num_rows, width = self.slots_rw.shape
        return {
            "state_sources_s": jnp.repeat(self.sources_r, width),
            "state_slots_s": jnp.where(is_written_rw, self.slots_rw, 0).reshape(-1),
            "is_draft_s": jnp.tile(jnp.arange(width) > 0, num_rows),
        }

    def accept(self, counts_r: Int[Array, "R"]) -> DraftStates:
        """Return the slots after a round in which the rows accepted these numbers of tokens."""
        lasts_r = jnp.maximum(counts_r - 1, 0)
        states_r = jnp.take_along_axis(self.slots_rw, lasts_r[:, None], axis=1)[:, 0]
        slots_rw = self.slots_rw.at[jnp.arange(len(lasts_r)), lasts_r].set(self.slots_rw[:, 0]).at[:, 0].set(states_r)
        return DraftStates(jnp.where(counts_r > 0, states_r, self.sources_r), slots_rw)


@dataclass(frozen=True, slots=True)
class VerifiedRound:
    """Result of the verification of a round.

    Attributes:
        proposals_rk: the proposals that the model ran after each row's last token.
        drawn_rw: tokens sampled after that token and after each proposal.
        counts_r: how many of the sampled tokens the row accepts.
        features: hidden states that a head takes, `[R * W, F]`.
    """

    proposals_rk: Int[Array, "R K"]
    drawn_rw: Int[Array, "R W"]
    counts_r: Int[Array, "R"]
    features: tuple[Float[Array, "T F"], ...]


Kept = TypeVar("Kept")


class DeviceProposer(Protocol[Kept]):
    """Proposes tokens. Its state between rounds is a tree of arrays that includes its pool."""

    def begin(self, pool: Any, reached: Reached) -> Kept:
        """Return the state before the first round."""

    def propose(self, kept: Kept, reached: Reached) -> tuple[Int[Array, "R K"], Kept]:
        """Return the tokens proposed for each row, and the new state."""

    def verified(self, kept: Kept, reached: Reached, verified: VerifiedRound) -> Kept:
        """Return the state after the verification of a round.

        Args:
            reached: progress of the rows before the round.
        """

    def complete(self, kept: Kept, reached: Reached) -> Any:
        """Return the pool after the last round."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A dispatch on the device; `inputs` has the fields of `StepInputs` by name."""

    step: Step
    draft: DraftStep
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
        """Return True for each token that ends its row."""
        ending = self.ending_token_ids_rx.reshape(self.num_rows, *[1] * (ids.ndim - 1), -1)
        return jnp.any(ids[..., None] == ending, axis=-1)

    def left(self, reached: Reached) -> Int[Array, "R"]:
        """Return the number of tokens that each row may still sample."""
        return jnp.where(reached.has_ended_r, 0, self.num_left_r - reached.num_done_r)

    def starts(self, reached: Reached) -> Int[Array, "R"]:
        """Return the position of each row's last token."""
        return self.inputs["positions_t"] + reached.num_done_r

    def positions(self, reached: Reached, offsets_w: Int[Array, "W"]) -> tuple[Int[Array, "R W"], Bool[Array, "R W"]]:
        """Return positions after each row's last token, clipped to the row's blocks, and True for those within them."""
        left_r1 = self.left(reached)[:, None]
        positions_rw = self.starts(reached)[:, None] + jnp.clip(offsets_w, 0, jnp.maximum(left_r1 - 1, 0))
        return positions_rw, offsets_w < left_r1

    def rows_at(
        self, positions_rw: Int[Array, "R W"], is_written_rw: Bool[Array, "R W"], tables_gsm: Int[Array, "G S M"]
    ) -> dict[str, jax.Array]:
        """Return the inputs of a step with a row for each of W tokens of each row.

        Keys that are not to be written go to the null block.
        """
        width = positions_rw.shape[1]
        block_size, num_used = self.step.layout.block_size, self.inputs["num_rows"] * width
        tables_grm = self.tables(tables_gsm)
        blocks_grw = jnp.take_along_axis(tables_grm, (positions_rw // block_size)[None], axis=2, mode="clip")
        slots_grw = jnp.where(is_written_rw, blocks_grw * block_size + positions_rw % block_size, 0)
        positions_t = positions_rw.reshape(-1)
        indices = jnp.arange(len(positions_t) + 1)
        return {
            "positions_t": positions_t,
            "rope_lens_t": jnp.maximum(jnp.repeat(self.inputs["rope_lens_t"], width), positions_t + 1),
            "slots_gt": slots_grw.reshape(len(tables_gsm), -1),
            "query_starts_s1": jnp.minimum(indices, num_used),
            "kv_lens_s": jnp.where(indices[:-1] < num_used, positions_t + 1, 0),
            "block_tables_gsm": jnp.repeat(tables_grm, width, axis=1),
            "num_rows": num_used,
        }

    def tables(self, tables_gsm: Int[Array, "G S M"]) -> Int[Array, "G R M"]:
        """Return the block tables of the rows."""
        return tables_gsm[:, jnp.minimum(jnp.arange(self.num_rows), tables_gsm.shape[1] - 1)]

    @property
    def draft_tables_1sm(self) -> Int[Array, "1 S M"]:
        """Block tables of the draft's pool."""
        return self.inputs["block_tables_gsm"][self.draft.group][None]

    def sampling_at(self, num_before_rw: Int[Array, "R W"]) -> RowSampling:
        """Return the sampling inputs of W tokens of each row, each after `num_before_rw` sampled tokens."""
        width = num_before_rw.shape[1]
        how: RowSampling = jax.tree.map(lambda field: jnp.repeat(field, width, axis=0), self.how)
        return dataclasses.replace(how, positions_r=how.positions_r + num_before_rw.reshape(-1))

    def propose_from(
        self, hidden_re: Float[Array, "R E"], reached: Reached, offset: int | Int[Array, ""]
    ) -> Int[Array, "R"]:
        """Return the draft's proposal for a place after the rows' last tokens, sampled as the model samples there."""
        how, last_id = self.sampling_at((reached.num_done_r + offset)[:, None]), self.step.vocab_size - 1
        sampled = self.draft.step.sample(self.draft_params, hidden_re, how, Detail.TOKENS)
        return jnp.clip(sampled.token_ids_r, 0, last_id)


_NUM_COUNTS = 4
"""Columns before the sampled tokens: tokens of the round, proposals, accepted proposals, slot of the state after it."""


@dataclass(frozen=True, slots=True)
class SpeculatePacking:
    """One host buffer for all inputs of rounds of R rows. Hashable: static under jit.

    inputs of a decode | tokens that each row may still sample [R] | slots for states after draft tokens [R, K]

    Attributes:
        num_drafts: K; 0 without recurrent layers.
    """

    decode: DecodePacking
    num_drafts: int = 0

    @classmethod
    def of(cls, num_rows: int, geometry: Geometry) -> SpeculatePacking:
        """Return the packing for this number of rows."""
        num_drafts = geometry.num_speculative_tokens if geometry.state_bytes else 0
        return cls(DecodePacking(forward_packing(num_rows, geometry), num_rows), num_drafts)

    @property
    def num_rows(self) -> int:
        return self.decode.num_rows

    @property
    def size(self) -> int:
        return self.decode.size + self.num_rows * (1 + self.num_drafts)

    def pack(
        self,
        inputs: StepInputs,
        sampling: SamplingInputs,
        ending_token_ids_rx: I32,
        num_left_r: I32,
        num_rounds: int,
    ) -> I32:
        """Return the inputs in a new buffer: the device may read it after the call."""
        words = self.decode.pack(inputs, sampling, ending_token_ids_rx, num_rounds)
        slots_rk = np.zeros((self.num_rows, self.num_drafts), np.int32)
        if inputs.draft_slots_sk is not None:
            slots_sk = inputs.draft_slots_sk[: self.num_rows]
            slots_rk[: len(slots_sk)] = slots_sk
        return np.concatenate([words, num_left_r.astype(np.int32), slots_rk.reshape(-1)])

    def get_states(self, inputs: Mapping[str, jax.Array], slots: Int[Array, "N"]) -> DraftStates | None:
        """Return the slots of the rows before the first round; None without recurrent layers.

        Args:
            slots: those after draft tokens.
        """
        if not self.num_drafts:
            return None
        num_more = max(0, self.num_rows - len(inputs["state_slots_s"]))
        sources_r, own_r = (
            jnp.pad(inputs[name], (0, num_more))[: self.num_rows] for name in ("state_sources_s", "state_slots_s")
        )
        slots_rk = slots.reshape(self.num_rows, self.num_drafts)
        return DraftStates(sources_r, jnp.concatenate([own_r[:, None], slots_rk], axis=1))


def num_columns(num_draft_tokens: int) -> int:
    """Return the columns of a row's round: counts, sampled tokens, and whether each one's logits were finite."""
    return _NUM_COUNTS + 2 * (num_draft_tokens + 1)


def is_of_rounds(outputs: NDArray[np.int32]) -> bool:
    """Return True if outputs are those of rounds, `[rounds, R, C]`, and not of a sample or a decode."""
    return outputs.ndim == 3 and outputs.shape[2] > NUM_TOKEN_COLUMNS


def unpack_rounds(outputs_nrc: NDArray[np.int32]) -> StepOutputs:
    """Return the outputs of rounds on the host: each row's tokens in order, padded to the longest row."""
    counts_nr, proposed_nr, accepted_nr, state_slots_nr = np.moveaxis(outputs_nrc[..., :_NUM_COUNTS], 2, 0)
    drawn_rnw, is_sound_rnw = np.split(outputs_nrc[..., _NUM_COUNTS:].swapaxes(0, 1), 2, axis=2)
    num_tokens_r = counts_nr.sum(axis=0, dtype=np.int32)
    is_token_rnw = np.arange(drawn_rnw.shape[2]) < counts_nr.T[..., None]
    is_filled_rn = np.arange(max(1, num_tokens_r.max())) < num_tokens_r[:, None]
    token_ids_rn, is_sound_rn = np.zeros(is_filled_rn.shape, np.int32), np.ones(is_filled_rn.shape, np.bool_)
    token_ids_rn[is_filled_rn] = drawn_rnw[is_token_rnw]
    is_sound_rn[is_filled_rn] = is_sound_rnw[is_token_rnw]
    num_rounds = int(np.count_nonzero(counts_nr.any(axis=1)))
    state_slots_r = state_slots_nr[max(0, num_rounds - 1)]
    return StepOutputs(
        token_ids_rn,
        is_sound_rn,
        speculated=Speculated(num_tokens_r, proposed_nr, accepted_nr, num_rounds, state_slots_r),
    )


def unpack_words(
    words: jax.Array, packing: SpeculatePacking
) -> tuple[tuple[dict[str, jax.Array], jax.Array, jax.Array, dict[str, jax.Array]], jax.Array, DraftStates | None]:
    """Return a decode's inputs, in their order, the tokens that each row may still sample, and slots of states.

    Runs on the device.
    """
    step, (num_rounds, _), ending_rx, rows = packing.decode.unpack(words[: packing.decode.size])
    num_left_r, slots = jnp.split(words[packing.decode.size :], [packing.num_rows])
    return (step, num_rounds, ending_rx, rows), num_left_r, packing.get_states(step, slots)
