"""The results as text: how each check ended, what failed, and what the cells measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]

_MARKS = {"ok": "ok", "wrong": "WRONG", "raised": "RAISED", "not on this platform": "n/a"}
_FAILED_CELLS = ("wrong", "raised")
ENDED_CELLS = ("ok", "not on this platform", *_FAILED_CELLS)
_UNFINISHED_CELLS = ("not begun", "compiling", "begun")
_OF_EVERY_LINE = ("check", "cell", "status", "problem")
_MAX_PROBLEM = 300


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, without those that a crash cut off."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def cells_of(lines: Sequence[Line], check: str) -> dict[str, Line]:
    """Return the last line of each cell of a check; a planned cell without a line has the status `not begun`."""
    ours = [line for line in lines if line.get("check") == check]
    planned = [name for line in ours for name in line.get("planned", ())]
    cells: dict[str, Line] = {name: {"cell": name, "status": "not begun"} for name in planned}
    cells.update({line["cell"]: line for line in ours if "cell" in line})
    return cells


def ending_of(lines: Sequence[Line], check: str) -> Line:
    """Return the line of a check itself."""
    ends = [line for line in lines if line.get("check") == check and "cell" not in line and "status" in line]
    return ends[-1] if ends else {"status": "not run", "problem": "the run ended before it"}


def failures(lines: Sequence[Line], checks: Sequence[str]) -> list[str]:
    """Return one text for each check that did not end, and each cell that failed or is missing."""
    found = []
    for check in checks:
        ending, cells = ending_of(lines, check), cells_of(lines, check)
        if ending["status"] != "ended":
            found.append(f"{check}: {ending['status']}, {ending.get('problem', '')}")
        for name, cell in cells.items():
            status = cell["status"]
            if status in _FAILED_CELLS:
                found.append(f"{check}, {name}: {status}, {str(cell.get('problem', ''))[:_MAX_PROBLEM]}")
            elif status in _UNFINISHED_CELLS:
                found.append(f"{check}, {name}: {status} and not finished")
    return found


def text(lines: Sequence[Line], checks: Sequence[str], seconds: float) -> str:
    """Return the summary: a line per check, the failures, and the cells with their values."""
    parts = [f"{'check':<12} {'status':<10} {'seconds':>8}  cells"]
    for check in checks:
        ending, cells = ending_of(lines, check), cells_of(lines, check)
        counts: dict[str, int] = {}
        for cell in cells.values():
            counts[cell["status"]] = counts.get(cell["status"], 0) + 1
        counted = ", ".join(f"{number} {status}" for status, number in counts.items())
        parts.append(f"{check:<12} {ending['status']:<10} {ending.get('seconds', 0):>8.1f}  {counted}")
    failed = failures(lines, checks)
    parts += ["", f"{len(failed)} failures" if failed else "nothing failed", *(f"  {line}" for line in failed), ""]
    for check in checks:
        for name, cell in cells_of(lines, check).items():
            values = {key: value for key, value in cell.items() if key not in _OF_EVERY_LINE}
            shown = " ".join(f"{key}={_short(value)}" for key, value in values.items())
            parts.append(f"{check}, {name}: {_MARKS.get(cell['status'], cell['status'])} {shown}".rstrip())
    return "\n".join([*parts, f"{seconds:.0f} s in total"]) + "\n"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
