"""Which cases of the tests run: those that `thinned` leaves to the long ones, and the part that was asked for."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

import pytest


def thin(items: Iterable[pytest.Item]) -> None:
    """Mark as long all but the first and then every n-th of the cases that are quick so far, where `thinned` says so.

    An n that divides the length of a grid's axis would keep one value of that axis alone.
    """
    num_seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("thinned")
        if mark is None or item.get_closest_marker("long") or item.get_closest_marker("deep"):
            continue
        name = _function_of(item.nodeid)
        if num_seen[name] % mark.args[0]:
            item.add_marker(pytest.mark.long)
        num_seen[name] += 1


def is_long_file(path: Path) -> bool:
    """Tell whether a file marks all of its tests as long or deep: the quick suite need not import it."""
    return path.suffix == ".py" and _LONG_FILE.search(path.read_text(encoding="utf-8")) is not None


def is_long(tests: object) -> bool:
    """Tell whether a function or a class marks all of its tests as long or deep: the quick suite need not make them."""
    if not (inspect.isfunction(tests) or inspect.isclass(tests)):
        return False
    marks = getattr(tests, "pytestmark", [])
    return any(mark.name in ("long", "deep") for mark in (marks if isinstance(marks, list) else [marks]))


_LONG_FILE = re.compile(r"^pytestmark = (\[.*)?pytest\.mark\.(long|deep)\b", re.MULTILINE)


def part_of(asked: str) -> tuple[int, int]:
    """Read "K/N"; raise UsageError for anything but a part of 1 to N."""
    part, slash, num_parts = asked.partition("/")
    if not (slash and part.isdecimal() and num_parts.isdecimal() and 1 <= int(part) <= int(num_parts)):
        raise pytest.UsageError(f"--part: {asked!r} is not K/N, a part from 1 to N")
    return int(part), int(num_parts)


def is_in_part(nodeid: str, part: int, num_parts: int) -> bool:
    """Tell whether a test is in a part. The cases of one are shared out as well: some take minutes each."""
    return crc32(nodeid.encode()) % num_parts == part - 1


def _function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]
