"""What several seeds gave: the mean, and how far they are apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean between the lowest and the highest."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        known = list(values)
        return cls(sum(known) / len(known), min(known), max(known))

    def cells(self, name: str) -> dict[str, float]:
        """Three cells of a table."""
        return dict(zip(_columns(name), (self.mean, self.low, self.high), strict=True))


def empty_cells(name: str) -> dict[str, None]:
    """The same cells of a row that has no such number."""
    return dict.fromkeys(_columns(name))


def _columns(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Spread:
    """One system over another, seed by seed: both serve the same requests as far as their traces are alike."""
    return Spread.of(ours[seed] / theirs[seed] for seed in ours)
