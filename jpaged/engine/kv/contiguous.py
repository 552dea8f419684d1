"""The baselines: contiguous KV memory, reserved for a sequence's whole life when it is admitted.

    reserve-max      prompt and max_model_len                 as FasterTransformer and Orca reserve
    reserve-pow2     prompt and the next power of two of max_tokens
    reserve-oracle   prompt and max_tokens exactly: the true length, for requests that ignore end of sequence

Regions come from a buddy allocator, as in the Orca variants of "Efficient Memory Management for Large Language Model
Serving with PagedAttention" (Kwon et al., 2023), section 6.1. Nothing is shared, preempted or cached: a sequence of a
group gets a region of its own, and a copy of the prompt. A beam search reserves a region for every beam; beams that die
leave theirs to those that fork. A region is a run of consecutive blocks, so the device program is the one that serves
paged memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from jpaged.config import KVPolicy
from jpaged.engine.executor import Geometry, Move
from jpaged.engine.kv.interface import MemoryUse, Shares
from jpaged.engine.kv.paged import MemoryCounts, PagedMemory, PrefixOptions
from jpaged.engine.kv.prefix_cache import Key
from jpaged.engine.kv.transfers import MemoryOps
from jpaged.engine.sequence import Group, Sequence
from jpaged.errors import InternalError

RESERVE_POLICIES = tuple(policy for policy in get_args(KVPolicy) if policy != "paged")


class BuddyAllocator:
    """Regions of 2^k consecutive blocks, split and merged in halves. Blocks are numbered from 1."""

    def __init__(self, num_blocks: int) -> None:
        self._free: dict[int, set[int]] = {}
        start = 0
        while start < num_blocks:  # the pool need not be a power of two: it is a row of them, the largest first
            order = (num_blocks - start).bit_length() - 1
            self._free.setdefault(order, set()).add(start)
            start += 1 << order
        self._arenas = {start: order for order, starts in self._free.items() for start in starts}

    def allocate(self, num_blocks: int) -> int | None:
        """First block of a region that holds so many; None when there is no such hole."""
        order = _order(num_blocks)
        fitting = [k for k, starts in self._free.items() if k >= order and starts]
        if not fitting:
            return None
        k = min(fitting)
        start = min(self._free[k])
        self._free[k].remove(start)
        while k > order:
            k -= 1
            self._free.setdefault(k, set()).add(start + (1 << k))
        return start + 1

    def release(self, first_block: int, num_blocks: int) -> None:
        """Gives a region back and merges it with its free neighbours."""
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
"""(first block, blocks asked for)."""


@dataclass(slots=True)
class _Family:
    """The beams of a group: regions that none of them holds at the moment, and how many beams there are."""

    spares: list[Region]
    num_beams: int


class ReservedMemory:
    """Implements `jpaged.engine.kv.interface.KVMemory` for one of RESERVE_POLICIES."""

    def __init__(self, *, num_blocks: int, block_size: int, max_model_len: int, policy: str) -> None:
        if policy not in RESERVE_POLICIES:
            raise InternalError(f"{policy!r} is not one of {', '.join(RESERVE_POLICIES)}")
        self.counts = MemoryCounts()
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._policy = policy
        self._buddies = BuddyAllocator(num_blocks)
        self._regions: dict[Sequence, Region] = {}
        self._families: dict[Sequence, _Family] = {}
        self._visitors: set[Sequence] = set()  # forks that still read their parent's region
        self._ops = MemoryOps()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    def num_region_blocks(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Blocks that a sequence reserves."""
        if self._policy == "reserve-max":
            num_tokens = self._max_model_len
        elif self._policy == "reserve-pow2":
            num_tokens = min(self._max_model_len, num_prompt_tokens + (1 << (max_tokens - 1).bit_length()))
        else:
            num_tokens = num_prompt_tokens + max_tokens
        return -(-num_tokens // self._block_size)

    def can_admit(self, group: Group, num_spare_blocks: int) -> bool:
        """Reserves right away when it can; a group that was told yes is admitted in the same step."""
        if all(sequence in self._regions for sequence in group.sequences):
            return True
        num_blocks = self.num_region_blocks(len(group.request.prompt_token_ids), group.request.sampling.max_tokens)
        regions: list[Region] = []
        for _ in range(group.num_rows):
            first = self._buddies.allocate(num_blocks)
            if first is None:
                for region in regions:
                    self._buddies.release(*region)
                return False
            regions.append((first, num_blocks))
        family = _Family(regions[len(group.sequences) :], len(group.sequences))
        for sequence, region in zip(group.sequences, regions, strict=False):
            self._regions[sequence] = region
            if group.request.sampling.beam_width:
                self._families[sequence] = family
        return True

    def admit(self, group: Group) -> int:
        return 0

    def num_outstanding_blocks(self, group: Group) -> int:
        return 0

    def is_being_computed(self, group: Group, running: Iterable[Group]) -> bool:
        return False

    def can_grow(self, shares: Shares) -> bool:
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        end = sequence.num_computed_tokens + num_tokens
        first, num_blocks = self._regions[sequence]
        table = sequence.block_table
        needed = -(-end // self._block_size)
        if needed > num_blocks:
            raise InternalError(f"{end} tokens do not fit into a region of {num_blocks} blocks")
        if needed > table.num_blocks:
            table.extend(list(range(first + table.num_blocks, first + needed)))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        if parent not in self._regions:  # it was preempted, and has computed nothing
            return
        if child not in self._regions:
            family = self._families[child] = self._families[parent]
            self._regions[child] = family.spares.pop()
            family.num_beams += 1
        # Copies run before a step, and the step that is being put together may still write what is to be copied.
        child.block_table.extend(parent.block_table.block_ids())
        self._visitors.add(child)
        child.num_computed_tokens = parent.num_computed_tokens

    def forget(self, sequence: Sequence) -> None:
        """Nothing is cached."""

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Nothing is cached; a sequence that was forked since the last time moves into its own region."""
        if sequence not in self._visitors:
            return
        self._visitors.remove(sequence)
        first, _ = self._regions[sequence]
        for i, source in enumerate(sequence.block_table.block_ids()):
            self._ops.add(Move.COPY, source, first + i)
            sequence.block_table.replace(i, first + i)

    def release(self, sequence: Sequence) -> None:
        self._visitors.discard(sequence)
        sequence.block_table.clear()
        sequence.num_computed_tokens = 0
        self._give_back(sequence)

    def can_swap_out(self, group: Group) -> bool:
        return False

    def swap_out(self, group: Group) -> None:
        raise InternalError("reserved memory is never swapped")

    def can_swap_in(self, group: Group, num_spare_blocks: int) -> bool:
        return False

    def swap_in(self, group: Group) -> None:
        raise InternalError("reserved memory is never swapped")

    def has_prefix(self, key: Key) -> bool:
        """Nothing is found by its prefix here."""
        return False

    def num_cacheable_blocks(self, num_prompt_tokens: int) -> int:
        """None: regions are not shared."""
        return 0

    def num_reserved_slots(self) -> int:
        return sum(1 << _order(num_blocks) for _, num_blocks in self._reserved()) * self._block_size

    def num_stored_tokens(self, holders: Iterable[Group]) -> int:
        return sum(sequence.num_computed_tokens for group in holders for sequence in group.sequences)

    def can_ever_fit(self, group: Group) -> bool:
        """The group's regions fit into an empty pool."""
        empty = BuddyAllocator(self._num_blocks)
        num_blocks = self.num_region_blocks(len(group.request.prompt_token_ids), group.request.sampling.max_tokens)
        return all(empty.allocate(num_blocks) is not None for _ in range(group.num_rows))

    def use(self) -> MemoryUse:
        num_free = self._buddies.num_free
        return MemoryUse(self._num_blocks, num_free, 0, self._num_blocks - num_free)

    def take_ops(self) -> MemoryOps:
        ops, self._ops = self._ops, MemoryOps()
        return ops

    def check(self, groups: Iterable[Group]) -> None:
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
        if len(taken) + self._buddies.num_free != self._num_blocks:
            raise InternalError(f"{len(taken)} reserved + {self._buddies.num_free} free are not {self._num_blocks}")

    def _reserved(self) -> Iterator[Region]:
        yield from self._regions.values()
        for family in {id(family): family for family in self._families.values()}.values():
            yield from family.spares

    def _give_back(self, sequence: Sequence) -> None:
        region = self._regions.pop(sequence, None)
        if region is None:
            return
        family = self._families.pop(sequence, None)
        if family is None:
            self._buddies.release(*region)
            return
        family.spares.append(region)
        family.num_beams -= 1
        if not family.num_beams:
            for spare in family.spares:
                self._buddies.release(*spare)


def make_memory(geometry: Geometry, kv_policy: KVPolicy, prefix: PrefixOptions) -> PagedMemory | ReservedMemory:
    """The memory of a policy: paged, or one of the baselines."""
    if kv_policy == "paged":
        return PagedMemory(
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            num_host_blocks=geometry.num_host_blocks,
            prefix=prefix,
        )
    return ReservedMemory(
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        max_model_len=geometry.max_model_len,
        policy=kv_policy,
    )
