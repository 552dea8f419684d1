"""What a dispatch with proposals takes in one buffer, and what it gives, in a row of columns for each round."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from jpaged.device.step.forward import forward_packing
from jpaged.device.step.runner import NUM_TOKEN_COLUMNS, DecodePacking
from jpaged.engine.executor import I32, Geometry, SamplingInputs, Speculated, StepInputs, StepOutputs

_NUM_COUNTS = 3
"""Columns in front of the draws: tokens of the round, proposals, proposals that were accepted."""


@dataclass(frozen=True, slots=True)
class SpeculatePacking:
    """One host buffer for all that rounds of R rows take. Hashable: static under jit.

    what a decode takes | tokens that each row may still sample [R]
    """

    decode: DecodePacking

    @classmethod
    def of(cls, num_rows: int, geometry: Geometry) -> SpeculatePacking:
        """The packing for so many rows."""
        return cls(DecodePacking(forward_packing(num_rows, geometry), num_rows))

    @property
    def num_rows(self) -> int:
        return self.decode.num_rows

    @property
    def size(self) -> int:
        return self.decode.size + self.num_rows

    def pack(
        self,
        inputs: StepInputs,
        sampling: SamplingInputs,
        ending_token_ids_rx: I32,
        num_left_r: I32,
        num_rounds: int,
    ) -> I32:
        """A fresh buffer: the device may read it after the call."""
        words = self.decode.pack(inputs, sampling, ending_token_ids_rx, num_rounds)
        return np.concatenate([words, num_left_r.astype(np.int32)])


def num_columns(num_draft_tokens: int) -> int:
    """Columns of a row's round: its counts, draws, and whether each is sound."""
    return _NUM_COUNTS + 2 * (num_draft_tokens + 1)


def is_of_rounds(outputs: NDArray[np.int32]) -> bool:
    """Whether outputs are those of rounds, `[rounds, R, C]`, rather than of a sample or a decode."""
    return outputs.ndim == 3 and outputs.shape[2] > NUM_TOKEN_COLUMNS


def unpack_rounds(outputs_nrc: NDArray[np.int32]) -> StepOutputs:
    """The outputs of rounds on the host: the tokens of each row one after the other, as many as the longest has."""
    counts_nr, proposed_nr, accepted_nr = np.moveaxis(outputs_nrc[..., :_NUM_COUNTS], 2, 0)
    drawn_rnw, is_sound_rnw = np.split(outputs_nrc[..., _NUM_COUNTS:].swapaxes(0, 1), 2, axis=2)
    num_tokens_r = counts_nr.sum(axis=0, dtype=np.int32)
    is_token_rnw = np.arange(drawn_rnw.shape[2]) < counts_nr.T[..., None]
    is_filled_rn = np.arange(max(1, num_tokens_r.max())) < num_tokens_r[:, None]
    token_ids_rn, is_sound_rn = np.zeros(is_filled_rn.shape, np.int32), np.ones(is_filled_rn.shape, np.bool_)
    token_ids_rn[is_filled_rn] = drawn_rnw[is_token_rnw]
    is_sound_rn[is_filled_rn] = is_sound_rnw[is_token_rnw]
    num_rounds = int(np.count_nonzero(counts_nr.any(axis=1)))
    return StepOutputs(
        token_ids_rn, is_sound_rn, speculated=Speculated(num_tokens_r, proposed_nr, accepted_nr, num_rounds)
    )


def unpack_words(
    words: jax.Array, packing: SpeculatePacking
) -> tuple[tuple[dict[str, jax.Array], jax.Array, jax.Array, dict[str, jax.Array]], jax.Array]:
    """On the device: what a decode takes, in its order, and what each row may still sample."""
    step, (num_rounds, _), ending_rx, rows = packing.decode.unpack(words[: packing.decode.size])
    return (step, num_rounds, ending_rx, rows), words[packing.decode.size :]
