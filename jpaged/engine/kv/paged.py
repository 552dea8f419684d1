"""Paged KV memory: blocks on demand, shared by reference, copied when written.

    device pool   blocks of live sequences, of pinned prefixes, and cached prefixes in the free list
    host pool     blocks of swapped groups, and cached prefixes that the device pool had to give up

Composes the two pools with `Prefixes` and `Swapping`; the moves that their decisions need are gathered for the step.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jpaged.engine.executor import I32, Geometry, Move
from jpaged.engine.kv.blocks import BlockPool, MemoryOps
from jpaged.engine.kv.interface import MemoryUse, Shares
from jpaged.engine.kv.prefixes import HostTier, Prefixes
from jpaged.engine.kv.swapping import Swapping
from jpaged.engine.sequence import Group, Sequence


class PagedMemory:
    """Implements `jpaged.engine.kv.interface.KVMemory`.

    Args:
        caches_prefixes: there are `prefixes`, up to max_cached_tokens.
    """

    prefixes: Prefixes | None
    swapping: Swapping | None

    def __init__(
        self, geometry: Geometry, *, caches_prefixes: bool = True, max_cached_tokens: int | None = None
    ) -> None:
        self.num_blocks = geometry.num_blocks
        self.block_size = geometry.block_size
        self._ops = MemoryOps()
        self.counts = self._ops.counts
        self._host = HostTier(geometry.num_host_blocks, self.block_size, self._ops)
        self.prefixes = self.swapping = None
        if caches_prefixes:
            self.prefixes = Prefixes(self.num_blocks, self._host, self._ops, max_tokens=max_cached_tokens)
            self._pool = self.prefixes.pool
        else:
            self._pool = BlockPool(num_blocks=self.num_blocks, block_size=self.block_size)
        if geometry.num_host_blocks:
            self.swapping = Swapping(self._pool, self._host.pool, self._ops, self.prefixes)

    def can_admit(self, group: Group, num_spare_blocks: int) -> bool:
        known = [] if self.prefixes is None else self.prefixes.match(group).block_ids
        shared = sum(not self._pool.is_free(block_id) for block_id in known)
        return self._pool.can_allocate(self.num_outstanding_blocks(group) - shared + num_spare_blocks)

    def admit(self, group: Group) -> int:
        num_tokens = 0 if self.prefixes is None else self.prefixes.admit(group)
        group.runnable[0].resume_at(num_tokens)
        return num_tokens

    def num_outstanding_blocks(self, group: Group) -> int:
        return group.num_missing_blocks([sequence.kv.table for sequence in group.live], self._pool)

    def can_grow(self, shares: Shares) -> bool:
        # A bound first, which holds unless the pool is nearly full: a copy and a begun block for each, and full ones.
        bound = 2 * len(shares)
        for _, num_tokens in shares:
            bound += num_tokens // self.block_size
        if self._pool.can_allocate(bound):
            return True
        needed = 0
        for sequence, num_tokens in shares:
            end = sequence.num_computed_tokens + num_tokens
            needed += max(0, self._pool.num_blocks_for(end) - sequence.kv.table.num_blocks)
        writers = [(sequence.kv.table, sequence.num_computed_tokens) for sequence, _ in shares]
        return self._pool.can_allocate(needed + self._pool.num_copies(writers))

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        table = sequence.kv.table
        start, block_size = sequence.num_computed_tokens, self.block_size
        index = start // block_size
        if index < table.num_blocks:
            copied = self._pool.copy_on_write(table, index)
            if copied is not None:
                self._ops.add(Move.COPY, *copied)
                self.counts.copied_on_write()
        if start + num_tokens > table.num_blocks * block_size:
            missing = self._pool.num_blocks_for(start + num_tokens) - table.num_blocks
            table.extend(self._pool.allocate(missing))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self._pool.fork(parent.kv.table, child.kv.table)
        self._host.pool.fork(parent.kv.host_table, child.kv.host_table)
        child.kv.share(parent.kv, parent.num_computed_tokens // self.block_size)
        child.resume_at(parent.num_computed_tokens)

    def rewind(self, sequence: Sequence) -> None:
        kv = sequence.kv
        num_full, num_tail_tokens = divmod(sequence.num_computed_tokens, self.block_size)
        if self.prefixes is not None and num_tail_tokens and num_full < kv.num_registered_blocks:
            block_id = kv.table.block_id(num_full)
            if self._pool.ref_count(block_id) == 1:  # else it is copied before it is written
                self.prefixes.forget_block(block_id)
        self._pool.release(kv.table, self._pool.num_blocks_for(sequence.num_computed_tokens))
        kv.rewind(num_full)

    def release(self, sequence: Sequence) -> None:
        if self.prefixes is not None:
            self.prefixes.register_full_blocks(sequence)
        self._pool.release(sequence.kv.table)
        self._host.pool.release(sequence.kv.host_table)
        sequence.kv.registered(0)
        sequence.resume_at(0)

    def num_reserved_slots(self) -> int:
        return self._pool.num_used * self.block_size

    def num_stored_tokens(self, sequences: Iterable[Sequence], own_lens_s: I32) -> int:
        """Every block in use is full but the last of a table; one that several tables share is as full as most say."""
        empty: dict[int, int] = {}
        for sequence in sequences:
            num_tail_tokens = sequence.num_computed_tokens % self.block_size
            if num_tail_tokens:
                block_id = sequence.kv.table.block_id(-1)
                num_empty = self.block_size - num_tail_tokens
                empty[block_id] = min(empty.get(block_id, num_empty), num_empty)
        num_empty_of_own = int(np.sum(-own_lens_s % self.block_size))
        return self.num_reserved_slots() - sum(empty.values()) - num_empty_of_own

    def can_ever_fit(self, group: Group) -> bool:
        """The group could run alone, with every pinned prefix in its place."""
        num_pinned = 0 if self.prefixes is None else len(self.prefixes.pinned_blocks)
        return group.num_blocks_alone(self.block_size) <= self.num_blocks - num_pinned

    def use(self) -> MemoryUse:
        num_cached = 0 if self.prefixes is None else self.prefixes.num_cached
        return MemoryUse(
            num_blocks=self.num_blocks,
            num_free=self._pool.num_free - num_cached,
            num_cached=num_cached,
            num_referenced=self._pool.num_used,
        )

    def take_ops(self) -> MemoryOps:
        return self._ops.take()

    def check(self, groups: Iterable[Group]) -> None:
        sequences = [sequence for group in groups for sequence in group.sequences]
        pinned = () if self.prefixes is None else self.prefixes.pinned_tables()
        self._pool.check([*(sequence.kv.table for sequence in sequences), *pinned])
        self._host.pool.check(sequence.kv.host_table for sequence in sequences)
        if self.prefixes is not None:
            self.prefixes.check()
