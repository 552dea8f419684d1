"""Counts of proposals and of what became of them, under vLLM's names.

    acceptance rate     num_accepted_tokens / num_draft_tokens
    tokens of a step    1 + num_accepted_tokens / num_drafts, the draw behind them included
    of a position       num_accepted_tokens_per_pos[i] / num_drafts

The names and their meaning: https://docs.vllm.ai/en/latest/design/metrics/ and
https://github.com/vllm-project/vllm/blob/main/vllm/v1/spec_decode/metrics.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jpaged.load import Metric, counter

PER_POSITION = Metric(
    "vllm:spec_decode_num_accepted_tokens_per_pos", "Proposed tokens that were accepted, by their position."
)
"""A counter for each position, from 0, in the label `position`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationLoad:
    """What was proposed and accepted since the start.

    Attributes:
        num_accepted_tokens_per_pos: accepted proposals by their position in a draft.
    """

    num_drafts: int = counter(Metric("vllm:spec_decode_num_drafts", "Rows that were run with proposed tokens."))
    num_draft_tokens: int = counter(Metric("vllm:spec_decode_num_draft_tokens", "Tokens proposed."))
    num_accepted_tokens: int = counter(
        Metric("vllm:spec_decode_num_accepted_tokens", "Proposed tokens that were accepted.")
    )
    num_accepted_tokens_per_pos: tuple[int, ...] = field(default=(), metadata={"counter_by_position": PER_POSITION})

    @classmethod
    def total(cls, loads: Sequence[SpeculationLoad]) -> SpeculationLoad:
        """What several engines counted together; positions that one of them does not have count as 0 there."""
        width = max((len(load.num_accepted_tokens_per_pos) for load in loads), default=0)
        places = [load.num_accepted_tokens_per_pos for load in loads]
        return cls(
            num_drafts=sum(load.num_drafts for load in loads),
            num_draft_tokens=sum(load.num_draft_tokens for load in loads),
            num_accepted_tokens=sum(load.num_accepted_tokens for load in loads),
            num_accepted_tokens_per_pos=tuple(
                sum(counts[i] for counts in places if i < len(counts)) for i in range(width)
            ),
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens of those that were proposed; 0 before the first."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def mean_acceptance_len(self) -> float:
        """Tokens that a row with proposals goes on by, the draw behind them included; 1 before the first."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)


class SpeculationStats:
    """Counts; one thread does, and any thread may take a snapshot.

    Args:
        num_speculative_tokens: proposals of a row at most, and so the positions that are told apart.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._ends = [0] * (num_speculative_tokens + 1)  # drafts by how many of their tokens were accepted
        self._load = SpeculationLoad(num_accepted_tokens_per_pos=(0,) * num_speculative_tokens)

    def count(self, num_proposals: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Counts the rows of a step and makes them visible; rows without proposals are no drafts."""
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
