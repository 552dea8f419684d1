"""What is told of blocks on disk, to those who keep a directory of who holds what.

    in memory, and on disk                       Stored("disk")     when it is written, and when it comes to memory
    given up, dropped, forgotten; the disk failed    Removed("disk")    in the next steps, so many in each

Who reads along knows a block by the tokens that are told of it on the device: what disk has of earlier lives, or of
another replica, is told when it comes to memory here, and no sooner.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from jpaged.blockstore.store import BlockStore
from jpaged.engine.kv.blocks import Key
from jpaged.engine.kv.changes import Changes

_MAX_REMOVED = 1024
"""Removals that a step tells of."""


class ToldOfDisk:
    """Tells what a store holds. The engine's thread calls; the store says from any what it gives up.

    Args:
        is_in_memory: the device or host memory has a key.
    """

    def __init__(self, store: BlockStore, changes: Changes, is_in_memory: Callable[[Key], bool]) -> None:
        self._store = store
        self._changes = changes
        self._is_in_memory = is_in_memory
        self._told: set[Key] = set()
        self._lock = threading.Lock()
        self._gone: set[Key] = set()
        self._going: deque[Key] = deque()
        store.when_gone(self._note_gone)

    @property
    def is_busy(self) -> bool:
        """Something is gone, and that is not told."""
        return bool(self._gone or self._going)

    def may_hold(self, key: Key) -> None:
        """Tells that disk holds a key, if it does, and memory as well."""
        if not self._changes.is_on or key in self._told or key not in self._store or not self._is_in_memory(key):
            return
        self._told.add(key)
        if key in self._store:  # what goes from here on is noted
            self._changes.stored("disk", key)
        else:
            self._told.remove(key)

    def advance(self) -> None:
        """Tells what disk holds no longer, a step's part of it."""
        if self._gone:
            with self._lock:
                gone, self._gone = self._gone, set()
            self._going += gone
        if self._told and not (self._going or self._store.is_on):
            self._going += self._told
        for _ in range(min(_MAX_REMOVED, len(self._going))):
            key = self._going.popleft()
            if key in self._told and key not in self._store:
                self._told.remove(key)
                self._changes.removed("disk", key)

    def _note_gone(self, key: Key) -> None:
        if key in self._told:
            with self._lock:
                self._gone.add(key)
