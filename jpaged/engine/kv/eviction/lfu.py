"""Least frequently used: evict the block that the fewest requests have seen; ties go to the least recently used.

    seen once   [ 9 4 7 ]        seen twice   [ 8 ]        seen 31 times   [ 1 2 ]

Counts last as long as a block is cached. Leaves are evicted before their parents, which are hit with every leaf.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from jpaged.engine.kv.eviction.policy import Entry


class LeastFrequentlyUsed:
    """Implementation of `jpaged.engine.kv.eviction.policy.EvictionPolicy`: O(1), and O(log n) in distinct counts."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._counts: dict[int, int] = {}
        self._free: dict[int, OrderedDict[int, None]] = {}  # times seen -> slots, the oldest first; no queue is empty
        self._heap: list[int] = []  # these counts, and some whose queue is gone

    def enter(self, place: int, entry: Entry) -> None:
        self._entries[place] = entry
        self._counts[place] = entry.times_seen

    def found(self, places: Sequence[int]) -> None:
        for place in places:
            queue = self._free.get(self._counts[place])
            is_free = queue is not None and place in queue
            if is_free:
                self.taken(place)
            self._counts[place] += 1
            if is_free:
                self.freed(place)

    def times_seen(self, place: int) -> int:
        return self._counts[place]

    def freed(self, place: int) -> None:
        count = self._counts[place]
        queue = self._free.get(count)
        if queue is None:
            queue = self._free[count] = OrderedDict()
            if len(self._heap) > 2 * len(self._free):
                self._heap = sorted(self._free)
            else:
                heapq.heappush(self._heap, count)
        queue[place] = None

    def taken(self, place: int) -> None:
        count = self._counts[place]
        del self._free[count][place]
        if not self._free[count]:
            del self._free[count]

    def victim(self) -> int:
        while self._heap[0] not in self._free:
            heapq.heappop(self._heap)
        place = next(iter(self._free[self._heap[0]]))
        self.taken(place)
        return place

    def left(self, place: int, *, is_evicted: bool) -> Entry:
        return self._entries.pop(place).seen(self._counts.pop(place))

    def choices(self) -> set[int]:
        return {place for queue in self._free.values() for place in queue}
