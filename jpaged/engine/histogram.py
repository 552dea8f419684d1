"""Counts of durations in buckets: cheap enough for every token, read as one snapshot."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Observations up to each bound, cumulative as Prometheus has them; the last count is of all."""

    bounds_s: tuple[float, ...]
    cumulative_counts: tuple[int, ...]
    sum_s: float

    @classmethod
    def total(cls, snapshots: Sequence[HistogramSnapshot]) -> HistogramSnapshot:
        """The observations of all, which have the same bounds."""
        counts = zip(*(snapshot.cumulative_counts for snapshot in snapshots), strict=True)
        return cls(snapshots[0].bounds_s, tuple(map(sum, counts)), sum(snapshot.sum_s for snapshot in snapshots))


class Histogram:
    """Seconds in buckets with these upper bounds, ascending, and one for everything above.

    One thread observes; any thread may take a snapshot, which then lacks at most what is being observed.
    """

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Adds `count` observations of the same value."""
        self._counts[bisect_left(self._bounds_s, seconds)] += count
        self._sum_s += seconds * count

    def snapshot(self) -> HistogramSnapshot:
        total, cumulative = 0, []
        for count in list(self._counts):
            total += count
            cumulative.append(total)
        return HistogramSnapshot(self._bounds_s, tuple(cumulative), self._sum_s)
