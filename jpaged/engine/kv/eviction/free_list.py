"""The free list of a tier of memory: in which order free places are given away.

    holds nothing      given away first, the first freed first
    holds a prefix     as a policy says

`lru.LeastRecentlyUsed` is the plain one, which knows nothing of what places hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, Protocol

from jpaged.engine.kv.eviction.policy import Entry, EvictionPolicy
from jpaged.errors import InternalError


class FreeList(Protocol):
    """What `BlockPool` asks, which alone adds and removes."""

    def __len__(self) -> int: ...

    def __contains__(self, place: object, /) -> bool: ...

    def __iter__(self) -> Iterator[int]: ...

    def __setitem__(self, place: int, nothing: None, /) -> None:
        """Adds a place that somebody held."""
        ...

    def __delitem__(self, place: int, /) -> None:
        """Removes a place, which somebody holds from now on."""
        ...

    def popitem(self, last: Literal[False]) -> tuple[int, None]:
        """Removes and returns the place that goes first; what it held is gone when somebody says so."""
        ...


class RankedFreeList:
    """Implements `FreeList` by a policy, which it tells what places hold.

    Args:
        places: all of the tier, free and holding nothing.
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
        """A place that is not free holds a prefix from now on."""
        self._known.add(place)
        self._policy.enter(place, entry)

    def found(self, places: Sequence[int]) -> None:
        """A request has found these and holds them by now; one KV group after the other."""
        self._policy.found(places)

    def times_seen(self, place: int) -> int:
        """Requests that computed or found what a place holds."""
        return self._policy.times_seen(place)

    def evicted(self, place: int) -> Entry:
        """What a place held is gone, which `popitem` has just returned, or that is held for another reason."""
        self._known.remove(place)
        return self._policy.left(place, is_evicted=True)

    def forget(self, place: int) -> None:
        """What a place held may not be found any more; if it is free it is one that holds nothing."""
        if place in self._ranked:
            self._ranked.remove(place)
            self._policy.taken(place)
            self._blank[place] = None
        self._known.remove(place)
        self._policy.left(place, is_evicted=False)

    def check(self, known: set[int], is_free: Callable[[int], bool]) -> None:
        """Holds it to what a tier knows.

        Args:
            known: places that hold prefixes.

        Raises:
            InternalError: it was told otherwise, or lists a place twice.
        """
        if known != self._known:
            raise InternalError(
                f"blocks {sorted(known ^ self._known)[:8]} hold prefixes for the tier or its policy alone"
            )
        ranked = {place for place in known if is_free(place)}
        if ranked != self._ranked:
            raise InternalError(f"blocks {sorted(ranked ^ self._ranked)[:8]} are free for the tier or its policy alone")
        if lost := self._ranked ^ self._policy.choices():
            raise InternalError(f"blocks {sorted(lost)[:8]} are a choice for the free list or its policy alone")
        if twice := self._ranked & self._blank.keys():
            raise InternalError(f"blocks {sorted(twice)[:8]} are free twice: as ones that hold something, and nothing")
