"""KV cache events of the disk tier.

    in memory, and on disk                       Stored("disk")     when it is written, and when it is loaded to memory
    evicted, removed, forgotten; disk failed     Removed("disk")    in the next steps, up to _MAX_REMOVED in each

Subscribers identify a block by the tokens in its device event. Blocks on disk from an earlier run or another replica
are therefore published only when they are loaded to memory here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from jpaged.blockstore.store import BlockStore
from jpaged.engine.kv.blocks import Key
from jpaged.engine.kv.changes import Changes

_MAX_REMOVED = 1024
"""Maximum number of removals published per step."""


class ToldOfDisk:
    """Publisher of what a store holds. The engine thread calls it; the store reports removals from any thread.

    Args:
        is_in_memory: returns True if the device or host memory has a key.
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
        """Return True if removals are not yet published."""
        return bool(self._gone or self._going)

    def may_hold(self, key: Key) -> None:
        """Publish that disk stores a key, if both disk and memory do."""
        if not self._changes.is_on or key in self._told or key not in self._store or not self._is_in_memory(key):
            return
        self._told.add(key)
        if key in self._store:  # removals from here on are recorded
            self._changes.stored("disk", key)
        else:
            self._told.remove(key)

    def advance(self) -> None:
        """Publish what disk no longer stores, up to the limit per step."""
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
