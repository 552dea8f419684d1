"""Registry from eviction policy names to free lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jpaged.engine.executor import DeviceRates
from jpaged.engine.kv.eviction.costs import BlockCosts
from jpaged.engine.kv.eviction.free_list import RankedFreeList
from jpaged.engine.kv.eviction.lfu import LeastFrequentlyUsed
from jpaged.engine.kv.eviction.policy import EvictionPolicy, Key
from jpaged.engine.kv.eviction.two_queues import TwoQueues
from jpaged.engine.kv.eviction.worth import Worth

FetchTime = Callable[[Key], float | None]
"""Return the seconds to load the block of a key from the tiers below, or None if none of them stores it."""

MAKERS: dict[str, Callable[[int, BlockCosts, FetchTime | None], EvictionPolicy]] = {
    "lfu": lambda num_places, costs, fetch_s: LeastFrequentlyUsed(),
    "2q": lambda num_places, costs, fetch_s: TwoQueues(num_places),
    "worth": Worth,
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

    def policy(self, num_places: int, fetch_s: FetchTime | None = None) -> EvictionPolicy | None:
        """Create the eviction policy of a tier of blocks or files; None for plain LRU.

        Args:
            fetch_s: None if there is no tier below.
        """
        return None if self.name == "lru" else MAKERS[self.name](num_places, self.costs, fetch_s)

    def free_list(self, num_blocks: int, fetch_s: FetchTime | None = None) -> RankedFreeList | None:
        """Create the free list of blocks 1 to num_blocks; None for the plain LRU list."""
        policy = self.policy(num_blocks, fetch_s)
        return None if policy is None else RankedFreeList(policy, range(1, num_blocks + 1))
