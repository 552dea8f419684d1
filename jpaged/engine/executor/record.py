"""What a field of a row's record is."""

from __future__ import annotations

from typing import NamedTuple


class RowField(NamedTuple):
    """One entry of the record that says how a row's next token is sampled.

    Attributes:
        dtype: of 32 bits.
        neutral: what it holds in padding, in rows that sample nothing, and where the request does not ask for it.
        width: how many of them a row has; None is one, without an axis.
    """

    name: str
    dtype: str
    neutral: float
    width: int | None = None


BEYOND_TOKENS = (1 << 31) - 1
"""A number above every token id and every count of tokens."""
