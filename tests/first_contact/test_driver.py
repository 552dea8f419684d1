"""A run of checks with planted faults: it ends in time, and its lines name each fault."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.first_contact import driver, summary
from benchmarks.first_contact.cells import append_line
from benchmarks.first_contact.driver import CELLS, LOG, SUMMARY, Check, Settings

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
"""Limit of a check that ends by itself, on a machine that is busy."""


def planted(name: str, limit_s: float = PATIENCE_S) -> Check:
    return Check(name, f"tests.first_contact.planted:{name}", limit_s)


def run(out: Path, *checks: Check, seconds: float = 300.0) -> tuple[int, list[dict[str, Any]]]:
    code = driver.run(checks, Settings(out, seconds, "tiny", "cpu"))
    return code, summary.read(out / CELLS)


def cells_of(out: Path) -> dict[str, str]:
    """Return the status of each cell of the check that hangs."""
    return {name: cell["status"] for name, cell in summary.cells_of(summary.read(out / CELLS), "hangs").items()}


def is_alive(process_id: int) -> bool:
    """Return True if a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.long
def test_checks_that_hang_crash_or_raise_end_alone(tmp_path: Path) -> None:
    checks = [planted("hangs", 8.0), *map(planted, ("crashes", "raises", "good"))]
    code, lines = run(tmp_path, *checks)
    assert code == 1
    ends = {check.name: summary.ending_of(lines, check.name) for check in checks}
    assert {name: end["status"] for name, end in ends.items()} == {
        "hangs": "timed out",
        "crashes": "crashed",
        "raises": "raised",
        "good": "ended",
    }
    assert "SIGSEGV" in ends["crashes"]["problem"]
    states = {check.name: {n: c["status"] for n, c in summary.cells_of(lines, check.name).items()} for check in checks}
    assert states == {
        "hangs": {"first": "ok", "second": "begun", "third": "not begun"},
        "crashes": {"first": "ok", "second": "begun"},
        "raises": {"first": "ok"},
        "good": {"sum": "ok"},
    }
    assert summary.cells_of(lines, "good")["sum"]["sum"] == 2
    text = (tmp_path / SUMMARY).read_text()
    assert "hangs, second: begun and not finished" in text
    assert "hangs, third: not begun and not finished" in text
    log = (tmp_path / LOG).read_text()
    assert "OSError: planted" in log
    assert 'planted.py", line' in log.partition("crashes")[0]  # the stack of the check that hung
    assert len(list(tmp_path.iterdir())) <= 8


def test_a_check_that_crashes_continues_without_the_cell_that_did_it(tmp_path: Path) -> None:
    code, lines = run(tmp_path, planted("crashes_once"))
    states = {name: cell["status"] for name, cell in summary.cells_of(lines, "crashes_once").items()}
    assert code == 1
    assert states == {"a": "ok", "b": "ok", "c": "compiling", "d": "ok", "e": "ok", "last": "ok"}
    ending = summary.ending_of(lines, "crashes_once")
    assert ending["status"] == "crashed"
    assert ending["problem"].count("signal SIGKILL") == 2
    assert summary.failures(lines, ["crashes_once"])[1:] == ["crashes_once, c: compiling and not finished"]


def test_cells_in_flight_at_a_first_crash_run_again_and_those_at_a_later_one_do_not() -> None:
    def line(cell: str, status: str) -> dict[str, Any]:
        return {"check": "x", "cell": cell, "status": status}

    first = [line("a", "ok"), *(line(cell, "compiling") for cell in ("b", "c", "d")), line("b", "begun")]
    assert driver._skipped(first, "x") == ["a"]
    second = [*first, {"check": "x", "restarted": "", "skipped": ["a"]}, line("b", "ok"), line("c", "compiling")]
    assert driver._skipped(second, "x") == ["a", "b", "c"]
    beside = [*second[:-1], line("c", "begun"), line("d", "compiling")]
    assert driver._skipped(beside, "x") == ["a", "b", "c"]


def test_cells_that_fail_do_not_keep_others_from_running(tmp_path: Path) -> None:
    code, lines = run(tmp_path, planted("fails"))
    cells = summary.cells_of(lines, "fails")
    assert code == 1
    assert {name: cell["status"] for name, cell in cells.items()} == {
        "wrong": "wrong",
        "raises": "raised",
        "elsewhere": "not on this platform",
        "good": "ok",
    }
    assert cells["raises"]["problem"].startswith("ZeroDivisionError")
    assert len(summary.failures(lines, ["fails"])) == 2


def test_a_run_in_which_nothing_failed_exits_with_0(tmp_path: Path) -> None:
    code, lines = run(tmp_path, planted("good"))
    assert (code, summary.failures(lines, ["good"])) == (0, [])
    assert "nothing failed" in (tmp_path / SUMMARY).read_text()


def test_a_process_that_a_check_leaves_is_killed(tmp_path: Path) -> None:
    code, lines = run(tmp_path, planted("leaves_a_process"))
    assert code == 0
    process_id = summary.cells_of(lines, "leaves_a_process")["child"]["pid"]
    while is_alive(process_id):  # SIGKILL was sent, and is delivered by the kernel
        time.sleep(0.01)


@pytest.mark.long
def test_programs_that_do_not_compile_cost_only_their_cells(tmp_path: Path) -> None:
    code, lines = run(tmp_path, planted("compiles", 12.0))
    cells = summary.cells_of(lines, "compiles")
    assert code == 1
    assert {name: cells[name]["status"] for name in ("broken", "first", "second")} == {
        "broken": "raised",
        "first": "ok",
        "second": "ok",
    }
    assert cells["stuck"]["status"] in ("compiling", "begun", "raised")


def test_a_check_for_which_no_time_is_left_is_not_started(tmp_path: Path) -> None:
    code, lines = run(tmp_path, planted("good"), seconds=1.0)
    assert (code, summary.ending_of(lines, "good")["status"]) == (1, "not run")


def test_a_run_that_is_terminated_writes_its_summary(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from benchmarks.first_contact.driver import *\n"
        "check = Check('hangs', 'tests.first_contact.planted:hangs', 60)\n"
        "sys.exit(run([check], Settings(Path(sys.argv[1]), 100, 'tiny', 'cpu')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=environment) as process:
        while not (tmp_path / CELLS).exists() or cells_of(tmp_path).get("second") != "begun":
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert "hangs, second: begun and not finished" in (tmp_path / SUMMARY).read_text()


def test_a_long_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    path, size = tmp_path / "log", driver._MAX_LOG_BYTES
    path.write_bytes(b"before" + b"a" * size + b"b" * size + b"end")
    driver.shorten(path, len(b"before"))
    data = path.read_bytes()
    assert data.startswith(b"before" + b"a" * (size // 2) + b"\n[...]\nb")
    assert data.endswith(b"bend")
    assert len(data) == len(b"before\n[...]\n") + size
    driver.shorten(path, 1000)
    assert path.read_bytes() == data


def test_a_line_that_a_kill_cut_off_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"b": ')
    append_line(path, {"c": float("nan")})
    assert [list(line) for line in summary.read(path)] == [["a"], ["c"]]
    assert json.loads(path.read_text().splitlines()[0]) == {"a": 1}
