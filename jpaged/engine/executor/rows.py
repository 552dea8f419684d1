"""Sampling parameters of each row: one record per row."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor.edits import EditInputs
from jpaged.engine.executor.record import BEYOND_TOKENS, RowField
from jpaged.engine.executor.shapes import I32
from jpaged.types import SamplingParams

BANNED_WIDTH = 40
"""Maximum number of banned token ids of a row (X): a request's stop tokens and the model's end-of-sequence tokens."""

TOP_WIDTH = 32
"""Top log-probabilities computed per row (K): the maximum that a request or a beam search may need."""


class Detail(enum.IntEnum):
    """Outputs of a sample for each token. A higher level also serves lower ones, with the same tokens."""

    TOKENS = 0
    LOGPROBS = 1
    TOP_LOGPROBS = 2

    @classmethod
    def of(cls, params: SamplingParams) -> Detail:
        """Return the level that a request needs."""
        if params.logprobs or params.beam_width:
            return cls.TOP_LOGPROBS
        return cls.LOGPROBS if params.needs_logprobs else cls.TOKENS


ROW_FIELDS = (
    RowField("temperature_r", "float32", 0),  # 0 is greedy
    RowField("top_k_r", "int32", BEYOND_TOKENS),  # the vocabulary size or more keeps all
    RowField("top_p_r", "float32", 1),  # 1 keeps all
    RowField("min_p_r", "float32", 0),  # 0 keeps all
    RowField("seeds_r2", "uint32", 0, width=2),  # the request's 64-bit seed as (high, low) words
    RowField("sequence_indices_r", "int32", 0),  # index of the row's sequence in its request
    RowField("positions_r", "int32", 0),  # position in the sequence of the token that is sampled
    RowField("is_padding_r", "int32", 0),  # 1 for the rows after the last one that is sampled
    RowField("banned_token_ids_rx", "int32", BEYOND_TOKENS, width=BANNED_WIDTH),  # cannot be sampled
)
"""All per-row inputs of the sampler.

Records, padding, the buffer of a call and the messages to other processes are derived from it. `random_columns` and
`row_lists` fill it, and `jpaged.kernels.sampling.RowSampling` names it on devices.
"""

ROW_DTYPE = np.dtype([(field.name, field.dtype, field.width or ()) for field in ROW_FIELDS])

_NEUTRAL_ROW = np.zeros(1, ROW_DTYPE)

for _field in ROW_FIELDS:
    _NEUTRAL_ROW[_field.name] = _field.neutral


def random_columns(
    params: Sequence[SamplingParams], sequence_indices: Sequence[int], positions: Sequence[int]
) -> dict[str, Sequence[Any]]:
    """Return the fields of rows that sample at random, one entry per row; those of greedy rows stay neutral."""
    return {
        "temperature_r": [one.temperature for one in params],
        "top_k_r": [min(one.top_k, BEYOND_TOKENS) if one.top_k > 0 else BEYOND_TOKENS for one in params],
        "top_p_r": [one.top_p for one in params],
        "min_p_r": [one.min_p for one in params],
        "seeds_r2": [divmod(one.seed or 0, 1 << 32) for one in params],
        "sequence_indices_r": sequence_indices,
        "positions_r": positions,
    }


def row_lists(params: SamplingParams, eos_token_ids: frozenset[int], output_index: int) -> dict[str, Sequence[Any]]:
    """Return the non-empty list fields of one row, greedy or not; the rest of each field stays neutral."""
    if output_index < params.min_tokens:
        return {"banned_token_ids_rx": sorted(params.ending_ids(eos_token_ids))}
    return {}


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling inputs of all rows: records of `ROW_FIELDS`, never static arguments.

    Attributes:
        rows_r: elements of ROW_DTYPE.
        detail: the highest level that any row needs; the sampler has a variant for each.
        edits: logits processors; None if no row has any.
    """

    rows_r: NDArray[np.void]
    detail: Detail = Detail.TOKENS
    edits: EditInputs | None = None

    @classmethod
    def neutral(cls, num_rows: int, *, detail: Detail = Detail.TOKENS) -> SamplingInputs:
        """Return rows that sample the likeliest token."""
        return cls(_NEUTRAL_ROW.repeat(num_rows), detail)

    def padded(self, num_rows: int) -> SamplingInputs:
        """Return the inputs padded to num_rows rows, without edits; itself if it has that number."""
        if num_rows == len(self.rows_r):
            return self
        more = _NEUTRAL_ROW.repeat(num_rows - len(self.rows_r))
        more["is_padding_r"] = 1
        return SamplingInputs(np.concatenate([self.rows_r, more]), self.detail)

    def of_next_step(self) -> SamplingInputs:
        """Return the inputs of the same rows one token later, with masks that allow every token."""
        rows_r, edits = self.rows_r.copy(), self.edits
        rows_r["positions_r"] += rows_r["positions_r"] > 0  # greedy rows have position 0
        return SamplingInputs(rows_r, self.detail, None if edits is None else edits.of_next_step())

    @property
    def words(self) -> I32:
        """The same memory as a program takes it, row after row."""
        return self.rows_r.view(np.int32)

    def fill_columns(self, rows: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> None:
        """Write fields of some rows, one entry per row."""
        places = np.array(rows)
        for name, values in columns.items():
            self.rows_r[name][places] = values

    def fill_lists(self, row: int, lists: Mapping[str, Sequence[Any]]) -> None:
        """Write the first entries of list fields of one row."""
        for name, values in lists.items():
            self.rows_r[name][row, : len(values)] = values
