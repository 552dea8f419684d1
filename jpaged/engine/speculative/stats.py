"""Counters of drafts and their acceptance."""

from __future__ import annotations

from collections.abc import Sequence

from jpaged.server_load import SpeculationLoad


class SpeculationStats:
    """Counters written by one thread; any thread may take a snapshot.

    Args:
        num_speculative_tokens: maximum number of draft tokens per row, and of positions counted separately.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._ends = [0] * (num_speculative_tokens + 1)  # drafts by number of accepted tokens
        self._load = SpeculationLoad(num_accepted_tokens_per_pos=(0,) * num_speculative_tokens)

    def count(self, num_proposals: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Count the rows of a step and update the snapshot; rows without draft tokens are ignored."""
        for proposed, accepted in zip(num_proposals, num_accepted, strict=True):
            if proposed:
                self._num_drafts += 1
                self._num_draft_tokens += proposed
                self._ends[accepted] += 1
        at_least, per_position = 0, []
        for ends in reversed(self._ends[1:]):
            at_least += ends
            per_position.append(at_least)
        self._load = SpeculationLoad(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(per_position),
            num_accepted_tokens_per_pos=tuple(reversed(per_position)),
        )

    def snapshot(self) -> SpeculationLoad:
        return self._load
