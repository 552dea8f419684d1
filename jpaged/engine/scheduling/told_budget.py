"""How many tokens of prompts a step may tell of."""

from __future__ import annotations

from jpaged.engine.sequence import Sequence


class ToldBudget:
    """How many more tokens of the step that is put together may be told of."""

    def __init__(self, num_told: int) -> None:
        self._num_told = self._num_left = num_told

    def begin_step(self) -> None:
        self._num_left = self._num_told

    def within(self, sequence: Sequence, num_tokens: int) -> int:
        """As many of the next tokens of a sequence as what is to be told of them leaves; they are taken off."""
        start = sequence.num_computed_tokens
        begin = max(start, sequence.told_from)
        end = min(start + num_tokens, sequence.told_end)
        if begin >= end:
            return num_tokens
        if end - begin > self._num_left:
            num_tokens = begin + self._num_left - start
        self._num_left -= min(end - begin, self._num_left)
        return num_tokens
