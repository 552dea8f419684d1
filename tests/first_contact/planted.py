"""Checks with planted faults: one hangs, one crashes, one raises, one is wrong, and one starts a process that stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from benchmarks.first_contact.cells import Cells, NotOnThisPlatform, Program, WrongNumbers


def good(cells: Cells, size: str) -> None:
    cells.plan(["sum"])
    cells.run("sum", lambda: {"size": size, "sum": 1 + 1})


def hangs(cells: Cells, size: str) -> None:
    cells.plan(["first", "second", "third"])
    cells.run("first", dict)
    cells.run("second", lambda: time.sleep(600))


def crashes(cells: Cells, size: str) -> None:
    cells.run("first", dict)
    cells.run("second", lambda: os.kill(os.getpid(), signal.SIGSEGV))


def crashes_once(cells: Cells, size: str) -> None:
    """Some programs compile, and one of them ends the process."""

    def crash() -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    programs = {name: Program(dict, lambda made: {}) for name in ("a", "b", "d", "e")}
    items = [*list(programs.items())[:2], ("c", Program(crash, lambda made: {})), *list(programs.items())[2:]]
    cells.run_programs(dict(items))
    cells.run("last", dict)


def raises(cells: Cells, size: str) -> None:
    cells.run("first", dict)
    raise OSError("planted")


def fails(cells: Cells, size: str) -> None:
    def wrong() -> None:
        raise WrongNumbers("0.5 from the oracle")

    def elsewhere() -> None:
        raise NotOnThisPlatform("requires a GPU")

    cells.run("wrong", wrong)
    cells.run("raises", lambda: {"never": 1 // 0})
    cells.run("elsewhere", elsewhere)
    cells.run("good", dict)


def leaves_a_process(cells: Cells, size: str) -> None:
    """Its process ignores SIGTERM, and would outlive the check."""
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", sleeper])
    cells.run("child", lambda: {"pid": child.pid})


def compiles(cells: Cells, size: str) -> None:
    """One program compiles without an end, one does not compile."""

    def ready(values: dict[str, int]) -> Program:
        return Program(lambda: values, lambda made: made)

    def never() -> None:
        time.sleep(600)

    programs = {"stuck": Program(never, lambda made: {}), "broken": Program(lambda: 1 // 0, lambda made: {})}
    cells.run_programs({**programs, "first": ready({"x": 1}), "second": ready({"x": 2})}, are_timed=True)


def is_a_cpu(cells: Cells, size: str) -> None:
    cells.run("devices", lambda: {"platform": "cpu"})
