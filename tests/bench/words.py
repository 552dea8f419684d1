"""A vocabulary of letters, and traces with known times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jpaged.bench.metrics import Trace


class Letters:
    """One token a character; ids are code points below `size`."""

    size = 128
    special_ids = frozenset({0, 1, 2})

    def encode(self, text: str) -> Sequence[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def trace_of(start_s: float, token_times_s: Sequence[float], *, prompt_len: int = 5, queue_s: float = 0.0) -> Trace:
    """A trace whose tokens came at these times, one a message."""
    trace = Trace(prompt_len, len(token_times_s), queue_s, start_s, token_times_s[0], token_times_s[-1])
    trace.itls_s.extend(b - a for a, b in itertools.pairwise(token_times_s))
    return trace
