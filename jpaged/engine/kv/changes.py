"""What blocks begin and cease to hold of cached prefixes, for those who keep a directory of who holds what.

    a block fills, or its prefix comes to host memory     Stored
    it is reissued, or forgotten                          Removed

Kept from one taking to the next, which is a step's end; nothing is noted while nobody wants it.
"""

from __future__ import annotations

from typing import Protocol

from jpaged.engine.kv.blocks import Key
from jpaged.pool import Change, Removed, Stored, Tier


class ChangeSink(Protocol):
    """Who wants to know. Called on the engine's thread: what takes long is for another."""

    def publish(self, changes: list[Change]) -> bool:
        """Takes the changes of a step, in order; False where they were dropped."""
        ...

    def close(self) -> None:
        """The engine has ended; what was taken before is still told."""
        ...


class Changes:
    """Notes changes where somebody wants them, and tells them after each step.

    Attributes:
        is_on: somebody does; who calls a verb looks first, so that a request enters nothing here while nobody does.
        num_told, num_dropped: changes so far that the sink has taken, and that it had no room for.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.num_told = self.num_dropped = 0
        self._changes: list[Change] = []
        self._sink: ChangeSink | None = None

    def tell_to(self, sink: ChangeSink) -> None:
        """Notes everything from now on, for this sink; before the engine starts."""
        self._sink, self.is_on = sink, True

    def tell(self) -> None:
        """Tells what was noted since the last time."""
        if not self._changes or self._sink is None:
            return
        changes, self._changes = self._changes, []
        if self._sink.publish(changes):
            self.num_told += len(changes)
        else:
            self.num_dropped += len(changes)

    def close(self) -> None:
        """Tells what is left, for the engine has ended."""
        if self._sink is not None:
            self.tell()
            self._sink.close()

    def stored(self, tier: Tier, key: Key) -> None:
        """Notes that a tier beneath the device holds what a key, with its KV group, names."""
        self._changes.append(Stored(tier, *parted(key)))

    def filled(self, stored: Stored) -> None:
        """Notes that a block of the device holds what was computed."""
        self._changes.append(stored)

    def removed(self, tier: Tier, key: Key) -> None:
        """Notes that a tier holds what a key, with its KV group, names no longer."""
        self._changes.append(Removed(tier, *parted(key)))


def parted(key: Key) -> tuple[Key, int]:
    """A chain's own key and its KV group, of what a cache knows a block by: see `key_in_group`."""
    return (key[:-1], key[-1]) if len(key) % 2 else (key, 0)
