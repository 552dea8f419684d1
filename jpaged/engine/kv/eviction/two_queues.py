"""Two queues: blocks seen once pass through a short queue, and only blocks seen again stay (2Q, S3-FIFO).

    once      oldest ...... newest     at most a tenth of the slots, if there is a choice
    again     oldest ...... newest     seen twice or more, here or by its key within the last evictions (ghosts)

A flood of prompts that are never repeated passes through the first queue and leaves the second unchanged. Johnson and
Shasha, "2Q", VLDB 1994; Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from jpaged.engine.kv.eviction.policy import Entry, Key

_SHARE_OF_ONCE = 0.1


class TwoQueues:
    """Implementation of `jpaged.engine.kv.eviction.policy.EvictionPolicy`, in O(1).

    Args:
        num_places: slots of the tier; the policy remembers the same number of evicted keys.
    """

    def __init__(self, num_places: int) -> None:
        self._num_ghosts = num_places
        self._max_once = max(1, int(_SHARE_OF_ONCE * num_places))
        self._entries: dict[int, Entry] = {}
        self._counts: dict[int, int] = {}
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[Key, int] = OrderedDict()

    def enter(self, place: int, entry: Entry) -> None:
        self._entries[place] = entry
        self._counts[place] = max(entry.times_seen, 1 + self._ghosts.pop(entry.key, 0))

    def found(self, places: Sequence[int]) -> None:
        for place in places:
            self._counts[place] += 1
            if place in self._once:  # move it to the second queue, in case the request does not acquire it
                del self._once[place]
                self._again[place] = None

    def times_seen(self, place: int) -> int:
        return self._counts[place]

    def freed(self, place: int) -> None:
        (self._again if self._counts[place] > 1 else self._once)[place] = None

    def taken(self, place: int) -> None:
        del (self._again if place in self._again else self._once)[place]

    def victim(self) -> int:
        queue = self._once if self._once and (len(self._once) > self._max_once or not self._again) else self._again
        return queue.popitem(last=False)[0]

    def left(self, place: int, *, is_evicted: bool) -> Entry:
        entry, count = self._entries.pop(place), self._counts.pop(place)
        if is_evicted:
            self._ghosts[entry.key] = count
            if len(self._ghosts) > self._num_ghosts:
                self._ghosts.popitem(last=False)
        return entry.seen(count)

    def choices(self) -> set[int]:
        return {*self._once, *self._again}
