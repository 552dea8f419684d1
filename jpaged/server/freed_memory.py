"""Memory that large requests took, given back to the system.

A message of a MiB can become a hundred when it is read, in pieces of 32 KiB between others that stay. The C library
keeps them when they are free, and would for ever.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

LARGE_BYTES = 128 << 10
"""Messages from here on are cleaned up after."""
_DELAY_S = 1.0
"""Requests that come together are cleaned up after together, and by then most have ended."""


class FreedMemory:
    """Gives back what is free, on a thread, a while after a large message. Lives on one event loop.

    Args:
        give_back: does it; the C library's own when left out.
    """

    def __init__(self, give_back: Callable[[], object] | None = None) -> None:
        self._give_back = give_back or _trim
        self._is_due = False
        self._giving_back: asyncio.Future[object] | None = None

    def note(self, num_bytes: int) -> None:
        """A message of this size has come."""
        if num_bytes >= LARGE_BYTES and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_DELAY_S, self._start)

    def _start(self) -> None:
        self._is_due = False
        self._giving_back = asyncio.get_running_loop().run_in_executor(None, self._give_back)


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; it runs without the GIL
    if trim is not None:
        trim(0)
