"""KV cache events: changes of which cached prefixes the blocks hold.

    a block fills, or its prefix is copied to host memory     Stored
    it is reissued, or forgotten                              Removed

Events are collected until they are published at the end of a step. Without a sink nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from jpaged.engine.kv_cache.blocks import BlockHash
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
