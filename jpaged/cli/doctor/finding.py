"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "off", "warn", "stop"]
"""ok; off: something optional that is not there; warn: served all the same, but see; stop: nothing is served."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, and what follows.

    Attributes:
        group: under which heading it is shown.
        note: what it means where it is not ok: what does not work, why.
        remedy: a command, or what to do; empty where there is nothing to do.
    """

    group: str
    name: str
    state: State
    value: str
    note: str = ""
    remedy: str = ""


def in_bytes(count: float) -> str:
    """A number of bytes as people read it."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
