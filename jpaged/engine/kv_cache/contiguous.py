"""Baselines: contiguous KV memory, reserved for a sequence's whole life when it is admitted.

    reserve-max      prompt and max_model_len                 as in FasterTransformer and Orca
    reserve-pow2     prompt and the next power of two of max_tokens
    reserve-oracle   prompt and max_tokens exactly: the true length, for requests that ignore end of sequence

Regions come from a buddy allocator, as in the Orca variants of "Efficient Memory Management for Large Language Model
Serving with PagedAttention" (Kwon et al., 2023), section 6.1. Nothing is shared, preempted or cached: each sequence of
a group gets a region and a copy of the prompt. A beam search reserves a region for every beam; forks reuse the regions
of finished beams. A region is a run of consecutive blocks, so the device program is the same as for paged memory. Each
KV group has an equal part of the region, and keeps blocks outside its sliding window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np

from jpaged.config import KVPolicy
from jpaged.engine.executor import I32, Geometry, Move
from jpaged.engine.kv_cache.blocks import BlockCopyPlan
from jpaged.engine.kv_cache.interface import MemoryUse, RankPlacement, Shares
from jpaged.engine.kv_cache.offload.connector_tier import ConnectorTier
from jpaged.engine.kv_cache.offload.host import HostTier
from jpaged.engine.kv_cache.prefix_cache import PinnedForRead
from jpaged.engine.kv_cache.swapper import HostPrefetcher
from jpaged.engine.sequence import Sequence, SequenceGroup
from jpaged.errors import InternalError
from jpaged.pool import BlockFlags

RESERVE_POLICIES = tuple(policy for policy in get_args(KVPolicy) if policy != "paged")


class BuddyAllocator:
    """Allocator of regions of 2^k consecutive blocks, split and merged in halves. Block ids start at 1."""

    def __init__(self, num_blocks: int) -> None:
        self._free: dict[int, set[int]] = {}
        start = 0
        while start < num_blocks:  # the pool need not be a power of two: it is a row of such arenas, the largest first
            order = (num_blocks - start).bit_length() - 1
            self._free.setdefault(order, set()).add(start)
            start += 1 << order
        self._arenas = {start: order for order, starts in self._free.items() for start in starts}

    def allocate(self, num_blocks: int) -> int:
        """Allocate a region of at least num_blocks blocks and return its first block.

        Raises:
            InternalError: no free region is large enough; the caller must check `num_holes` first.
        """
        order = _order(num_blocks)
        fitting = [k for k, starts in self._free.items() if k >= order and starts]
        if not fitting:
            raise InternalError(f"no free region has {num_blocks} blocks")
        k = min(fitting)
        start = min(self._free[k])
        self._free[k].remove(start)
        while k > order:
            k -= 1
            self._free.setdefault(k, set()).add(start + (1 << k))
        return start + 1

    def num_holes(self, num_blocks: int) -> int:
        """Return how many regions of num_blocks blocks fit."""
        order = _order(num_blocks)
        return sum(len(starts) << (k - order) for k, starts in self._free.items() if k >= order)

    def release(self, first_block: int, num_blocks: int) -> None:
        """Release a region and merge it with its free neighbors."""
        start, order = first_block - 1, _order(num_blocks)
        arena = max(begin for begin in self._arenas if begin <= start)
        while order < self._arenas[arena]:
            buddy = arena + ((start - arena) ^ (1 << order))
            if buddy not in self._free.get(order, ()):
                break
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free.setdefault(order, set()).add(start)

    @property
    def num_free(self) -> int:
        return sum(len(starts) << order for order, starts in self._free.items())


def _order(num_blocks: int) -> int:
    return max(0, (num_blocks - 1).bit_length())


Region = tuple[int, int]
"""(first block, number of blocks requested)."""


@dataclass(slots=True)
class _Family:
    """Beams of a group: their spare regions, which no beam uses now, and the number of beams."""

    spares: list[Region]
    num_beams: int


class ContiguousKVCacheManager:
    """Implements `jpaged.engine.kv_cache.interface.KVCacheManager` for one of RESERVE_POLICIES."""

    def __init__(self, geometry: Geometry, policy: str) -> None:
        if policy not in RESERVE_POLICIES:
            raise InternalError(f"{policy!r} is not one of {', '.join(RESERVE_POLICIES)}")
        self.prefixes = None
        self.states = None
        self.host: HostTier | None = None
        self.held: PinnedForRead | None = None
        self.prefetcher: HostPrefetcher | None = None
        self.connectors: tuple[ConnectorTier, ...] = ()
        self.placement: RankPlacement | None = None
        self.swapping = None
        self.windows = None
        self.limiter = None
        self.num_blocks = self.limit = geometry.num_blocks
        self._block_size = geometry.block_size
        self._max_model_len = geometry.max_model_len
        self._num_kv_groups = len(geometry.windows)
        self._policy = policy
        self._buddies = BuddyAllocator(self.num_blocks)
        self._regions: dict[Sequence, Region] = {}
        self._families: dict[Sequence, _Family] = {}
        self._visitors: set[Sequence] = set()  # forks that still read their parent's region
        self._ops = BlockCopyPlan()
        self.counts = self._ops.counts

    def num_region_blocks(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Return the number of blocks that a sequence reserves, for all KV groups."""
        if self._policy == "reserve-max":
            num_tokens = self._max_model_len
        elif self._policy == "reserve-pow2":
            num_tokens = min(self._max_model_len, num_prompt_tokens + (1 << (max_tokens - 1).bit_length()))
        else:
            num_tokens = num_prompt_tokens + max_tokens
        return self._num_kv_groups * -(-num_tokens // self._block_size)

    def can_admit(self, group: SequenceGroup, num_spare_blocks: int) -> bool:
        return self._buddies.num_holes(self._num_group_blocks(group)) >= group.num_rows

    def admit(self, group: SequenceGroup) -> int:
        num_blocks = self._num_group_blocks(group)
        regions = [(self._buddies.allocate(num_blocks), num_blocks) for _ in range(group.num_rows)]
        family = _Family(regions[len(group.sequences) :], len(group.sequences))
        for sequence, region in zip(group.sequences, regions, strict=False):
            self._regions[sequence] = region
            if group.request.sampling.beam_width:
                self._families[sequence] = family
        return 0

    def num_outstanding_blocks(self, group: SequenceGroup) -> int:
        return 0

    def can_grow(self, shares: Shares) -> bool:
        return True

    def grow(self, sequence: Sequence, num_tokens: int, *, are_drafts: bool = False) -> None:
        """Add blocks up to the next num_tokens; a sequence forked in an earlier step moves to its region."""
        end = sequence.num_computed_tokens + num_tokens
        begin, num_blocks = self._regions[sequence]
        is_visitor, needed = sequence in self._visitors, -(-end // self._block_size)
        self._visitors -= {sequence}
        num_of_each = num_blocks // self._num_kv_groups
        if needed > num_of_each:
            raise InternalError(f"{end} tokens do not fit into a region of {num_blocks} blocks")
        for kv_group, table in enumerate(sequence.kv.tables):
            first = begin + kv_group * num_of_each
            for i, source in enumerate(table.block_ids() if is_visitor else ()):
                self._ops.add(Move.COPY, source, first + i)
                table.replace(i, first + i)
            if needed > table.num_blocks:
                table.extend(list(range(first + table.num_blocks, first + needed)))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        if parent not in self._regions:  # it was preempted, and has computed nothing
            return
        if child not in self._regions:
            family = self._families[child] = self._families[parent]
            self._regions[child] = family.spares.pop()
            family.num_beams += 1
        # Copies run before a step, and the step that is being scheduled may still write what is to be copied.
        for table, of_child in zip(parent.kv.tables, child.kv.tables, strict=True):
            of_child.extend(table.block_ids())
        self._visitors.add(child)
        child.set_num_computed_tokens(parent.num_computed_tokens)

    def rewind(self, sequence: Sequence) -> None:
        for table in sequence.kv.tables:
            table.truncate(-(-sequence.num_computed_tokens // self._block_size))

    def release(self, sequence: Sequence) -> None:
        self._visitors.discard(sequence)
        for table in sequence.kv.tables:
            table.truncate()
        sequence.set_num_computed_tokens(0)
        region, family = self._regions.pop(sequence, None), self._families.pop(sequence, None)
        if region is None:
            return
        if family is None:
            self._buddies.release(*region)
            return
        family.spares.append(region)
        family.num_beams -= 1
        if not family.num_beams:
            for spare in family.spares:
                self._buddies.release(*spare)

    def num_reserved_slots(self) -> int:
        return sum(1 << _order(num_blocks) for _, num_blocks in self._reserved()) * self._block_size

    def num_stored_tokens(self, sequences: Iterable[Sequence], own_lens_s: I32) -> int:
        num_tokens = sum(sequence.num_computed_tokens for sequence in sequences) + int(np.sum(own_lens_s))
        return self._num_kv_groups * num_tokens

    def can_ever_fit(self, group: SequenceGroup) -> bool:
        """Return True if the group's regions fit into an empty pool."""
        return BuddyAllocator(self.num_blocks).num_holes(self._num_group_blocks(group)) >= group.num_rows

    def use(self) -> MemoryUse:
        num_free = self._buddies.num_free
        return MemoryUse(self.num_blocks, num_free, 0, self.num_blocks - num_free)

    def marks(self) -> BlockFlags:
        none, nothing = np.zeros(0, np.int32), np.zeros(self.num_blocks + 1, np.uint8)
        runs = [np.arange(first, first + (1 << _order(count)), dtype=np.int32) for first, count in self._reserved()]
        return BlockFlags(
            cached=nothing,
            host_cached=np.zeros(1, np.uint8),
            pinned=none,
            withheld=none,
            reserved=np.concatenate([none, *runs]),
        )

    def take_ops(self) -> BlockCopyPlan:
        return self._ops.take()

    def check(self, groups: Iterable[SequenceGroup]) -> None:
        live = {sequence for group in groups for sequence in group.sequences}
        stray = (self._regions.keys() | self._visitors) - live
        if stray:
            raise InternalError(f"{len(stray)} regions belong to no sequence")
        taken: set[int] = set()
        for first, num_blocks in self._reserved():
            region = set(range(first, first + (1 << _order(num_blocks))))
            if taken & region:
                raise InternalError(f"the region of {num_blocks} blocks at {first} overlaps another")
            taken |= region
        if len(taken) + self._buddies.num_free != self.num_blocks:
            raise InternalError(
                f"{len(taken)} reserved + {self._buddies.num_free} free blocks are not {self.num_blocks}"
            )

    def _num_group_blocks(self, group: SequenceGroup) -> int:
        """Return the number of blocks that each sequence of a group reserves."""
        return self.num_region_blocks(len(group.request.prompt_token_ids), group.request.sampling.max_num_tokens)

    def _reserved(self) -> Iterator[Region]:
        yield from self._regions.values()
        for family in {id(family): family for family in self._families.values()}.values():
            yield from family.spares
