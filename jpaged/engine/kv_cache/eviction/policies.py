"""Registry from eviction policy names to free lists.

Least frequently used: evict the block that the fewest requests have seen; ties go to the least recently used.

    seen once   [ 9 4 7 ]        seen twice   [ 8 ]        seen 31 times   [ 1 2 ]

Counts last as long as a block is cached. Leaves are evicted before their parents, which are hit with every leaf.

Two queues: blocks seen once pass through a short queue, and only blocks seen again stay (2Q, S3-FIFO).

    once      oldest ...... newest     at most a tenth of the slots, if there is a choice
    again     oldest ...... newest     seen twice or more, here or by its key within the last evictions (ghosts)

A flood of prompts that are never repeated passes through the first queue and leaves the second unchanged. Johnson and
Shasha, "2Q", VLDB 1994; Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jpaged.engine.executor import DeviceRates
from jpaged.engine.kv_cache.eviction.cost_aware import BlockCosts, CostAwareEviction
from jpaged.engine.kv_cache.eviction.free_list import BlockHash, CachedBlock, EvictionPolicy, RankedFreeList


class LeastFrequentlyUsed:
    """Implementation of `EvictionPolicy`: O(1), and O(log n) in distinct counts."""

    def __init__(self) -> None:
        self._entries: dict[int, CachedBlock] = {}
        self._counts: dict[int, int] = {}
        self._free: dict[int, OrderedDict[int, None]] = {}  # times seen -> slots, the oldest first; no queue is empty
        self._heap: list[int] = []  # these counts, and some whose queue is gone

    def on_insert(self, slot: int, entry: CachedBlock) -> None:
        self._entries[slot] = entry
        self._counts[slot] = entry.times_seen

    def on_hit(self, slots: Sequence[int]) -> None:
        for slot in slots:
            queue = self._free.get(self._counts[slot])
            is_free = queue is not None and slot in queue
            if is_free:
                self.on_acquire(slot)
            self._counts[slot] += 1
            if is_free:
                self.on_free(slot)

    def times_seen(self, slot: int) -> int:
        return self._counts[slot]

    def on_free(self, slot: int) -> None:
        count = self._counts[slot]
        queue = self._free.get(count)
        if queue is None:
            queue = self._free[count] = OrderedDict()
            if len(self._heap) > 2 * len(self._free):
                self._heap = sorted(self._free)
            else:
                heapq.heappush(self._heap, count)
        queue[slot] = None

    def on_acquire(self, slot: int) -> None:
        count = self._counts[slot]
        del self._free[count][slot]
        if not self._free[count]:
            del self._free[count]

    def victim(self) -> int:
        while self._heap[0] not in self._free:
            heapq.heappop(self._heap)
        slot = next(iter(self._free[self._heap[0]]))
        self.on_acquire(slot)
        return slot

    def on_remove(self, slot: int, *, is_evicted: bool) -> CachedBlock:
        return self._entries.pop(slot).seen(self._counts.pop(slot))

    def candidates(self) -> set[int]:
        return {slot for queue in self._free.values() for slot in queue}


_SHARE_OF_ONCE = 0.1


class TwoQueues:
    """Implementation of `jpaged.engine.kv_cache.eviction.free_list.EvictionPolicy`, in O(1).

    Args:
        num_slots: slots of the tier; the policy remembers the same number of evicted keys.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_ghosts = num_slots
        self._max_once = max(1, int(_SHARE_OF_ONCE * num_slots))
        self._entries: dict[int, CachedBlock] = {}
        self._counts: dict[int, int] = {}
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[BlockHash, int] = OrderedDict()

    def on_insert(self, slot: int, entry: CachedBlock) -> None:
        self._entries[slot] = entry
        self._counts[slot] = max(entry.times_seen, 1 + self._ghosts.pop(entry.key, 0))

    def on_hit(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._counts[slot] += 1
            if slot in self._once:  # move it to the second queue, in case the request does not acquire it
                del self._once[slot]
                self._again[slot] = None

    def times_seen(self, slot: int) -> int:
        return self._counts[slot]

    def on_free(self, slot: int) -> None:
        (self._again if self._counts[slot] > 1 else self._once)[slot] = None

    def on_acquire(self, slot: int) -> None:
        del (self._again if slot in self._again else self._once)[slot]

    def victim(self) -> int:
        queue = self._once if self._once and (len(self._once) > self._max_once or not self._again) else self._again
        return queue.popitem(last=False)[0]

    def on_remove(self, slot: int, *, is_evicted: bool) -> CachedBlock:
        entry, count = self._entries.pop(slot), self._counts.pop(slot)
        if is_evicted:
            self._ghosts[entry.key] = count
            if len(self._ghosts) > self._num_ghosts:
                self._ghosts.popitem(last=False)
        return entry.seen(count)

    def candidates(self) -> set[int]:
        return {*self._once, *self._again}


FetchTime = Callable[[BlockHash], float | None]
"""Return the seconds to load the block of a key from the tiers below, or None if none of them stores it."""

EVICTION_POLICIES: dict[str, Callable[[int, BlockCosts, FetchTime | None], EvictionPolicy]] = {
    "lfu": lambda num_slots, costs, fetch_s: LeastFrequentlyUsed(),
    "2q": lambda num_slots, costs, fetch_s: TwoQueues(num_slots),
    "worth": CostAwareEviction,
}
"""Constructor of each eviction policy by name, for num_places slots; "lru" is the order of the free list itself."""
_AUTO = "lru"


@dataclass(frozen=True, slots=True)
class Eviction:
    """Eviction configuration of the tiers of one KV memory.

    Attributes:
        name: name of the policy.
        costs: cost of getting a block back.
    """

    name: str
    costs: BlockCosts

    @classmethod
    def of(cls, name: str, rates: DeviceRates, block_size: int, bytes_per_block: int) -> Eviction:
        """Return the policy that an option names, with costs from measured device rates."""
        return cls(_AUTO if name == "auto" else name, BlockCosts.of(rates, block_size, bytes_per_block))

    def policy(self, num_slots: int, fetch_s: FetchTime | None = None) -> EvictionPolicy | None:
        """Create the eviction policy of a tier of blocks or files; None for plain LRU.

        Args:
            fetch_s: None if there is no tier below.
        """
        return None if self.name == "lru" else EVICTION_POLICIES[self.name](num_slots, self.costs, fetch_s)

    def free_list(self, num_blocks: int, fetch_s: FetchTime | None = None) -> RankedFreeList | None:
        """Create the free list of blocks 1 to num_blocks; None for the plain LRU list."""
        policy = self.policy(num_blocks, fetch_s)
        return None if policy is None else RankedFreeList(policy, range(1, num_blocks + 1))
