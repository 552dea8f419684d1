"""Beam search on plain lists: selects running beams and finished sequences. Blocks are forked elsewhere.

    candidates    every beam x its likeliest tokens, ranked by cumulative log-probability
    running       the best beam_width of those that do not end
    finished      those of the best beam_width candidates that end, by score = log-probability / length ** penalty

The rules and therefore the results are those of Hugging Face `generate(num_beams=...)`. They rank max(2, 1 + number of
ending tokens) * beam_width candidates. A sequence that reaches max_tokens ends like one with an ending token.

Beam search step on sequences: consumes device results, and forks and drops beams.

beams     b0 b1 b2          children   b0+x  b0+y  b2+z
tables    b0 is kept by its first child, forked for its second; b1 is released
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jpaged.engine.executor import StepOutputs
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequence import Sequence, SequenceGroup
from jpaged.types import PositionLogprobs, SamplingParams


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam continued by one token."""

    parent: int
    token_id: int
    cumulative_logprob: float
    logprobs: PositionLogprobs


def num_candidates(width: int, num_ending_ids: int) -> int:
    """Return how many candidates a search of this width ranks."""
    return max(2, 1 + num_ending_ids) * width


@dataclass(slots=True)
class Beam:
    """Generated tokens of a running beam or a finished sequence."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    cumulative_logprob: float = 0.0

    def continued(self, candidate: Candidate) -> Beam:
        return Beam(
            (*self.token_ids, candidate.token_id),
            (*self.logprobs, candidate.logprobs),
            candidate.cumulative_logprob,
        )


class BeamSearch:
    """Beam search of one request. It starts with one empty beam.

    Attributes:
        num_candidates: number of candidates ranked per step, and of top tokens required of each beam.
    """

    def __init__(self, sampling: SamplingParams, ending_ids: frozenset[int]) -> None:
        self._sampling = sampling
        self._width = sampling.beam_width or 0
        self._ending_ids = ending_ids
        self.num_candidates = num_candidates(self._width, len(ending_ids))
        self.beams: list[Beam] = [Beam()]
        self.is_done = False
        self._finished: list[Beam] = []
        self._can_improve = True

    def advance(self, tops: list[list[PositionLogprobs]]) -> list[Candidate]:
        """Advance by the likeliest tokens of every beam, best first; return the candidates that became the new beams.

        When the search is done no beam runs on, and `best` returns the results.
        """
        length = len(self.beams[0].token_ids) + 1
        is_last = length >= self._sampling.max_num_tokens
        ranked = self._rank(tops, length)
        ends = [is_last or candidate.token_id in self._ending_ids for candidate in ranked]
        running = [candidate for candidate, is_end in zip(ranked, ends, strict=True) if not is_end]
        self._keep_finished(ranked, ends)
        chosen = running[: self._width]
        self.beams = [self.beams[candidate.parent].continued(candidate) for candidate in chosen]
        self._can_improve = self._can_improve and self._may_improve(length)
        self.is_done = not self._can_improve or self._has_enough or not chosen
        return chosen

    def best(self, count: int) -> list[Beam]:
        """Return up to `count` finished sequences with the highest scores, the best first."""
        return self._finished[:count]

    def score(self, beam: Beam) -> float:
        """Return the score that ranks finished sequences."""
        return _score(beam.cumulative_logprob, len(beam.token_ids), self._sampling.length_penalty)

    @property
    def _has_enough(self) -> bool:
        return len(self._finished) == self._width and self._sampling.early_stopping is True

    def _rank(self, tops: list[list[PositionLogprobs]], length: int) -> list[Candidate]:
        may_end = length > self._sampling.min_tokens
        candidates = [
            Candidate(parent, position.chosen.token_id, beam.cumulative_logprob + position.chosen.logprob, position)
            for parent, (beam, top) in enumerate(zip(self.beams, tops, strict=True))
            for position in top
            if may_end or position.chosen.token_id not in self._ending_ids
        ]
        candidates.sort(key=lambda candidate: -candidate.cumulative_logprob)
        return candidates[: self.num_candidates]

    def _keep_finished(self, ranked: list[Candidate], ends: list[bool]) -> None:
        if not self._can_improve or self._has_enough:
            return
        for candidate, is_end in list(zip(ranked, ends, strict=True))[: self._width]:
            if is_end:
                self._finished.append(self.beams[candidate.parent].continued(candidate))
        self._finished.sort(key=lambda beam: -self.score(beam))
        del self._finished[self._width :]

    def _may_improve(self, length: int) -> bool:
        """Return True if the best running beam could still beat the worst finished one."""
        if len(self._finished) < self._width:
            return True
        if not self.beams:
            return False
        sampling = self._sampling
        looks_ahead = sampling.early_stopping == "never" and sampling.length_penalty > 0
        best_length = sampling.max_num_tokens if looks_ahead else length
        best = _score(self.beams[0].cumulative_logprob, best_length, sampling.length_penalty)
        return best > self.score(self._finished[-1])


def _score(cumulative_logprob: float, length: int, length_penalty: float) -> float:
    """Return the score that ranks a sequence; its limit if the power of the length overflows."""
    try:
        return cumulative_logprob / float(length) ** length_penalty
    except OverflowError:
        return -0.0
    except ZeroDivisionError:
        return -math.inf


def advance_beams(
    group: SequenceGroup, rows: dict[Sequence, int], outputs: StepOutputs, search: BeamSearch, scheduler: Scheduler
) -> None:
    """Rank the results of every beam's row, and replace the group's sequences by the surviving beams.

    Args:
        rows: row of each live sequence; all of them sampled a token in the step.
        outputs: results with top log-probabilities.
    """
    beams = group.live
    num_top = search.num_candidates
    tops = []
    for sequence in beams:
        sequence.discard_in_flight()
        top = outputs.position(rows[sequence], num_top).top
        tops.append([PositionLogprobs(token, top) for token in top])
    group.sampled(len(beams))
    chosen = search.advance(tops)
    if not search.is_done:
        group.continues_as(_children(beams, chosen, scheduler))


def _children(beams: list[Sequence], chosen: list[Candidate], scheduler: Scheduler) -> list[Sequence]:
    survivors = {candidate.parent for candidate in chosen}
    for i, parent in enumerate(beams):  # first, so that the forks can use their blocks
        if i not in survivors:
            scheduler.finish_beam(parent)
    heirs: set[int] = set()
    children: list[tuple[Sequence, Candidate]] = []
    for index, candidate in enumerate(chosen):
        parent = beams[candidate.parent]
        child = scheduler.fork(parent, index) if candidate.parent in heirs else parent
        heirs.add(candidate.parent)
        children.append((child, candidate))
    for index, (child, candidate) in enumerate(children):
        child.replace_as_beam(index, candidate.token_id, candidate.cumulative_logprob)
    return [child for child, _ in children]
