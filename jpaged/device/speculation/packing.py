"""Inputs of a dispatch of speculative rounds in one buffer, and its outputs, a row of columns per round."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from jpaged.device.step.forward import forward_packing
from jpaged.device.step.runner import NUM_TOKEN_COLUMNS, DecodePacking
from jpaged.engine.executor import I32, Geometry, SamplingInputs, Speculated, StepInputs, StepOutputs

_NUM_COUNTS = 3
"""Columns before the sampled tokens: tokens of the round, proposals, accepted proposals."""


@dataclass(frozen=True, slots=True)
class SpeculatePacking:
    """One host buffer for all inputs of rounds of R rows. Hashable: static under jit.

    inputs of a decode | tokens that each row may still sample [R]
    """

    decode: DecodePacking

    @classmethod
    def of(cls, num_rows: int, geometry: Geometry) -> SpeculatePacking:
        """Return the packing for this number of rows."""
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
        """Return the inputs in a new buffer: the device may read it after the call."""
        words = self.decode.pack(inputs, sampling, ending_token_ids_rx, num_rounds)
        return np.concatenate([words, num_left_r.astype(np.int32)])


def num_columns(num_draft_tokens: int) -> int:
    """Return the columns of a row's round: counts, sampled tokens, and whether each one's logits were finite."""
    return _NUM_COUNTS + 2 * (num_draft_tokens + 1)


def is_of_rounds(outputs: NDArray[np.int32]) -> bool:
    """Return True if outputs are those of rounds, `[rounds, R, C]`, and not of a sample or a decode."""
    return outputs.ndim == 3 and outputs.shape[2] > NUM_TOKEN_COLUMNS


def unpack_rounds(outputs_nrc: NDArray[np.int32]) -> StepOutputs:
    """Return the outputs of rounds on the host: each row's tokens in order, padded to the longest row."""
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
    """Return a decode's inputs, in their order, and the tokens that each row may still sample; runs on the device."""
    step, (num_rounds, _), ending_rx, rows = packing.decode.unpack(words[: packing.decode.size])
    return (step, num_rounds, ending_rx, rows), words[packing.decode.size :]
