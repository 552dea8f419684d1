"""Free list of a memory tier: the order in which free slots are allocated.

    empty              allocated first, in the order in which they were freed
    cached prefix      in the order of the eviction policy

`lru.LeastRecentlyUsed` is the plain list, which ignores the contents of slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, Protocol

from jpaged.engine.kv.eviction.policy import Entry, EvictionPolicy
from jpaged.errors import InternalError


class FreeList(Protocol):
    """Protocol of a free list. Only `BlockPool` adds and removes slots."""

    def __len__(self) -> int: ...

    def __contains__(self, place: object, /) -> bool: ...

    def __iter__(self) -> Iterator[int]: ...

    def __setitem__(self, place: int, nothing: None, /) -> None:
        """Add a slot that was in use."""
        ...

    def __delitem__(self, place: int, /) -> None:
        """Remove a slot that is in use from now on."""
        ...

    def popitem(self, last: Literal[False]) -> tuple[int, None]:
        """Remove and return the next slot to allocate; the caller then reports its content as evicted."""
        ...


class RankedFreeList:
    """Free list that implements `FreeList` with an eviction policy, and reports the contents of slots to it.

    Args:
        places: all slots of the tier, free and empty.
    """

    def __init__(self, policy: EvictionPolicy, places: Iterable[int]) -> None:
        self._policy = policy
        self._known: set[int] = set()
        self._ranked: set[int] = set()
        self._blank: OrderedDict[int, None] = OrderedDict.fromkeys(places)

    def __len__(self) -> int:
        return len(self._blank) + len(self._ranked)

    def __contains__(self, place: object) -> bool:
        return place in self._ranked or place in self._blank

    def __iter__(self) -> Iterator[int]:
        yield from self._blank
        yield from self._ranked

    def __setitem__(self, place: int, nothing: None) -> None:
        if place in self._known:
            self._ranked.add(place)
            self._policy.freed(place)
        else:
            self._blank[place] = None

    def __delitem__(self, place: int) -> None:
        if place in self._ranked:
            self._ranked.remove(place)
            self._policy.taken(place)
        else:
            del self._blank[place]

    def popitem(self, last: Literal[False]) -> tuple[int, None]:
        if self._blank:
            return self._blank.popitem(last=last)
        place = self._policy.victim()
        self._ranked.remove(place)
        return place, None

    # --- what places hold -------------------------------------------------------------------------------------------

    def enter(self, place: int, entry: Entry) -> None:
        """Record that a slot in use now holds a cached prefix."""
        self._known.add(place)
        self._policy.enter(place, entry)

    def found(self, places: Sequence[int]) -> None:
        """Record a hit on these slots, which the request has already acquired; listed KV group by KV group."""
        self._policy.found(places)

    def times_seen(self, place: int) -> int:
        """Return the number of requests that computed or hit the content of a slot."""
        return self._policy.times_seen(place)

    def evicted(self, place: int) -> Entry:
        """Record that the content of a slot was evicted, after `popitem` returned the slot or it was removed."""
        self._known.remove(place)
        return self._policy.left(place, is_evicted=True)

    def forget(self, place: int) -> None:
        """Record that the content of a slot must not be found any more; a free slot becomes an empty one."""
        if place in self._ranked:
            self._ranked.remove(place)
            self._policy.taken(place)
            self._blank[place] = None
        self._known.remove(place)
        self._policy.left(place, is_evicted=False)

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
        ranked = {place for place in known if is_free(place)}
        if ranked != self._ranked:
            raise InternalError(
                f"blocks {sorted(ranked ^ self._ranked)[:8]}: tier and policy disagree on whether they are free"
            )
        if lost := self._ranked ^ self._policy.choices():
            raise InternalError(
                f"blocks {sorted(lost)[:8]}: free list and policy disagree on whether they are eviction candidates"
            )
        if twice := self._ranked & self._blank.keys():
            raise InternalError(f"blocks {sorted(twice)[:8]} are free twice: as cached blocks and as empty ones")
