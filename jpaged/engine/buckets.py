"""The finite list of shapes: every program that serves is compiled for one of them, before the first request.

Two axes only. The forward is compiled for a number of packed tokens (T), the sampler for a number of rows (R); block
tables and row arrays have one fixed size. Powers of two keep the padding below half and the list short.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

MIN_BUCKET = 8
"""Smallest shape. Never fewer rows: a bf16 matrix product with one row is 10 times slower than with two on CPU."""


@dataclass(frozen=True, slots=True)
class BucketTable:
    """Sizes that were compiled, ascending; a step is padded to the smallest that holds it."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def build(cls, *, max_num_batched_tokens: int, max_num_seqs: int) -> BucketTable:
        return cls(tokens=_powers_of_two_up_to(max_num_batched_tokens), rows=_powers_of_two_up_to(max_num_seqs))

    def num_tokens(self, n: int) -> int:
        """The bucket for n packed tokens."""
        return self.tokens[bisect_left(self.tokens, n)]

    def num_rows(self, n: int) -> int:
        """The bucket for n rows."""
        return self.rows[bisect_left(self.rows, n)]

    def __str__(self) -> str:
        return f"tokens {', '.join(map(str, self.tokens))}; rows {', '.join(map(str, self.rows))}"


def _powers_of_two_up_to(limit: int) -> tuple[int, ...]:
    """8, 16, ... and the limit itself, which need not be a power of two; at least MIN_BUCKET."""
    sizes = []
    size = MIN_BUCKET
    while size < limit:
        sizes.append(size)
        size *= 2
    return (*sizes, max(limit, MIN_BUCKET))
