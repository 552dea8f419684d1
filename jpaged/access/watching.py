"""Files that are reloaded when they change: replaced, written to, or relinked.

A file may block its reader: a FIFO, or a mount whose server is gone. Looks run on daemon threads, which neither an
event loop nor the process's exit waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import threading
from collections.abc import Callable, Sequence

_LOG = logging.getLogger(__name__)
_SLOW_S = 10.0
"""A look that takes longer is logged, once."""

Stamp = tuple[tuple[int, int, int, int] | None, ...]


class FileWatch:
    """Detects changes of files between two checks; links are followed."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._stamp = self._look()

    def has_changed(self) -> bool:
        """Check again; a file that is gone or has returned counts as changed."""
        before, self._stamp = self._stamp, self._look()
        return before != self._stamp

    def expire(self) -> None:
        """Make the next check report a change."""
        self._stamp = ()

    def _look(self) -> Stamp:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def is_pipe(path: str) -> bool:
    """Return True for a FIFO, which can be read once, and blocks its next reader."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


class BackgroundLook:
    """Runs one look at a time on a daemon thread; while one is blocked, no other begins.

    Args:
        what: the option that names the files, for the log.
    """

    def __init__(self, what: str, look: Callable[[], None]) -> None:
        self._what = what
        self._look = look
        self._done: asyncio.Event | None = None
        self._began_s = 0.0
        self._is_slow = False

    async def run(self, timeout_s: float) -> None:
        """Start a look, unless one is running, and wait for its end up to the timeout."""
        loop = asyncio.get_running_loop()
        done = self._done
        if done is None or done.is_set():
            done = self._done = asyncio.Event()
            self._began_s, self._is_slow = loop.time(), False
            threading.Thread(target=self._run, args=(loop, done), name="jpaged-look", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await done.wait()
        if not done.is_set() and not self._is_slow and loop.time() - self._began_s > _SLOW_S:
            self._is_slow = True
            _LOG.error("%s: reading takes more than %g s: the previous contents stay in use", self._what, _SLOW_S)

    def _run(self, loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
        try:
            self._look()
        except Exception as error:
            _LOG.error("%s: checking for changes failed", self._what, exc_info=error)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(done.set)
