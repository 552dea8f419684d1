"""How a row's logits are changed before a token is sampled from them; records like those of `executor.ROW_FIELDS`.

Rows of requests that change nothing are sampled by programs that know nothing of this. What is counted of a sequence's
tokens lies on the device, in a slot (P of them, 1 to P) that the sequence has while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor.record import BEYOND_TOKENS, RowField
from jpaged.engine.executor.shapes import I32

NUM_SINGLES = 576
"""Tokens of a row whose logits are changed one by one at most (X)."""
ANY_TOKEN = -1
"""An edit that does not ask for the token before."""
MASK_BITS = 32
"""Tokens of a word of a mask; the lowest bit is the first."""

EDIT_FIELDS = (
    RowField("slots_r", "int32", 0),  # where the tokens of the row's sequence are counted; 0 counts nothing
    RowField("repetition_r", "float32", 1),  # logits of tokens of prompt and output: divided above 0, multiplied below
    RowField("frequency_r", "float32", 0),  # taken off for each time that a token was generated
    RowField("presence_r", "float32", 0),  # taken off once for tokens that were generated
    RowField("top_n_sigma_r", "float32", 0),  # keeps logits so many standard deviations below the largest; 0 keeps all
    RowField("typical_p_r", "float32", 1),  # keeps the tokens of most typical information with that share; 1 keeps all
)
EDIT_DTYPE = np.dtype([(field.name, field.dtype, field.width or ()) for field in EDIT_FIELDS])
_NEUTRAL = np.zeros(1, EDIT_DTYPE)
for _field in EDIT_FIELDS:
    _NEUTRAL[_field.name] = _field.neutral


SINGLE_DTYPE = np.dtype([("ids", "int32"), ("after", "int32"), ("values", "float32")])
"""A token whose logit is changed; where the sequence's last token is this one, or ANY_TOKEN; what is added to it."""
NO_SINGLE = np.array((BEYOND_TOKENS, ANY_TOKEN, 0.0), SINGLE_DTYPE)


def num_mask_words(vocab_size: int) -> int:
    """Words of a row's mask (W)."""
    return -(-vocab_size // MASK_BITS)


class CountDue(NamedTuple):
    """A sequence whose tokens are counted in a slot from now on, whatever was there.

    Attributes:
        slot: 1 to max_num_seqs.
        num_prompt: the first of the tokens, which are its prompt's.
    """

    slot: int
    token_ids: list[int]
    num_prompt: int


@dataclass(frozen=True, slots=True)
class EditInputs:
    """How the logits of each row of a sample are changed.

    Attributes:
        rows_r: of EDIT_DTYPE.
        singles_rx: of SINGLE_DTYPE, `[R, NUM_SINGLES]`; None where no row has any.
        due: what is counted before.
        mask_rw: a bit a token, set for those that may be sampled, `[R, num_mask_words]`; None lets every row have all.
    """

    rows_r: NDArray[np.void]
    singles_rx: NDArray[np.void] | None = None
    mask_rw: I32 | None = None
    due: tuple[CountDue, ...] = ()

    @classmethod
    def neutral(cls, num_rows: int) -> EditInputs:
        """Rows of which nothing is changed."""
        return cls(_NEUTRAL.repeat(num_rows))

    @property
    def words(self) -> I32:
        """The records as a program takes them, row after row."""
        return self.rows_r.view(np.int32)

    def padded(self, num_rows: int) -> EditInputs:
        """With more rows of which nothing is changed; itself where it has so many."""
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
        """For the same rows a token further, of which nothing is counted; masks let every row have all tokens."""
        return replace(self, mask_rw=None if self.mask_rw is None else np.full_like(self.mask_rw, -1), due=())

    def reordered(self, order: list[int]) -> EditInputs:
        """With the first rows in another order, `order[new] = old`."""
        whole = [*order, *range(len(order), len(self.rows_r))]
        singles_rx = None if self.singles_rx is None else self.singles_rx[whole]
        mask_rw = None if self.mask_rw is None else self.mask_rw[whole]
        return EditInputs(self.rows_r[whole], singles_rx, mask_rw, self.due)

    @property
    def single_words(self) -> I32 | None:
        """The singles as a program takes them: `[R, X, 3]`."""
        return None if self.singles_rx is None else words_of_singles(self.singles_rx)


def words_of_singles(singles_rx: NDArray[np.void]) -> I32:
    """Singles as words: `[R, X, 3]`."""
    return singles_rx.view(np.int32).reshape(*singles_rx.shape, 3)


def no_singles(num_rows: int) -> NDArray[np.void]:
    """Rows without singles, `[R, NUM_SINGLES]`."""
    return np.full((num_rows, NUM_SINGLES), NO_SINGLE, SINGLE_DTYPE)


def no_masks(num_rows: int, vocab_size: int) -> I32:
    """Masks that let every row have all tokens, `[R, num_mask_words]`."""
    return np.full((num_rows, num_mask_words(vocab_size)), -1, np.int32)
