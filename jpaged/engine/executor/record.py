"""Field definition of per-row records."""

from __future__ import annotations

from typing import NamedTuple


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
