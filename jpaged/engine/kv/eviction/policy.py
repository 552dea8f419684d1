"""Protocol of an eviction policy. The owner is a memory tier; a slot holds one block.

    enter   a slot now holds a prefix                  freed   its last reference was dropped: it may be evicted
    found   a request hit the contents of these slots  taken   it is referenced again
    victim  chooses the free slot to evict             left    its content is gone

A tier is the device pool, host memory or a disk, and numbers its slots. Empty slots are not known to a policy: they are
allocated first (`free_list.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Key = bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """Content of a slot: one block of a prefix.

    Attributes:
        key: cache key, which includes the KV group.
        parent: key of the block without which this one is unusable; None if there is none.
        index: number of blocks before it in the chain.
        owner: root hash of the chain, from tenant, salt and adapter.
        times_seen: requests that computed or hit it so far, counts of previous tiers included.
    """

    key: Key
    parent: Key | None
    index: int
    owner: Key
    times_seen: int = 1

    def seen(self, times_seen: int) -> Entry:
        """Return the entry with another hit count."""
        return self if times_seen == self.times_seen else dataclasses.replace(self, times_seen=times_seen)


class EvictionPolicy(Protocol):
    """Ranking of the free slots of one tier that hold prefixes. Used by one thread."""

    def enter(self, place: int, entry: Entry) -> None:
        """Record that a slot in use now holds a prefix; no other slot of the tier has the same key."""
        ...

    def found(self, places: Sequence[int]) -> None:
        """Record a hit on free or referenced slots, which the request acquires; listed KV group by KV group."""
        ...

    def times_seen(self, place: int) -> int:
        """Return the number of requests known to have computed or hit the content of a slot."""
        ...

    def freed(self, place: int) -> None:
        """Record that the last reference to a slot was dropped: it is a candidate."""
        ...

    def taken(self, place: int) -> None:
        """Record that a free slot is referenced again and no candidate any more."""
        ...

    def victim(self) -> int:
        """Choose and take the free slot that is worth least; there must be one."""
        ...

    def left(self, place: int, *, is_evicted: bool) -> Entry:
        """Record that the content of a slot that is not free is gone, by eviction or because it was invalidated.

        Returns:
            its entry, with the final hit count.
        """
        ...

    def choices(self) -> set[int]:
        """Return all candidates, for `check`."""
        ...
