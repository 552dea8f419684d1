"""The name of a policy -> the free list of a tier, ordered by it."""

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
"""Seconds to bring back what a key names from the tiers below; None where none of them keeps it."""

MAKERS: dict[str, Callable[[int, BlockCosts, FetchTime | None], EvictionPolicy]] = {
    "lfu": lambda num_places, costs, fetch_s: LeastFrequentlyUsed(),
    "2q": lambda num_places, costs, fetch_s: TwoQueues(num_places),
    "worth": Worth,
}
"""Who ranks the places of a tier, so many, by each name; "lru" is the order of a free list itself."""
_AUTO = "lru"


@dataclass(frozen=True, slots=True)
class Eviction:
    """How the tiers of one memory choose what they give up.

    Attributes:
        name: of the policy.
        costs: of having a block again.
    """

    name: str
    costs: BlockCosts

    @classmethod
    def of(cls, name: str, rates: DeviceRates, block_size: int, bytes_per_block: int) -> Eviction:
        """The policy that an option names, with costs of a device as it was timed."""
        return cls(_AUTO if name == "auto" else name, BlockCosts.of(rates, block_size, bytes_per_block))

    def policy(self, num_places: int, fetch_s: FetchTime | None = None) -> EvictionPolicy | None:
        """Who ranks the places of a tier, a pool of blocks or files; None where they go as they were used.

        Args:
            fetch_s: None where no tier is below.
        """
        return None if self.name == "lru" else MAKERS[self.name](num_places, self.costs, fetch_s)

    def free_list(self, num_blocks: int, fetch_s: FetchTime | None = None) -> RankedFreeList | None:
        """The free list of blocks 1 to num_blocks; None where it is the plain one, which is told nothing."""
        policy = self.policy(num_blocks, fetch_s)
        return None if policy is None else RankedFreeList(policy, range(1, num_blocks + 1))
