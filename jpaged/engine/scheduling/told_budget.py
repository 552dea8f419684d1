"""Limit of the prompt tokens with aux outputs (log-probabilities or hidden states) in a step."""

from __future__ import annotations

from jpaged.engine.sequence import Sequence


class ToldBudget:
    """Number of prompt tokens with aux outputs that the current step still has room for."""

    def __init__(self, num_told: int) -> None:
        self._num_told = self._num_left = num_told

    def begin_step(self) -> None:
        self._num_left = self._num_told

    def within(self, sequence: Sequence, num_tokens: int) -> int:
        """Cap the next tokens of a sequence to the remaining budget; charge those with aux outputs to it."""
        start = sequence.num_computed_tokens
        begin = max(start, sequence.told_from)
        end = min(start + num_tokens, sequence.told_end)
        if begin >= end:
            return num_tokens
        if end - begin > self._num_left:
            num_tokens = begin + self._num_left - start
        self._num_left -= min(end - begin, self._num_left)
        return num_tokens
