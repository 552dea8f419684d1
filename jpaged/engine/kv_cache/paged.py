"""Paged KV memory: blocks on demand, shared by reference, copied on write.

    device pool   blocks of live sequences, of pinned prefixes, and cached prefixes in the free list
    host pool     blocks of swapped groups, and cached prefixes evicted from the device pool

Composes the two pools with `PrefixCacheManager` and `Swapper`, and collects the moves that their decisions require for
the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from jpaged.config import CacheOptions
from jpaged.engine.executor import I32, Executor, Geometry, HostBlocks, Move
from jpaged.engine.executor.io import WindowSpec
from jpaged.engine.kv_cache.blocks import BlockCopyPlan, BlockHash, BlockPool, StateSlots
from jpaged.engine.kv_cache.connector import EngineStore
from jpaged.engine.kv_cache.contiguous import ContiguousKVCacheManager
from jpaged.engine.kv_cache.events import KVEventRecorder
from jpaged.engine.kv_cache.eviction.policies import Eviction
from jpaged.engine.kv_cache.interface import KVCacheManager, MemoryUse, RankPlacement, Shares
from jpaged.engine.kv_cache.offload.connector_tier import ConnectorTier
from jpaged.engine.kv_cache.offload.host import HostTier
from jpaged.engine.kv_cache.prefix_cache import PinnedForRead, PrefixCacheManager, PrefixMatch
from jpaged.engine.kv_cache.swapper import HostPrefetcher, PoolLimiter, SlidingWindows, Swapper, Tables
from jpaged.engine.sequence import Sequence, SequenceGroup
from jpaged.errors import Unsupported
from jpaged.pool import BlockFlags


class BlockDemand:
    """Counter of needed blocks, without side effects: to be admitted, to be swapped in, and for current tokens.

    A sliding window frees blocks as it moves, so its count is limited to the blocks that it holds at once. The count is
    never too low.

    Args:
        pool: device blocks.
        reaches: attention window of each KV group.
    """

    def __init__(self, pool: BlockPool, reaches: SequenceOf[WindowSpec]) -> None:
        self._pool = pool
        self._reaches = reaches

    def to_admit(self, group: SequenceGroup, match: PrefixMatch | None) -> int:
        """Return the number of blocks that a waiting group takes from the free list, given its prefix match."""
        leader, lens = group.live[0], [sequence.num_tokens for sequence in group.live]
        needed = 0
        for kv_group, reach in enumerate(self._reaches):
            most = reach.num_blocks(leader.num_prompt_tokens, lens)
            if match is None:
                needed += most
                continue
            num_free_matched = self._pool.count_free(match.block_ids[kv_group])
            all_in_all = WindowSpec(reach.block_size).num_blocks(leader.num_prompt_tokens, lens)
            needed += min(most, all_in_all - match.num_blocks + num_free_matched)
        return needed

    def for_running(self, group: SequenceGroup, tables: SequenceOf[Tables], pool: BlockPool) -> int:
        """Return the number of blocks that a group still needs for the tokens it has.

        Args:
            tables: block tables of each live sequence, on the device or in host memory.
            pool: pool that these blocks belong to.
        """
        live = group.live
        if not group.is_forked:
            lens = [sequence.num_tokens for sequence in live]
            mosts = [reach.num_blocks(live[0].num_prompt_tokens, lens) for reach in self._reaches]
            return sum(
                max(0, most - (table.num_blocks if reach.num_seen is None else pool.num_owned(table)))
                for most, reach, table in zip(mosts, self._reaches, tables[0], strict=True)
            )
        return sum(self._of_one(sequence, of_one, pool) for sequence, of_one in zip(live, tables, strict=True))

    def _of_one(self, sequence: Sequence, tables: Tables, pool: BlockPool) -> int:
        num_new = max(0, pool.num_blocks_for(sequence.num_tokens) - tables[0].num_blocks)
        if not num_new:
            return 0
        needed = 0
        for reach, table in zip(self._reaches, tables, strict=True):
            limit = reach.max_num_held
            needed += num_new if limit is None else min(num_new, max(0, limit - pool.num_owned(table)))
        return needed


class MostFreeRank:
    """Implementation of `jpaged.engine.kv_cache.interface.RankPlacement` over a memory's pool."""

    def __init__(self, memory: PagedKVCacheManager, pool: BlockPool) -> None:
        self._memory = memory
        self._pool = pool

    def place(self, group: SequenceGroup, ranks: Iterable[int], num_spare_blocks: SequenceOf[int]) -> bool:
        prefixes = self._memory.prefixes
        fitting: list[tuple[int, int, int]] = []
        for rank in ranks:
            group.place(rank)
            if self._memory.can_admit(group, num_spare_blocks[rank]):
                num_matched = 0 if prefixes is None else prefixes.match(group).num_blocks
                fitting.append((num_matched, self._pool.get_num_free(rank), -rank))
        if fitting:
            group.place(-max(fitting)[2])
        return bool(fitting)


