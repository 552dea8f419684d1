"""What a policy of eviction is told, and what it is asked. Owned by who asks: a tier of memory, a place a block.

    enter   a place holds a prefix from now on         freed   nobody holds it: it may be chosen
    found   a request found what these places hold     taken   somebody holds it again
    victim  which of the free ones is given up         left    what it held is gone

A tier is the device's pool, host memory or a disk; a place is a number of its own. Places that hold nothing are no
policy's: they are given away first (`free_list.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Key = bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """What a place holds: a block of a prefix.

    Attributes:
        key: what the cache knows it by, that of its KV group.
        parent: the key of the block without which nobody can use it; None where there is none.
        index: blocks in front of it in its chain.
        owner: the root of its chain, which names tenant, salt and adapter.
        times_seen: requests that computed or found it so far, in tiers that it comes from.
    """

    key: Key
    parent: Key | None
    index: int
    owner: Key
    times_seen: int = 1

    def seen(self, times_seen: int) -> Entry:
        """The same, seen so many times."""
        return self if times_seen == self.times_seen else dataclasses.replace(self, times_seen=times_seen)


class EvictionPolicy(Protocol):
    """Ranks the free places of one tier that hold prefixes. One thread asks."""

    def enter(self, place: int, entry: Entry) -> None:
        """A place that somebody holds has a prefix from now on; no other place of the tier has the same key."""
        ...

    def found(self, places: Sequence[int]) -> None:
        """A request found these, free or held, and takes them; one KV group after the other."""
        ...

    def times_seen(self, place: int) -> int:
        """Requests that computed or found what a place holds, as far as is known here."""
        ...

    def freed(self, place: int) -> None:
        """Nobody holds it any more: it may be chosen."""
        ...

    def taken(self, place: int) -> None:
        """A free one is held from now on, and no choice any more."""
        ...

    def victim(self) -> int:
        """Chooses the free place that is worth least, and takes it; there is one."""
        ...

    def left(self, place: int, *, is_evicted: bool) -> Entry:
        """What a place that is not free held is gone: for want of room, or because nobody may find it again.

        Returns:
            what it held, with the times that it was seen.
        """
        ...

    def choices(self) -> set[int]:
        """All that it may choose: `check` holds them to what is free."""
        ...
