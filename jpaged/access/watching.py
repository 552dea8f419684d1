"""Files that are read again when they change: replaced, written to, or pointed to another by a link."""

from __future__ import annotations

import os
from collections.abc import Sequence

Stamp = tuple[tuple[int, int, int, int] | None, ...]


class FileWatch:
    """Tells whether any of some files has changed since it was last asked; what links point to is looked at."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._stamp = self._look()

    def has_changed(self) -> bool:
        """Look again; a file that is gone has changed, and so has one that has come back."""
        before, self._stamp = self._stamp, self._look()
        return before != self._stamp

    def _look(self) -> Stamp:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
