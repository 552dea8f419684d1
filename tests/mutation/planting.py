"""Plants one fault at a time into a copy of the package, and sees whether the tests turn red.

Each fault is one edit of one file: what stands there is named in full, so that a fault that no longer applies is an
error and not a pass.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.forking import PYTEST, forks

ROOT = Path(__file__).resolve().parents[2]

_SUMMARY = "short test summary info"
"""What pytest puts above the names of tests that failed."""
_MARKERS = {"quick": "not long and not deep", "long": "not deep"}
_HUNG_S = 300.0
"""Tests that take so long hang, which nobody would wait for: a fault has to make them fail."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An edit, and the tests that have to notice it."""

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a fault: pytest's exit status (None, it hung), the first test that failed, and what it said.

    An error of pytest's own ends with the status of failed tests, 1, and names none.
    """

    fault: Fault
    exit_status: int | None
    failed: str | None
    message: str
    seconds: float

    @property
    def is_caught(self) -> bool:
        return self.exit_status == 1 and self.failed is not None


def first_failure(output: str) -> str | None:
    """The first test that failed, or that could not be given what it takes; None where pytest's summary names none.

    What is in front of the summary may be lines of a log, which begin with ERROR as well.
    """
    _, found, summary = output.rpartition(f" {_SUMMARY} ")
    failures = [line for line in summary.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failures[0].partition("::")[2] if found and failures else None


@dataclass(frozen=True, slots=True)
class Bed:
    """Where faults are planted.

    Attributes:
        sources: folder that a fault's path begins in.
        tests: folder of tests that is copied beside the package.
        left_out: folders of either that the tests can do without.
        words: pytest's arguments that choose the tests of a fault.
        faults: what is planted.
        suite: "quick" or "long": the tests that run, those of `make test` alone or with those of `make test-long`.
    """

    sources: str
    tests: str
    left_out: tuple[str, ...]
    words: Callable[[Fault], list[str]]
    faults: tuple[Fault, ...]
    suite: Literal["quick", "long"] = "quick"

    @property
    def no_fault(self) -> Fault:
        """An edit that changes nothing, with the tests of all faults: these have to pass."""
        first, tests = self.faults[0], {name for fault in self.faults for name in fault.tests}
        return Fault("nothing is planted", first.path, first.before, first.before, tuple(sorted(tests)))

    def faulty(self, fault: Fault) -> str:
        """The file of a fault with the fault in it."""
        text = (ROOT / self.sources / fault.path).read_text()
        if (count := text.count(fault.before)) != 1:
            raise ValueError(f"{fault.name}: {fault.path} has {count} places like the one to edit")
        return text.replace(fault.before, fault.after)

    def plant(self, fault: Fault) -> Outcome:
        """Runs the tests of a fault against a copy of the package that has it."""
        begin = time.monotonic()
        # With what Python compiled of each file: of the one that is edited it does so again.
        ignored = shutil.ignore_patterns("checkpoint", *self.left_out)
        with tempfile.TemporaryDirectory(prefix="jpaged-fault-") as folder:
            copy = Path(folder)
            for name in ("jpaged", self.tests):
                shutil.copytree(ROOT / name, copy / name, ignore=ignored)
            for name in ("tests/conftest.py", "tests/choosing.py", "pyproject.toml"):
                shutil.copy(ROOT / name, copy / name)
            (copy / self.sources / fault.path).write_text(self.faulty(fault))
            words = ["-q", "-x", "-m", _MARKERS[self.suite], "-p", "no:cacheprovider", *self.words(fault)]
            ended = forks().run(PYTEST, words, copy, _HUNG_S)
        if ended.code is None:
            return Outcome(fault, None, None, f"no end after {_HUNG_S:g} s", time.monotonic() - begin)
        failed = first_failure(ended.output)
        return Outcome(fault, ended.code, failed, failed or ended.output[-300:], time.monotonic() - begin)

    def plant_all(self, faults: Sequence[Fault]) -> int:
        """Plants each, prints what became of it, and returns 1 if one was missed."""
        num_missed = 0
        print(f"{'fault':<52} {'':<7} {'s':>5}  first failure")
        for fault in faults:
            outcome = self.plant(fault)
            num_missed += not outcome.is_caught
            mark = "caught" if outcome.is_caught else "MISSED"
            print(f"{fault.name:<52} {mark:<7} {outcome.seconds:>5.1f}  {outcome.message[:90]}", flush=True)
        print(f"{len(faults) - num_missed} of {len(faults)} faults were caught")
        return 1 if num_missed else 0
