"""Runs of several peers as medians, and jpaged's as ratios to them: above 1 jpaged is the faster."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.peers import OURS

BUSY_SHARE = 0.9
"""Processor time over wall time of a run below which the core was not the peer's own."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the extremes around it."""

    median: float
    least: float
    most: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Timed:
    """What a peer took for a workload, turn by turn.

    Attributes:
        wall_s: seconds by the clock.
        processor_s: seconds of processor time; nothing of a start, which may wait for the disk.
    """

    wall_s: Sequence[float]
    processor_s: Sequence[float] = ()

    @property
    def wall(self) -> Spread:
        return Spread.over(self.wall_s)

    @property
    def own_s(self) -> float:
        """Median of the processor time; by the clock where there is none."""
        return statistics.median(self.processor_s or self.wall_s)

    @property
    def is_disturbed(self) -> bool:
        """Others had the core for part of the time: then processor time says more than the clock."""
        return bool(self.processor_s) and sum(self.processor_s) < BUSY_SHARE * sum(self.wall_s)


def ratios(taken: Mapping[str, Timed], *, of_processor: bool = False) -> dict[str, float]:
    """Returns, by peer, its median over jpaged's; what has no processor time is left out there."""
    times = {name: timed.processor_s if of_processor else timed.wall_s for name, timed in taken.items()}
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    if OURS not in medians:
        return {}
    return {name: median / medians[OURS] for name, median in medians.items() if name != OURS}


def best(taken: Mapping[str, Timed]) -> str | None:
    """Returns the peer that took the least by the clock, jpaged aside; None where there is none."""
    theirs = {name: timed.wall.median for name, timed in taken.items() if name != OURS}
    return min(theirs, key=theirs.__getitem__, default=None)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a peer's greedy tokens are jpaged's.

    Attributes:
        num_sequences, num_equal: sequences, and those of the same tokens.
        num_tokens, num_before: tokens, and those before the first that differs.
    """

    num_sequences: int
    num_equal: int
    num_tokens: int
    num_before: int


def agreement(ours: Sequence[Sequence[Sequence[int]]], theirs: Sequence[Sequence[Sequence[int]]]) -> Agreement:
    """Compares outputs by job and sequence."""
    pairs = [
        (left, right) for job, other in zip(ours, theirs, strict=True) for left, right in zip(job, other, strict=True)
    ]
    return Agreement(
        len(pairs),
        sum(list(left) == list(right) for left, right in pairs),
        sum(len(left) for left, _ in pairs),
        sum(_common(left, right) for left, right in pairs),
    )


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Counts the tokens before the first difference."""
    differing = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differing, min(len(left), len(right)))
