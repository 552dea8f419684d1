"""The name of a policy -> the free list of a tier, ordered by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jpaged.config import EvictionPolicyName
from jpaged.engine.executor import DeviceRates
from jpaged.engine.kv.eviction.costs import BlockCosts
from jpaged.engine.kv.eviction.free_list import RankedFreeList
from jpaged.engine.kv.eviction.lfu import LeastFrequentlyUsed
from jpaged.engine.kv.eviction.policy import EvictionPolicy, Key
from jpaged.engine.kv.eviction.two_queues import TwoQueues
from jpaged.engine.kv.eviction.worth import Worth


@dataclass(frozen=True, slots=True)
class Eviction:
    """How the tiers of one memory choose what they give up.

    Attributes:
        name: of the policy.
        costs: of having a block again.
    """

    name: EvictionPolicyName
    costs: BlockCosts

    @classmethod
    def of(cls, name: EvictionPolicyName, rates: DeviceRates, block_size: int, bytes_per_block: int) -> Eviction:
        return cls(name, BlockCosts.of(rates, block_size, bytes_per_block))

    def policy(self, num_places: int, is_below: Callable[[Key], bool] | None = None) -> EvictionPolicy | None:
        """A policy for a tier of so many places; None where the free list's own order is meant, least recently used.

        Args:
            is_below: whether the tier below keeps a key; None where there is none.
        """
        if self.name == "lru":
            return None
        if self.name == "lfu":
            return LeastFrequentlyUsed()
        if self.name == "2q":
            return TwoQueues(num_places)
        return Worth(num_places, self.costs, is_below)

    def free_list(self, num_blocks: int, is_below: Callable[[Key], bool] | None = None) -> RankedFreeList | None:
        """The free list of blocks 1 to num_blocks; None where it is the plain one, which is told nothing."""
        policy = self.policy(num_blocks, is_below)
        return None if policy is None else RankedFreeList(policy, range(1, num_blocks + 1))
