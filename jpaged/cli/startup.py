"""Startup messages on stderr: weights, programs, the pool, ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

PROBES = "health on "
"""Prefix of the line with the address of the health port."""

Progress = Callable[[str, int, int], None]
_INTERVAL_S = 1.0


class StartupReport:
    """Prints progress: one line that is overwritten on a terminal, at most one line per second elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._start_s = time.monotonic()
        self._last_s = float("-inf")
        self._width = 0

    def progress(self, what: str, done: int, total: int) -> None:
        """Report a step of startup; the last step of each kind is always shown."""
        now_s = time.monotonic()
        if not self._is_terminal and done < total and now_s - self._last_s < _INTERVAL_S:
            return
        self._last_s = now_s
        text = f"[{now_s - self._start_s:5.1f} s] {what}" + (f": {done} of {total}" if total > 1 else "")
        if self._is_terminal and done < total:
            self._stream.write(f"\r{text:<{self._width}}")
            self._width = len(text)
            self._stream.flush()
        else:
            self.line(text)

    def line(self, text: str) -> None:
        """Print a full line."""
        self._stream.write(f"\r{text:<{self._width}}\n" if self._width else f"{text}\n")
        self._width = 0
        self._stream.flush()
