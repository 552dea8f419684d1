"""Keys as they are pressed, without waiting for a line."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator


@contextlib.contextmanager
def pressed() -> Iterator[Keys]:
    """Read keys one by one while the context is open; none come where standard input is no terminal."""
    if not sys.stdin.isatty():
        yield Keys(None)
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield Keys(number)
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


class Keys:
    """What was pressed."""

    def __init__(self, number: int | None) -> None:
        self._number = number

    def taken(self) -> str:
        """Return what was pressed since the last time."""
        taken = ""
        while self._number is not None and select.select([self._number], [], [], 0)[0]:
            key = os.read(self._number, 64)
            if not key:
                break
            taken += key.decode("utf-8", "replace")
        return taken
