"""What came of the requests of each load."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.soak.cases import Case, Texts

EQUAL, WRONG, RESUMED, BROKEN = "equal", "wrong", "resumed", "broken"
CANCELLED, LATE = "cancelled", "late"
COLUMNS = (EQUAL, RESUMED, BROKEN, CANCELLED, LATE, WRONG)


@dataclass(slots=True)
class Tally:
    """Counts by load.

    Attributes:
        limit: requests in all; loads end when so many have ended.
        wrong: what was answered otherwise than it should be, for the report.
    """

    limit: int
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    num_done: int = 0
    num_characters: int = 0

    @property
    def is_over(self) -> bool:
        """All requests that were to be made have ended."""
        return self.num_done >= self.limit

    def note(self, load: str, what: str) -> None:
        """Count what happened to a request of a load."""
        self.counts.setdefault(load, Counter())[what] += 1

    def done(self, load: str, what: str) -> None:
        """Count how a request ended."""
        self.note(load, what)
        self.num_done += 1

    def answered(self, load: str, case: Case, expected: Texts, texts: Texts) -> None:
        """Compare what a request was answered with."""
        self.num_characters += sum(map(len, texts))
        if texts == expected:
            self.done(load, EQUAL)
            return
        self.done(load, WRONG)
        self.wrong.append(f"{load}: {case.sampling} answered {texts!r}, not {expected!r}")

    def lines(self) -> list[str]:
        """A table of it."""
        rows = [("load", *COLUMNS)]
        rows += [(name, *(str(counts[what]) for what in COLUMNS)) for name, counts in sorted(self.counts.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
