"""Logits processors: per-row records of how logits are changed before sampling, similar to `executor.ROW_FIELDS`.

Rows without logits processors are sampled by programs that do not contain them. The token counts of a sequence are on
the device, in a slot (P of them, 1 to P) that the sequence holds while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor.record import BEYOND_TOKENS, RowField
from jpaged.engine.executor.shapes import I32

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
for _field in EDIT_FIELDS:
    _NEUTRAL[_field.name] = _field.neutral


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
