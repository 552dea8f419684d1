"""KV cache events: changes of which cached prefixes the blocks hold.

    a block fills, or its prefix is copied to host memory     Stored
    it is reissued, or forgotten                              Removed

Events are collected until they are published at the end of a step. Without a sink nothing is recorded.

Events of a store below host memory (`ConnectorKVEvents`), for example of the tier "disk":

    in memory, and in the store                  Stored("disk")     when it is saved, and when it is loaded to memory
    evicted, removed; the store failed           Removed("disk")    in the next steps, up to _MAX_REMOVED in each

Subscribers identify a block by the tokens in its device event. Blocks that an earlier run or another replica stored are
therefore published only when they are loaded to memory here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from jpaged.engine.kv_cache.blocks import BlockHash
from jpaged.engine.kv_cache.connector import ConnectorStore
from jpaged.pool import Change, Removed, Stored, Tier


class KVEventSink(Protocol):
    """Receiver of KV cache events. The engine thread calls it, so slow work belongs on another thread."""

    def publish(self, changes: list[Change]) -> bool:
        """Accept the events of a step, in order; return False if they were dropped."""
        ...

    def close(self) -> None:
        """Stop after the engine has ended; events that were accepted before are still published."""
        ...


class KVEventRecorder:
    """Recorder of KV cache events, which are published after each step.

    Attributes:
        is_on: True if there is a sink; callers check it before they record, so that no sink costs nothing.
        num_published, num_dropped: events so far that the sink accepted, and that it dropped.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.num_published = self.num_dropped = 0
        self._changes: list[Change] = []
        self._sink: KVEventSink | None = None
        self._on_sink: Callable[[], None] | None = None

    def call_with_sink(self, callback: Callable[[], None]) -> None:
        """Call `callback` when a sink is set."""
        self._on_sink = callback

    def publish_to(self, sink: KVEventSink) -> None:
        """Record all events from now on for this sink; call it before the engine starts."""
        self._sink, self.is_on = sink, True
        if self._on_sink is not None:
            self._on_sink()
            self._on_sink = None

    def flush(self) -> None:
        """Publish the events since the last call."""
        if not self._changes or self._sink is None:
            return
        changes, self._changes = self._changes, []
        if self._sink.publish(changes):
            self.num_published += len(changes)
        else:
            self.num_dropped += len(changes)

    def close(self) -> None:
        """Publish the remaining events and close the sink, after the engine has ended."""
        if self._sink is not None:
            self.flush()
            self._sink.close()

    def stored(self, tier: Tier, key: BlockHash) -> None:
        """Record that a tier below the device stores the block of a key, which includes the KV group."""
        self._changes.append(Stored(tier, *parted(key)))

    def filled(self, stored: Stored) -> None:
        """Record that a device block holds computed tokens."""
        self._changes.append(stored)

    def removed(self, tier: Tier, key: BlockHash) -> None:
        """Record that a tier no longer stores the block of a key, which includes the KV group."""
        self._changes.append(Removed(tier, *parted(key)))


def parted(key: BlockHash) -> tuple[BlockHash, int]:
    """Return the block hash and the KV group of a cache key; the inverse of `group_block_hash`."""
    return (key[:-1], key[-1]) if len(key) % 2 else (key, 0)


_MAX_REMOVED = 1024
"""Maximum number of removals published per step."""


class ConnectorKVEvents:
    """Publisher of the keys in a store. The engine thread calls it; the store reports removals from any thread.

    Args:
        tier: name of the store in the events.
        is_in_memory: returns True if the device or host memory has a key.
    """

    def __init__(
        self, store: ConnectorStore, tier: Tier, changes: KVEventRecorder, is_in_memory: Callable[[BlockHash], bool]
    ) -> None:
        self._store = store
        self._tier = tier
        self._changes = changes
        self._is_in_memory = is_in_memory
        self._published: set[BlockHash] = set()
        self._lock = threading.Lock()
        self._gone: set[BlockHash] = set()
        self._is_reset = False
        self._going: deque[BlockHash] = deque()
        store.add_removal_listener(self._note_gone)

    @property
    def is_busy(self) -> bool:
        """Return True if removals are not yet published."""
        return bool(self._gone or self._going or self._is_reset)

    def may_hold(self, key: BlockHash) -> None:
        """Publish that the store has a key, if memory has it too."""
        if (
            not self._changes.is_on
            or key in self._published
            or not self._store.lookup(key)
            or not self._is_in_memory(key)
        ):
            return
        self._published.add(key)
        if self._store.lookup(key):  # removals from here on are recorded
            self._changes.stored(self._tier, key)
        else:
            self._published.remove(key)

    def advance(self) -> None:
        """Publish what the store no longer has, up to the limit per step."""
        if self._gone:
            with self._lock:
                gone, self._gone = self._gone, set()
            self._going += gone
        is_reset, self._is_reset = self._is_reset, False
        if self._published and (is_reset or not (self._going or self._store.is_on)):
            self._going += self._published
        for _ in range(min(_MAX_REMOVED, len(self._going))):
            key = self._going.popleft()
            if key in self._published and not self._store.lookup(key):
                self._published.remove(key)
                self._changes.removed(self._tier, key)

    def _note_gone(self, key: BlockHash | None) -> None:
        if key is None:
            self._is_reset = True
        elif key in self._published:
            with self._lock:
                self._gone.add(key)
