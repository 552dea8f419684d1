"""One finding of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "off", "warn", "stop"]
"""ok; off: an optional part is missing; warn: the server works with limitations; stop: the server cannot start."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a check, and its consequence.

    Attributes:
        group: heading of the section.
        note: consequence if not ok: what does not work, and why.
        remedy: a command or an action; empty if none.
    """

    group: str
    name: str
    state: State
    value: str
    note: str = ""
    remedy: str = ""


def in_bytes(count: float) -> str:
    """Format a number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
