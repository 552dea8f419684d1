"""Protocol of the KV memory that the scheduler owns, for every KV policy."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from jpaged.engine.executor import I32
from jpaged.engine.kv_cache.blocks import BlockCopyPlan, MemoryCounts, StateSlots
from jpaged.engine.kv_cache.offload.connector_tier import ConnectorTier
from jpaged.engine.kv_cache.offload.host import HostTier
from jpaged.engine.kv_cache.prefix_cache import PinnedForRead, PrefixCacheManager
from jpaged.engine.kv_cache.swapper import HostPrefetcher, PoolLimiter, SlidingWindows, Swapper
from jpaged.engine.sequence import Sequence, SequenceGroup
from jpaged.pool import BlockFlags

Shares = list[tuple[Sequence, int]]
"""Sequences of one group, each with the number of tokens that it computes in this step."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Block counts: free + cached + referenced + reserved is num_blocks.

    Cached blocks are free and still hold a prefix. Reserved blocks are withheld from requests.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_referenced: int
    num_reserved: int = 0


class RankPlacement(Protocol):
    """Choice of the part of the pool that all blocks of a group are in (data-parallel attention)."""

    def place(self, group: SequenceGroup, ranks: Iterable[int], num_spare_blocks: SequenceOf[int]) -> bool:
        """Choose one of these parts for a waiting group; return False if none has room for it.

        The part with the longest cached prefix is chosen, of several the one with the most free blocks.

        Args:
            num_spare_blocks: free blocks that must be left over in each part.
        """
        ...


class KVCacheManager(Protocol):
    """Block manager for sequences: allocation, sharing and placement.

    Attributes:
        host: prefixes in host memory; None if there are none.
        held: cached blocks pinned for external readers; None without a prefix cache.
        prefetcher: prefetcher from host memory to the device; None without host memory or a prefix cache.
        connectors: tiers below host memory; empty if there are none.
        placement: choice of a part of the pool for a sequence; None if there is one part.
    """

    num_blocks: int
    counts: MemoryCounts
    host: HostTier | None
    held: PinnedForRead | None
    prefetcher: HostPrefetcher | None
    connectors: tuple[ConnectorTier, ...]
    placement: RankPlacement | None

    @property
    def limit(self) -> int:
        """Return the number of blocks that requests and pins may use: all except the withheld ones."""
        ...

    @property
    def prefixes(self) -> PrefixCacheManager | None:
        """Return the prefix cache; None if this memory has none."""
        ...

    @property
    def states(self) -> StateSlots | None:
        """Return the slots of recurrent state; None without recurrent layers."""
        ...

    @property
    def swapping(self) -> Swapper | None:
        """Return the swapper to and from host memory; None if there is none."""
        ...

    @property
    def windows(self) -> SlidingWindows | None:
        """Return what frees blocks outside sliding windows; None without windows, or if every block is kept."""
        ...

    @property
    def limiter(self) -> PoolLimiter | None:
        """Return the limiter of the pool; None if the pool cannot shrink."""
        ...

    def can_admit(self, group: SequenceGroup, num_spare_blocks: int) -> bool:
        """Return True if blocks for all tokens of a waiting group are free, with num_spare_blocks left over."""
        ...

    def admit(self, group: SequenceGroup) -> int:
        """Assign the cached prefix to a waiting group; return the number of tokens that need not be computed."""
        ...

    def num_outstanding_blocks(self, group: SequenceGroup) -> int:
        """Return the number of blocks that a running group still needs for the tokens it already has."""
        ...

    def can_grow(self, shares: Shares) -> bool:
        """Return True if blocks for the shares are available, copies of shared blocks included."""
        ...

    def grow(self, sequence: Sequence, num_tokens: int, *, are_drafts: bool = False) -> None:
        """Make the slots of the next num_tokens exclusive to the sequence: copy a shared block, allocate new ones.

        Args:
            are_drafts: the tokens are drafts, after other tokens of the same step.
        """
        ...

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share everything that the parent has computed with the child."""
        ...

    def rewind(self, sequence: Sequence) -> None:
        """Release the blocks after the computed tokens of a sequence that was just rewound."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence, on the device and in host memory."""
        ...

    def num_reserved_slots(self) -> int:
        """Return the number of token slots reserved for sequences, filled or not."""
        ...

    def num_stored_tokens(self, sequences: Iterable[Sequence], own_lens_s: I32) -> int:
        """Return the number of tokens in the reserved slots; tokens shared by several sequences count once.

        Args:
            sequences: sequences with blocks, without those whose last block is exclusive.
            own_lens_s: number of computed tokens of each sequence whose last block is exclusive.
        """
        ...

    def can_ever_fit(self, group: SequenceGroup) -> bool:
        """Return True if the group could run to its end if it ran alone."""
        ...

    def use(self) -> MemoryUse: ...

    def marks(self) -> BlockFlags:
        """Return a copy of the state of blocks beyond the block tables, for the dashboard."""
        ...

    def take_ops(self) -> BlockCopyPlan:
        """Remove and return the pending moves, which the device must run before the step."""
        ...

    def check(self, groups: Iterable[SequenceGroup]) -> None:
        """Check the bookkeeping of blocks.

        Raises:
            InternalError: a block is lost, shared by mistake, or free and in use.
        """
        ...
