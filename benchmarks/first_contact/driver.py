"""Runs the checks one after the other, each in a process group of its own that ends at the check's limit.

    cells.jsonl   one line per cell, written by the checks' processes; and one per check, written here
    log.txt       output of all processes; of a long one the beginning and the end
    summary.txt   both as text, written at the end

This process imports neither jax nor a check, so that no accelerator can make it hang. A check that hangs, crashes or
raises costs its own limit and nothing else: its lines stay, and the next check runs. A check that crashes is started
again within its limit, without the cells that ended. From then on one program compiles at a time, so that the cell of
the next crash is known; it is not run again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.first_contact import summary
from benchmarks.first_contact.cells import append_line

CELLS, LOG, SUMMARY = "cells.jsonl", "log.txt", "summary.txt"
_RESERVE_S = 4.0
"""Time at the end for the last kill and the summary."""
_LEAST_S = 5.0
"""A check is not started with less time."""
_KILL_S = 3.0
"""Wait for a killed process: one that waits for a driver in the kernel may not end."""
_MAX_CRASHES = 3
"""Crashes after which a check is started again."""
_MAX_LOG_BYTES = 300_000
"""Output of a process that is kept."""
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: unique, in lines and options.
        target: module and function, `package.module:function`, of (cells, size).
        limit_s: seconds after which its processes are killed.
    """

    name: str
    target: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run.

    Attributes:
        out: folder of the results.
        seconds: duration of the whole run.
        size: full or tiny.
        platform: value of JAX_PLATFORMS for the checks; None leaves the choice to jax.
    """

    out: Path
    seconds: float
    size: str = "full"
    platform: str | None = None


def run(checks: Sequence[Check], settings: Settings) -> int:
    """Run the checks in their order, and write the summary.

    Returns:
        0 if every check ended and no cell failed; 1 otherwise.
    """
    begin_s = time.monotonic()
    deadline_s = begin_s + settings.seconds - _RESERVE_S
    settings.out.mkdir(parents=True, exist_ok=True)
    for name in (CELLS, LOG, SUMMARY):
        (settings.out / name).unlink(missing_ok=True)
    cells = settings.out / CELLS
    append_line(cells, {"seconds": settings.seconds, "size": settings.size, "platform": settings.platform})
    with _exit_at_sigterm(), tempfile.TemporaryDirectory(prefix="first-contact-") as cache:
        environment = _environment(settings, cache)
        try:
            for check in checks:
                limit_s = min(check.limit_s, deadline_s - time.monotonic())
                if limit_s < min(_LEAST_S, check.limit_s):
                    append_line(cells, {"check": check.name, "status": "not run", "problem": "no time was left"})
                    continue
                append_line(cells, run_check(check, settings, limit_s, environment))
                if settings.size == "full" and (reason := _no_accelerator(cells)) is not None:
                    print(reason, flush=True)
                    break
        finally:
            read = summary.read(cells)
            text = summary.text(read, [check.name for check in checks], time.monotonic() - begin_s)
            (settings.out / SUMMARY).write_text(text)
            print(text, flush=True)
    return 1 if summary.failures(read, [check.name for check in checks]) else 0


def _no_accelerator(cells: Path) -> str | None:
    """Return why full sizes cannot run here, or None; known after the check of the device."""
    if summary.cells_of(summary.read(cells), "device").get("devices", {}).get("platform") != "cpu":
        return None
    return "jax found a CPU only; `--platform cpu` runs tiny sizes"


def run_check(check: Check, settings: Settings, limit_s: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run one check, again after each crash, and return its line: how it ended, and after how many seconds."""
    begin_s = time.monotonic()
    print(f"{check.name}: up to {limit_s:.0f} s", flush=True)
    cells, words, crashes = settings.out / CELLS, list[str](), list[str]()
    while True:
        left_s = limit_s - (time.monotonic() - begin_s)
        ending = _run_once(check, settings, left_s, words, environment)
        if ending["status"] != "crashed":
            break
        crashes.append(ending["problem"])
        if len(crashes) > _MAX_CRASHES or limit_s - (time.monotonic() - begin_s) < _LEAST_S:
            break
        skipped = _skipped(summary.read(cells), check.name)
        append_line(cells, {"check": check.name, "restarted": ending["problem"], "skipped": skipped})
        words = ["--threads", "1", "--skip", json.dumps(skipped)]
    if crashes and ending["status"] == "ended":
        ending = {"status": "crashed", "problem": f"{'; '.join(crashes)}; the other cells ran"}
    return {"check": check.name, **ending, "seconds": round(time.monotonic() - begin_s, 2)}


def _skipped(lines: Sequence[summary.Line], check: str) -> list[str]:
    """Return the cells not to run after a crash: those that ended, and those that crashed the process by themselves.

    In the first process many programs compile at once, and each may be the cause: they run again, one at a time.
    """
    ours = [line for line in lines if line.get("check") == check]
    starts = [i for i, line in enumerate(ours) if "restarted" in line]
    ended = [name for name, cell in summary.cells_of(ours, check).items() if cell["status"] in summary.ENDED_CELLS]
    if not starts:
        return ended
    last = {line["cell"]: line["status"] for line in ours[starts[-1] :] if "cell" in line}
    in_flight = {state: [name for name, status in last.items() if status == state] for state in ("begun", "compiling")}
    culprits = in_flight["begun"] or in_flight["compiling"]
    return list(dict.fromkeys([*ours[starts[-1]]["skipped"], *ended, *culprits]))


def _run_once(
    check: Check, settings: Settings, limit_s: float, more: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run the process of a check, and return how it ended."""
    words = ["--target", check.target, "--name", check.name, "--size", settings.size, *more]
    words += ["--cells", str(settings.out / CELLS), "--limit", f"{limit_s:.1f}"]
    ending: dict[str, Any] = {"status": "timed out", "problem": f"killed after {limit_s:.1f} s"}
    with (settings.out / LOG).open("ab") as log:
        log.write(f"\n===== {check.name}\n".encode())
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.first_contact.child", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                ending = _ending(process.wait(limit_s))
        finally:
            _kill(process)
    shorten(settings.out / LOG, start)
    return ending


def shorten(path: Path, start: int) -> None:
    """Cut the middle out of what a file has from a byte on, if that is too long: causes come first, and stacks last."""
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) <= start + _MAX_LOG_BYTES:
            return
        file.seek(-_MAX_LOG_BYTES // 2, os.SEEK_END)
        last = file.read()
        file.truncate(start + _MAX_LOG_BYTES // 2)
        file.seek(0, os.SEEK_END)
        file.write(b"\n[...]\n" + last)


def _ending(code: int) -> dict[str, Any]:
    if code == 0:
        return {"status": "ended"}
    if code > 0:
        return {"status": "raised", "problem": f"exit code {code}; {LOG} has the traceback"}
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return {"status": "crashed", "problem": f"signal {name}; {LOG} has the stack"}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the group of a process, also after the process itself has ended: it may have started others."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)


def _environment(settings: Settings, cache: str) -> dict[str, str]:
    """Return the environment of the checks: this repository first, and a cache of compiled programs for this run."""
    chosen = {} if settings.platform is None else {"JAX_PLATFORMS": settings.platform}
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    fixed = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "JPAGED_CACHE_DIR": cache, "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **fixed, **chosen}


@contextlib.contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the summary is written."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
