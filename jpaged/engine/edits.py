"""How a row's logits are changed before a token is sampled from them; records like those of `executor.ROW_FIELDS`.

Rows of requests that change nothing are sampled by programs that know nothing of this. What is counted of a sequence's
tokens lies on the device, in a slot (P of them, 1 to P) that the sequence has while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import BEYOND_TOKENS, I32, RowField

EDITS_WIDTH = 576
"""Tokens of a row whose logits are changed one by one (X)."""
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
    RowField("edit_ids_rx", "int32", BEYOND_TOKENS, width=EDITS_WIDTH),  # tokens whose logits are changed
    RowField("edit_after_rx", "int32", ANY_TOKEN, width=EDITS_WIDTH),  # where the sequence's last token is this one
    RowField("edit_values_rx", "float32", 0, width=EDITS_WIDTH),  # by adding this; minus infinity bans
)
EDIT_DTYPE = np.dtype([(field.name, field.dtype, field.width or ()) for field in EDIT_FIELDS])
_NEUTRAL = np.zeros(1, EDIT_DTYPE)
for _field in EDIT_FIELDS:
    _NEUTRAL[_field.name] = _field.neutral


def num_mask_words(vocab_size: int) -> int:
    """Words of a row's mask (W)."""
    return -(-vocab_size // MASK_BITS)


@dataclass(frozen=True, slots=True)
class EditInputs:
    """How the logits of each row of a sample are changed.

    Attributes:
        rows_r: of EDIT_DTYPE.
        mask_rw: a bit a token, set for those that may be sampled, `[R, num_mask_words]`; None lets every row have all.
    """

    rows_r: NDArray[np.void]
    mask_rw: I32 | None = None

    @classmethod
    def neutral(cls, num_rows: int) -> EditInputs:
        """Rows of which nothing is changed."""
        return cls(_NEUTRAL.repeat(num_rows))

    @property
    def words(self) -> I32:
        """The records as a program takes them, row after row."""
        return self.rows_r.view(np.int32)

    def fill(self, row: int, values: Mapping[str, Any]) -> None:
        """Writes fields of one row; of a list its first entries."""
        for name, value in values.items():
            if isinstance(value, Sequence | np.ndarray):
                self.rows_r[name][row, : len(value)] = value
            else:
                self.rows_r[name][row] = value
