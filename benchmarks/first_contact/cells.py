"""The lines of a check's cells, and programs that compile on threads while others run.

    {"check": "mosaic", "planned": ["decode bfloat16", ...]}                        before the first
    {"check": "mosaic", "cell": "decode bfloat16", "status": "compiling"}           then begun
    {"check": "mosaic", "cell": "decode bfloat16", "status": "ok", "cell_s": ...}  or wrong, raised, ...

Every line is one write to a file opened for appending, so that a crash or a kill loses no line.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

MAX_COMPILING = 8
"""Programs that compile at once."""
COMPILE_SHARE = 0.6
"""Share of a check's limit after which programs that compiled are timed, although others still compile."""
_MAX_PROBLEM = 1000

Values = Mapping[str, Any]


class WrongNumbers(Exception):
    """A result differs from the expected one; the text has the largest difference."""


class NotOnThisPlatform(Exception):
    """A cell requires another platform; the text names it."""


@dataclass(frozen=True, slots=True)
class Program:
    """A cell that compiles a program and runs it.

    Attributes:
        compile: runs on a thread and returns the program.
        run: runs on the main thread with the program, and returns the values of the line.
    """

    compile: Callable[[], Any]
    run: Callable[[Any], Values]


@dataclass(slots=True)
class Cells:
    """Writes the lines of one check.

    Attributes:
        check: the check's name.
        path: the file of all lines.
        limit_s: seconds of the check.
        skipped: cells that are not run.
        num_threads: programs that compile at once.
    """

    check: str
    path: Path
    limit_s: float
    skipped: Collection[str] = ()
    num_threads: int = MAX_COMPILING
    _begin_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until the check is killed."""
        return self.limit_s - (time.monotonic() - self._begin_s)

    def plan(self, names: Sequence[str]) -> None:
        """Name the cells before the first begins, so that missing ones are noticed."""
        self.write(planned=list(names))

    def run(self, name: str, act: Callable[[], Values | None], *, is_needed: bool = False) -> Values | None:
        """Run a cell and write its lines. An exception ends the cell, and not the check.

        Args:
            name: unique in the check.
            act: returns the values of the line.
            is_needed: later cells need it: it runs even if it is skipped.

        Returns:
            the values; None if the cell has none, is skipped, or failed.
        """
        if name in self.skipped and not is_needed:
            return None
        self.write(cell=name, status="begun")
        begin_s = time.monotonic()
        values: Values | None = None
        try:
            values = act()
            ending: dict[str, Any] = {"status": "ok"}
        except NotOnThisPlatform as error:
            ending = {"status": "not on this platform", "problem": str(error)}
        except WrongNumbers as error:
            ending = {"status": "wrong", "problem": str(error)[:_MAX_PROBLEM]}
        except Exception as error:  # any: the next cell runs
            traceback.print_exc()
            ending = {"status": "raised", "problem": f"{type(error).__name__}: {error}"[:_MAX_PROBLEM]}
        self.write(**{**(values or {}), "cell": name, **ending, "cell_s": round(time.monotonic() - begin_s, 3)})
        return values

    def run_programs(self, programs: Mapping[str, Program], *, are_timed: bool = False) -> None:
        """Compile programs on threads, and run each when it is ready; cells fail by themselves.

        Args:
            are_timed: run them after all have compiled, or after `COMPILE_SHARE` of the limit: a compiler would
                disturb the times.
        """
        self.plan(list(programs))
        pool = ThreadPoolExecutor(self.num_threads)
        names: dict[Future[tuple[Any, float]], str] = {
            pool.submit(self._compile, name, program): name
            for name, program in programs.items()
            if name not in self.skipped
        }
        if are_timed:
            done, late = wait_for(names, timeout=max(0.0, self.left_s - (1 - COMPILE_SHARE) * self.limit_s))
            ready: Iterator[Future[tuple[Any, float]]] = chain(
                (one for one in names if one in done), as_completed(late)
            )
        else:
            ready = as_completed(names)
        for compiled in ready:
            self.run(names[compiled], functools.partial(self._run, programs[names[compiled]], compiled))
        pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, name: str, program: Program) -> tuple[Any, float]:
        self.write(cell=name, status="compiling")
        begin_s = time.monotonic()
        return program.compile(), time.monotonic() - begin_s

    def _run(self, program: Program, compiled: Future[tuple[Any, float]]) -> Values:
        made, compile_s = compiled.result()
        return {"compile_s": round(compile_s, 2), **program.run(made)}

    def write(self, **values: Any) -> None:
        """Write one line of this check."""
        append_line(self.path, {"check": self.check, **values})


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Append one line of JSON in one write, after the end of a line that a killed process may have left open."""
    line = json.dumps(dict(values), default=str) + "\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        is_open = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, (("\n" if is_open else "") + line).encode())
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
