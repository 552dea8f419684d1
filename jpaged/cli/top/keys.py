"""Single key presses, without waiting for a line."""

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
    """Read single keys while the context is open; none if standard input is not a terminal."""
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
    """Pressed keys."""

    def __init__(self, number: int | None) -> None:
        self._number = number

    def taken(self) -> str:
        """Return the keys pressed since the last call."""
        taken = ""
        while self._number is not None and select.select([self._number], [], [], 0)[0]:
            key = os.read(self._number, 64)
            if not key:
                break
            taken += key.decode("utf-8", "replace")
        return taken
