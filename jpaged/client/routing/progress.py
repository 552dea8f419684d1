"""What a stream has told so far: what another server needs in order to go on, and what is not told twice. No I/O."""

from __future__ import annotations

from jpaged.types import Generated, SequenceDelta


class _Sequence:
    """What has come of one sequence."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self.has_finished = False

    def add(self, delta: SequenceDelta) -> None:
        self.token_ids += delta.token_ids
        for position in delta.logprobs:  # one by one, as the engine adds them: the sum is the same to the last bit
            self.cumulative_logprob += position.chosen.logprob
        self.has_finished = self.has_finished or delta.finish is not None


class Progress:
    """The deltas of one request, whichever servers sent them.

    Attributes:
        num_prompt_logprobs: positions of the prompt that were told of.
    """

    def __init__(self) -> None:
        self.num_prompt_logprobs = 0
        self._sequences: dict[int, _Sequence] = {}

    def add(self, delta: SequenceDelta) -> None:
        """Take the next delta."""
        self.num_prompt_logprobs += len(delta.prompt_logprobs)
        if delta.token_ids or delta.finish is not None:
            self._sequences.setdefault(delta.index, _Sequence()).add(delta)

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
