"""What a stream has told so far: what another server needs in order to go on, and what is not told twice. No I/O."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from jpaged.types import Generated


class Delta(Protocol):
    """What a message, or an event, adds to a sequence."""

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
    """What has come of one sequence."""

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.cumulative_logprob = 0.0
        self.has_finished = False

    def add(self, delta: Delta, has_finished: bool) -> None:
        self.token_ids.extend(delta.token_ids)
        for position in delta.logprobs:  # one by one, as the engine adds them: the sum is the same to the last bit
            self.cumulative_logprob += position.chosen.logprob
        self.has_finished = self.has_finished or has_finished


class Progress:
    """The deltas of one request, whichever servers sent them.

    Attributes:
        num_prompt_logprobs: positions of the prompt that were told of.
    """

    def __init__(self) -> None:
        self.num_prompt_logprobs = 0
        self._sequences: dict[int, _Sequence] = {}

    def add(self, delta: Delta, has_finished: bool) -> None:
        """Take the next delta.

        Args:
            has_finished: it is the last of its sequence.
        """
        self.num_prompt_logprobs += len(delta.prompt_logprobs)
        if delta.token_ids or has_finished:
            self._sequences.setdefault(delta.index, _Sequence()).add(delta, has_finished)

    @property
    def num_tokens(self) -> int:
        """Tokens that have come, of all sequences."""
        return sum(len(one.token_ids) for one in self._sequences.values())

    def generated(self) -> tuple[Generated, ...]:
        """What each sequence has generated, of those that have begun."""
        return tuple(
            Generated(index, tuple(one.token_ids), min(0.0, one.cumulative_logprob), one.has_finished)
            for index, one in sorted(self._sequences.items())
            if one.token_ids
        )
