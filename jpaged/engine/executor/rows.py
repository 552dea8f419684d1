"""Sampling parameters of each row: one record per row.

Field definition of per-row records.

Logits processors: per-row records of how logits are changed before sampling, similar to `executor.ROW_FIELDS`.

Rows without logits processors are sampled by programs that do not contain them. The token counts of a sequence are on
the device, in a slot (P of them, 1 to P) that the sequence holds while it runs.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor.shapes import I32
from jpaged.types import SamplingParams


class RowField(NamedTuple):
    """One field of the record that controls how a row's next token is sampled.

    Attributes:
        dtype: a 32-bit type.
        neutral: value in padding, in rows that do not sample, and if the request does not set it.
        width: number of values per row; None for a single value without an axis.
    """

    name: str
    dtype: str
    neutral: float
    width: int | None = None


BEYOND_TOKENS = (1 << 31) - 1
"""A number greater than every token id and every count of tokens."""


NUM_SINGLES = 576
"""Maximum number of token biases of a row (X)."""
ANY_TOKEN = -1
"""Condition of a token bias that holds after any token."""
MASK_BITS = 32
"""Tokens of a mask word; the lowest bit is the first token."""

EDIT_FIELDS = (
    RowField("slots_r", "int32", 0),  # slot of the sequence's token counts; 0 counts nothing
    RowField("repetition_r", "float32", 1),  # logits of prompt and output tokens: divided if positive, else multiplied
    RowField("frequency_r", "float32", 0),  # subtracted for each time that a token was generated
    RowField("presence_r", "float32", 0),  # subtracted once from tokens that were generated
    RowField("top_n_sigma_r", "float32", 0),  # keeps logits up to this many deviations below the maximum; 0 keeps all
    RowField("typical_p_r", "float32", 1),  # keeps the most typical tokens with this total probability; 1 keeps all
)
EDIT_DTYPE = np.dtype([(field.name, field.dtype, field.width or ()) for field in EDIT_FIELDS])
_NEUTRAL = np.zeros(1, EDIT_DTYPE)
for _edit_field in EDIT_FIELDS:
    _NEUTRAL[_edit_field.name] = _edit_field.neutral


SINGLE_DTYPE = np.dtype([("ids", "int32"), ("after", "int32"), ("values", "float32")])
"""A token bias: the token, the last token after which it applies (or ANY_TOKEN), and the added value."""
NO_SINGLE = np.array((BEYOND_TOKENS, ANY_TOKEN, 0.0), SINGLE_DTYPE)


def num_mask_words(vocab_size: int) -> int:
    """Return the number of words of a row's mask (W)."""
    return -(-vocab_size // MASK_BITS)


class CountDue(NamedTuple):
    """Initialization of a count slot with the tokens of a sequence.

    Attributes:
        slot: 1 to max_num_seqs.
        num_prompt: number of prompt tokens, which come first in token_ids.
    """

    slot: int
    token_ids: list[int]
    num_prompt: int


@dataclass(frozen=True, slots=True)
class EditInputs:
    """Logits-processor inputs of the rows of a sample.

    Attributes:
        rows_r: elements of EDIT_DTYPE.
        singles_rx: elements of SINGLE_DTYPE, `[R, NUM_SINGLES]`; None if no row has any.
        due: count slots to initialize before.
        mask_rw: bitmask of the allowed tokens, `[R, num_mask_words]`; None allows every token in every row.
    """

    rows_r: NDArray[np.void]
    singles_rx: NDArray[np.void] | None = None
    mask_rw: I32 | None = None
    due: tuple[CountDue, ...] = ()

    @classmethod
    def neutral(cls, num_rows: int) -> EditInputs:
        """Return records without effect."""
        return cls(_NEUTRAL.repeat(num_rows))

    @property
    def words(self) -> I32:
        """The records as a program takes them, row after row."""
        return self.rows_r.view(np.int32)

    def padded(self, num_rows: int) -> EditInputs:
        """Return the inputs extended by rows without effect to num_rows rows; itself if it has that number."""
        num_more = num_rows - len(self.rows_r)
        if num_more == 0:
            return self
        singles_rx, mask_rw = self.singles_rx, self.mask_rw
        return EditInputs(
            np.concatenate([self.rows_r, _NEUTRAL.repeat(num_more)]),
            None if singles_rx is None else np.concatenate([singles_rx, no_singles(num_more)]),
            None if mask_rw is None else np.concatenate([mask_rw, np.full((num_more, mask_rw.shape[1]), -1, np.int32)]),
            self.due,
        )

    def of_next_step(self) -> EditInputs:
        """Return the inputs of the same rows one token later, without count slots to initialize.

        Masks allow every token.
        """
        return replace(self, mask_rw=None if self.mask_rw is None else np.full_like(self.mask_rw, -1), due=())

    def reordered(self, order: list[int]) -> EditInputs:
        """Return the inputs with the first rows reordered, `order[new] = old`."""
        whole = [*order, *range(len(order), len(self.rows_r))]
        singles_rx = None if self.singles_rx is None else self.singles_rx[whole]
        mask_rw = None if self.mask_rw is None else self.mask_rw[whole]
        return EditInputs(self.rows_r[whole], singles_rx, mask_rw, self.due)

    @property
    def single_words(self) -> I32 | None:
        """The token biases as a program takes them: `[R, X, 3]`."""
        return None if self.singles_rx is None else words_of_singles(self.singles_rx)


def words_of_singles(singles_rx: NDArray[np.void]) -> I32:
    """Return token biases as words: `[R, X, 3]`."""
    return singles_rx.view(np.int32).reshape(*singles_rx.shape, 3)


def no_singles(num_rows: int) -> NDArray[np.void]:
    """Return rows without token biases, `[R, NUM_SINGLES]`."""
    return np.full((num_rows, NUM_SINGLES), NO_SINGLE, SINGLE_DTYPE)


def no_masks(num_rows: int, vocab_size: int) -> I32:
    """Return masks that allow every token in every row, `[R, num_mask_words]`."""
    return np.full((num_rows, num_mask_words(vocab_size)), -1, np.int32)


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
