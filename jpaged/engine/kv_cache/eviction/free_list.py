"""Free list of a memory tier: the order in which free slots are allocated.

    empty              allocated first, in the order in which they were freed
    cached prefix      in the order of the eviction policy

`lru.LeastRecentlyUsed` is the plain list, which ignores the contents of slots.

Protocol of an eviction policy. The owner is a memory tier; a slot holds one block.

    enter   a slot now holds a prefix                  freed   its last reference was dropped: it may be evicted
    found   a request hit the contents of these slots  taken   it is referenced again
    victim  chooses the free slot to evict             left    its content is gone

A tier is the device pool, host memory or a disk, and numbers its slots. Empty slots are not known to a policy: they are
allocated first (`free_list.py`).

Least recently used: the order of the free list itself, without bookkeeping.

oldest ...... newest      a table's last block is freed first: leaves of a chain are evicted before their parents
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from jpaged.errors import InternalError

BlockHash = bytes


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """Content of a slot: one block of a prefix.

    Attributes:
        key: cache key, which includes the KV group.
        parent: key of the block without which this one is unusable; None if there is none.
        index: number of blocks before it in the chain.
        owner: root hash of the chain, from tenant, salt and adapter.
        times_seen: requests that computed or hit it so far, counts of previous tiers included.
    """

    key: BlockHash
    parent: BlockHash | None
    index: int
    owner: BlockHash
    times_seen: int = 1

    def seen(self, times_seen: int) -> CachedBlock:
        """Return the entry with another hit count."""
        return self if times_seen == self.times_seen else dataclasses.replace(self, times_seen=times_seen)


class EvictionPolicy(Protocol):
    """Ranking of the free slots of one tier that hold prefixes. Used by one thread."""

    def on_insert(self, slot: int, entry: CachedBlock) -> None:
        """Record that a slot in use now holds a prefix; no other slot of the tier has the same key."""
        ...

    def on_hit(self, slots: Sequence[int]) -> None:
        """Record a hit on free or referenced slots, which the request acquires; listed KV group by KV group."""
        ...

    def times_seen(self, slot: int) -> int:
        """Return the number of requests known to have computed or hit the content of a slot."""
        ...

    def on_free(self, slot: int) -> None:
        """Record that the last reference to a slot was dropped: it is a candidate."""
        ...

    def on_acquire(self, slot: int) -> None:
        """Record that a free slot is referenced again and no candidate any more."""
        ...

    def victim(self) -> int:
        """Choose and take the free slot that is worth least; there must be one."""
        ...

    def on_remove(self, slot: int, *, is_evicted: bool) -> CachedBlock:
        """Record that the content of a slot that is not free is gone, by eviction or because it was invalidated.

        Returns:
            its entry, with the final hit count.
        """
        ...

    def candidates(self) -> set[int]:
        """Return all candidates, for `check`."""
        ...


class FreeList(Protocol):
    """Protocol of a free list. Only `BlockPool` adds and removes slots."""

    def __len__(self) -> int: ...

    def __contains__(self, slot: object, /) -> bool: ...

    def __iter__(self) -> Iterator[int]: ...

    def __setitem__(self, slot: int, nothing: None, /) -> None:
        """Add a slot that was in use."""
        ...

    def __delitem__(self, slot: int, /) -> None:
        """Remove a slot that is in use from now on."""
        ...

    def popitem(self, last: Literal[False]) -> tuple[int, None]:
        """Remove and return the next slot to allocate; the caller then reports its content as evicted."""
        ...


class RankedFreeList:
    """Free list that implements `FreeList` with an eviction policy, and reports the contents of slots to it.

    Args:
        slots: all slots of the tier, free and empty.
    """

    def __init__(self, policy: EvictionPolicy, slots: Iterable[int]) -> None:
        self._policy = policy
        self._known: set[int] = set()
        self._ranked: set[int] = set()
        self._blank: OrderedDict[int, None] = OrderedDict.fromkeys(slots)

    def __len__(self) -> int:
        return len(self._blank) + len(self._ranked)

    def __contains__(self, slot: object) -> bool:
        return slot in self._ranked or slot in self._blank

    def __iter__(self) -> Iterator[int]:
        yield from self._blank
        yield from self._ranked

    def __setitem__(self, slot: int, nothing: None) -> None:
        if slot in self._known:
            self._ranked.add(slot)
            self._policy.on_free(slot)
        else:
            self._blank[slot] = None

    def __delitem__(self, slot: int) -> None:
        if slot in self._ranked:
            self._ranked.remove(slot)
            self._policy.on_acquire(slot)
        else:
            del self._blank[slot]

    def popitem(self, last: Literal[False]) -> tuple[int, None]:
        if self._blank:
            return self._blank.popitem(last=last)
        slot = self._policy.victim()
        self._ranked.remove(slot)
        return slot, None

    # --- what places hold -------------------------------------------------------------------------------------------

    def enter(self, slot: int, entry: CachedBlock) -> None:
        """Record that a slot in use now holds a cached prefix."""
        self._known.add(slot)
        self._policy.on_insert(slot, entry)

    def found(self, slots: Sequence[int]) -> None:
        """Record a hit on these slots, which the request has already acquired; listed KV group by KV group."""
        self._policy.on_hit(slots)

    def times_seen(self, slot: int) -> int:
        """Return the number of requests that computed or hit the content of a slot."""
        return self._policy.times_seen(slot)

    def evicted(self, slot: int) -> CachedBlock:
        """Record that the content of a slot was evicted, after `popitem` returned the slot or it was removed."""
        self._known.remove(slot)
        return self._policy.on_remove(slot, is_evicted=True)

    def discard(self, slot: int) -> None:
        """Record that the content of a slot must not be found any more; a free slot becomes an empty one."""
        if slot in self._ranked:
            self._ranked.remove(slot)
            self._policy.on_acquire(slot)
            self._blank[slot] = None
        self._known.remove(slot)
        self._policy.on_remove(slot, is_evicted=False)

    def check(self, known: set[int], is_free: Callable[[int], bool]) -> None:
        """Check the list against the state of the tier.

        Args:
            known: slots that hold prefixes.

        Raises:
            InternalError: the states differ, or a slot is listed twice.
        """
        if known != self._known:
            raise InternalError(
                f"blocks {sorted(known ^ self._known)[:8]}: tier and policy disagree on whether they hold prefixes"
            )
        ranked = {slot for slot in known if is_free(slot)}
        if ranked != self._ranked:
            raise InternalError(
                f"blocks {sorted(ranked ^ self._ranked)[:8]}: tier and policy disagree on whether they are free"
            )
        if lost := self._ranked ^ self._policy.candidates():
            raise InternalError(
                f"blocks {sorted(lost)[:8]}: free list and policy disagree on whether they are eviction candidates"
            )
        if twice := self._ranked & self._blank.keys():
            raise InternalError(f"blocks {sorted(twice)[:8]} are free twice: as cached blocks and as empty ones")


class LeastRecentlyUsed(OrderedDict[int, None]):
    """Free list (`free_list.FreeList`) that allocates the block freed first, whatever it holds."""