class PagedKVCacheManager:
    """Implementation of `jpaged.engine.kv_cache.interface.KVCacheManager`.

    Args:
        caches_prefixes: enable the prefix cache (`prefixes`), for positions below max_cached_tokens.
        host_blocks: contents of host memory; None if only the device accesses them.
        eviction: eviction policy of prefixes; None for least recently used.
        make_connectors: creates the tiers below host memory; None for no tiers.
    """

    prefixes: PrefixCacheManager | None
    host: HostTier | None
    held: PinnedForRead | None
    prefetcher: HostPrefetcher | None
    connectors: tuple[ConnectorTier, ...]
    states: StateSlots | None
    swapping: Swapper | None
    windows: SlidingWindows | None
    limiter: PoolLimiter
    placement: RankPlacement | None

    def __init__(
        self,
        geometry: Geometry,
        *,
        caches_prefixes: bool = True,
        max_cached_tokens: int | None = None,
        host_blocks: HostBlocks | None = None,
        eviction: Eviction | None = None,
        make_connectors: Callable[[HostTier], tuple[ConnectorTier, ...]] | None = None,
    ) -> None:
        self.num_blocks = geometry.num_blocks
        self.block_size = geometry.block_size
        self._geometry = geometry
        self._reaches = geometry.reaches
        self.states = None
        if geometry.state_bytes:
            self.states = StateSlots(geometry.num_state_slots, geometry.num_state_checkpoints)
            caches_prefixes = caches_prefixes and geometry.state_checkpoint_interval > 0
        self._ops = BlockCopyPlan()
        self.counts = self._ops.counts
        num_host_blocks = geometry.num_host_blocks
        if self.states is not None and not geometry.num_state_checkpoints:
            num_host_blocks = 0  # swapped sequences find no slots, and no prefix is cached
        self._eviction = eviction
        in_host = None if eviction is None or not caches_prefixes else eviction.free_list(num_host_blocks, self._load_s)
        changes = KVEventRecorder()
        self._host = HostTier(
            num_host_blocks, self.block_size, self._ops, blocks=host_blocks, ranked=in_host, changes=changes
        )
        self.host = self._host if num_host_blocks else None
        self.connectors = () if make_connectors is None or not caches_prefixes else make_connectors(self._host)
        self.prefixes = self.held = self.prefetcher = self.swapping = self.windows = None
        if caches_prefixes:
            self.prefixes = PrefixCacheManager(
                geometry,
                self._host,
                self._ops,
                max_tokens=max_cached_tokens,
                ranked=None if eviction is None else eviction.free_list(self.num_blocks, self._from_below_s),
                changes=changes,
                connectors=self.connectors,
                states=self.states,
            )
            self.held = PinnedForRead(self.prefixes)
            if num_host_blocks:
                self.prefetcher = HostPrefetcher(self.prefixes, self._host, self._ops, geometry.bytes_per_block)
            for connector in self.connectors:
                connector.connect(self.prefixes, self._ops)
            self._pool = self.prefixes.pool
        else:
            self._pool = BlockPool(num_blocks=self.num_blocks, block_size=self.block_size, dp_size=geometry.dp_size)
        self.limiter = PoolLimiter(self._pool)
        self.placement = MostFreeRank(self, self._pool) if geometry.dp_size > 1 else None
        self._needs = BlockDemand(self._pool, self._reaches)
        if any(reach.num_seen is not None for reach in self._reaches):
            self.windows = SlidingWindows(self._pool, self._reaches)
        if num_host_blocks:
            self.swapping = Swapper(
                self._pool, self._host.pool, self._ops, self._needs.for_running, self.prefixes, self.states
            )

    def _from_below_s(self, key: BlockHash) -> float | None:
        """Return the seconds to load a block from host memory or a connector; None if neither stores it."""
        if self._eviction is not None and key in self._host:
            return self._eviction.costs.fetch_s
        return self._load_s(key)

    def _load_s(self, key: BlockHash) -> float | None:
        """Return the seconds to load a block from a connector; None if none stores it."""
        return next((s for connector in self.connectors if (s := connector.block_s(key)) is not None), None)

    @property
    def limit(self) -> int:
        return self.limiter.limit

    def can_admit(self, group: SequenceGroup, num_spare_blocks: int) -> bool:
        match = None if self.prefixes is None else self.prefixes.match(group)
        needed = self._needs.to_admit(group, match) + num_spare_blocks
        return self._pool.can_allocate(needed, group.live[0].kv.rank)

    def admit(self, group: SequenceGroup) -> int:
        num_tokens = 0 if self.prefixes is None else self.prefixes.admit(group)
        group.runnable[0].set_num_computed_tokens(num_tokens)
        return num_tokens

    def num_outstanding_blocks(self, group: SequenceGroup) -> int:
        return self._needs.for_running(group, [sequence.kv.tables for sequence in group.live], self._pool)

    def can_grow(self, shares: Shares) -> bool:
        # Try an upper bound first, which suffices unless the pool is nearly full: a copy, a partial block and the full
        # blocks for each.
        if self._pool.dp_size == 1:
            return self._can_grow(shares, 0)
        of_ranks: dict[int, Shares] = {}
        for share in shares:
            of_ranks.setdefault(share[0].kv.rank, []).append(share)
        return all(self._can_grow(of_rank, rank) for rank, of_rank in of_ranks.items())

    def _can_grow(self, shares: Shares, rank: int) -> bool:
        num_kv_groups, bound = len(self._reaches), 2 * len(shares)
        for _, num_tokens in shares:
            bound += num_tokens // self.block_size
        if self._pool.can_allocate(bound * num_kv_groups, rank):
            return True
        needed = 0
        for sequence, num_tokens in shares:
            end = sequence.num_computed_tokens + num_tokens
            needed += num_kv_groups * max(0, self._pool.num_blocks_for(end) - sequence.kv.num_blocks)
        writers = [(table, sequence.num_computed_tokens) for sequence, _ in shares for table in sequence.kv.tables]
        return self._pool.can_allocate(needed + self._pool.num_copies(writers), rank)

    def grow(self, sequence: Sequence, num_tokens: int, *, are_drafts: bool = False) -> None:
        if self.states is not None and are_drafts:
            self.states.add_drafts(sequence.kv, num_tokens)
        elif self.states is not None:
            if self.prefixes is not None:
                self.prefixes.checkpoint_state(sequence)
            self.states.prepare(sequence.kv)
        start, block_size = sequence.num_computed_tokens, self.block_size
        index = start // block_size
        for table in sequence.kv.tables:
            if index < table.num_blocks:
                copied = self._pool.copy_on_write(table, index)
                if copied is not None:
                    self._ops.add(Move.COPY, *copied)
                    self.counts.copied_on_write()
            if start + num_tokens > table.num_blocks * block_size:
                missing = self._pool.num_blocks_for(start + num_tokens) - table.num_blocks
                table.extend(self._pool.allocate(missing, sequence.kv.rank))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        for table, of_child in zip(parent.kv.tables, child.kv.tables, strict=True):
            self._pool.fork(table, of_child)
        for table, of_child in zip(parent.kv.host_tables, child.kv.host_tables, strict=True):
            self._host.pool.fork(table, of_child)
        if self.states is not None:
            self.states.fork(parent.kv, child.kv)
        child.kv.place(parent.kv.rank)
        child.kv.share(parent.kv, parent.num_computed_tokens // self.block_size)
        child.set_num_computed_tokens(parent.num_computed_tokens)

    def rewind(self, sequence: Sequence) -> None:
        kv = sequence.kv
        if self.windows is not None and not self.windows.can_go_back(sequence):
            sequence.set_num_computed_tokens(
                0
            )  # blocks that the windows need again were freed: recompute from the beginning
        num_full, num_tail_tokens = divmod(sequence.num_computed_tokens, self.block_size)
        if self.prefixes is not None and num_tail_tokens and num_full < kv.num_registered_blocks:
            for table in kv.tables:
                if self._pool.ref_count(table.block_id(num_full)) == 1:  # else it is copied before it is written
                    self.prefixes.remove_block(table.block_id(num_full))
        self._pool.release(*kv.tables, num_kept=self._pool.num_blocks_for(sequence.num_computed_tokens))
        kv.rewind(num_full)

    def release(self, sequence: Sequence) -> None:
        if self.prefixes is not None:
            self.prefixes.register_full_blocks(sequence)
        self._pool.release(*sequence.kv.tables)
        self._host.pool.release(*sequence.kv.host_tables)
        if self.states is not None:
            self.states.release(sequence.kv)
        sequence.kv.registered(0)
        sequence.set_num_computed_tokens(0)

    def num_reserved_slots(self) -> int:
        return (self._pool.num_used - self.limiter.num_blocks) * self.block_size

    def num_stored_tokens(self, sequences: Iterable[Sequence], own_lens_s: I32) -> int:
        """Return the number of stored tokens: every block in use is full except the last of a table.

        A block that several tables share counts as full as the fullest of them.
        """
        empty: dict[int, int] = {}
        for sequence in sequences:
            num_tail_tokens = sequence.num_computed_tokens % self.block_size
            if num_tail_tokens:
                for table in sequence.kv.tables:
                    block_id, num_empty = table.block_id(-1), self.block_size - num_tail_tokens
                    empty[block_id] = min(empty.get(block_id, num_empty), num_empty)
        num_empty_of_own = len(self._reaches) * int(np.sum(-own_lens_s % self.block_size))
        return self.num_reserved_slots() - sum(empty.values()) - num_empty_of_own

    def can_ever_fit(self, group: SequenceGroup) -> bool:
        """Return True if the group could run alone within the limit of the pool, with all pinned prefixes kept."""
        needed = group.num_blocks_alone(self._geometry)
        num_pinned = 0 if self.prefixes is None else len(self.prefixes.pinned_blocks)
        return needed <= self.limit // self._geometry.dp_size - num_pinned

    def use(self) -> MemoryUse:
        num_cached = 0 if self.prefixes is None else self.prefixes.num_cached
        return MemoryUse(
            num_blocks=self.num_blocks,
            num_free=self._pool.num_free - num_cached,
            num_cached=num_cached,
            num_referenced=self._pool.num_used - self.limiter.num_blocks,
            num_reserved=self.limiter.num_blocks,
        )

    def marks(self) -> BlockFlags:
        none = np.zeros(0, np.int32)
        known = bytes(self.num_blocks + 1) if self.prefixes is None else bytes(self.prefixes.marks)
        pins = () if self.prefixes is None else self.prefixes.pinned_tables()
        return BlockFlags(
            cached=np.frombuffer(known, np.uint8),
            host_cached=np.frombuffer(bytes(self._host.marks), np.uint8),
            pinned=np.concatenate([none, *(table.ids_m[: table.num_blocks] for table in pins)]),
            withheld=self.limiter.table.ids_m[: self.limiter.num_blocks].copy(),
            reserved=none,
        )

    def take_ops(self) -> BlockCopyPlan:
        return self._ops.take()

    def check(self, groups: Iterable[SequenceGroup]) -> None:
        sequences = [sequence for group in groups for sequence in group.sequences]
        pinned = () if self.prefixes is None else self.prefixes.pinned_tables()
        tables = (table for sequence in sequences for table in sequence.kv.tables)
        held = () if self.held is None else self.held.tables()
        self._pool.check([*tables, *pinned, *held, self.limiter.table])
        if self.states is not None:
            self.states.check(sequence.kv for sequence in sequences)
        if self.host is not None:
            self.host.check(table for sequence in sequences for table in sequence.kv.host_tables)
        if self.prefixes is not None:
            self.prefixes.check()
        for connector in self.connectors:
            connector.check()


def make_memory(
    executor: Executor[Any, Any], options: CacheOptions, max_cached_tokens: int | None, stores: tuple[EngineStore, ...]
) -> KVCacheManager:
    """Create the KV memory that the options select, for an executor's blocks."""
    geometry, rates, blocks = executor.geometry, executor.rates, executor.host_blocks
    if geometry.state_bytes and options.kv_policy != "paged":
        raise Unsupported(f"kv_policy {options.kv_policy} has no slots for recurrent state; it must be paged")
    if options.kv_policy != "paged":
        return ContiguousKVCacheManager(geometry, options.kv_policy)

    def make_connectors(host: HostTier) -> tuple[ConnectorTier, ...]:
        return tuple(ConnectorTier(store, blocks, host, geometry, rates) for store in stores if blocks is not None)

    return PagedKVCacheManager(
        geometry,
        caches_prefixes=options.enable_prefix_caching,
        max_cached_tokens=max_cached_tokens,
        host_blocks=blocks,
        eviction=Eviction.of(options.eviction_policy, rates, geometry.block_size, geometry.bytes_per_block),
        make_connectors=make_connectors,
    )
