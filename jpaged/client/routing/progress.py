"""Output of a stream so far: needed to resume on another server, and to skip repeated output. No I/O."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from jpaged.types import Generated


class Delta(Protocol):
    """Addition of a message, or an event, to a sequence."""

    @property
    def index(self) -> int: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[Any]:
        """One position for each token, with `chosen`, or none."""

    @property
    def prompt_logprobs(self) -> Sequence[Any]: ...


class _Sequence:
    """Output of one sequence so far."""

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.cumulative_logprob = 0.0
        self.has_finished = False

    def add(self, delta: Delta, has_finished: bool) -> None:
        self.token_ids.extend(delta.token_ids)
        # one by one, in the engine's order, so that the sum is identical to the last bit
        for position in delta.logprobs:
            self.cumulative_logprob += position.chosen.logprob
        self.has_finished = self.has_finished or has_finished


class Progress:
    """The collected deltas of one request, from any number of servers.

    Attributes:
        num_prompt_logprobs: prompt positions whose log-probabilities have come.
    """

    def __init__(self) -> None:
        self.num_prompt_logprobs = 0
        self._sequences: dict[int, _Sequence] = {}

    def add(self, delta: Delta, has_finished: bool) -> None:
        """Add a delta.

        Args:
            has_finished: it is the sequence's last.
        """
        self.num_prompt_logprobs += len(delta.prompt_logprobs)
        if delta.token_ids or has_finished:
            self._sequences.setdefault(delta.index, _Sequence()).add(delta, has_finished)

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, over all sequences."""
        return sum(len(one.token_ids) for one in self._sequences.values())

    def generated(self) -> tuple[Generated, ...]:
        """Return the tokens of each sequence that has begun."""
        return tuple(
            Generated(index, tuple(one.token_ids), min(0.0, one.cumulative_logprob), one.has_finished)
            for index, one in sorted(self._sequences.items())
            if one.token_ids
        )
