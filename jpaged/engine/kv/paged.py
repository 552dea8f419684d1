"""Paged KV memory: blocks on demand, shared by reference, found again by prefix, moved to host memory and back.

    device pool   blocks of live sequences, of pinned prefixes, and cached prefixes in the free list
    host pool     blocks of swapped groups, and cached prefixes that the device pool had to give up (second tier)

Composes the two pools with the prefix cache; the moves that its decisions need are gathered for the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from jpaged.engine.executor import Move
from jpaged.engine.kv.block_pool import BlockPool, BlockTable
from jpaged.engine.kv.interface import MemoryUse, Shares
from jpaged.engine.kv.prefix_cache import Key, PrefixCache, PrefixMatch, block_key
from jpaged.engine.kv.transfers import MemoryOps
from jpaged.engine.sequence import Group, Sequence
from jpaged.errors import InternalError


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """What the prefix cache may hold.

    Attributes:
        is_enabled: prefixes are cached at all.
        max_tokens: positions from here on are never cached, nor is anything of a longer prompt: with position
            embeddings that depend on the prompt's length, equal tokens have unequal keys there. None is no limit.
    """

    is_enabled: bool = True
    max_tokens: int | None = None


@dataclass(slots=True)
class MemoryCounts:
    """What memory did since the start, in tokens and blocks."""

    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_copies_on_write: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0


class PagedMemory:
    """Implements `jpaged.engine.kv.interface.KVMemory`."""

    def __init__(
        self, *, num_blocks: int, block_size: int, num_host_blocks: int = 0, prefix: PrefixOptions | None = None
    ) -> None:
        self.counts = MemoryCounts()
        self.block_size = block_size
        self._prefix = prefix or PrefixOptions()
        self._pool = BlockPool(num_blocks=num_blocks, block_size=block_size, on_reissue=self._evict)
        self._host_pool = BlockPool(num_blocks=num_host_blocks, block_size=block_size, on_reissue=self._evict_host)
        self._cache = PrefixCache(block_size)
        self._host_blocks: dict[Key, int] = {}
        self._host_keys: dict[int, Key] = {}
        self._pinned: dict[Hashable, BlockTable] = {}
        self._num_cached = 0
        self._ops = MemoryOps()

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    # --- admission --------------------------------------------------------------------------------------------------

    def can_admit(self, group: Group, num_spare_blocks: int) -> bool:
        shared = sum(not self._pool.is_free(block_id) for block_id in self._match(group).block_ids)
        return self._pool.can_allocate(self.num_outstanding_blocks(group) - shared + num_spare_blocks)

    def admit(self, group: Group) -> int:
        leader = group.runnable[0]
        match = self._match(group)
        for block_id in match.block_ids:
            self._num_cached -= self._pool.acquire(block_id)
        leader.block_table.extend(match.block_ids)
        num_restored = self._restore(group, len(match.block_ids))
        num_tokens = (len(match.block_ids) + num_restored) * self.block_size
        if match.partial_block_id is not None and not num_restored:
            leader.block_table.extend([self._copy(match.partial_block_id)])
            num_tokens += match.num_partial_tokens
        leader.num_computed_tokens = num_tokens
        leader.num_registered_blocks = num_tokens // self.block_size
        if leader.root_key is not None and group.num_cached_tokens is None:
            self.counts.num_prefix_query_tokens += leader.num_prompt_tokens
            self.counts.num_prefix_hit_tokens += num_tokens
        return num_tokens

    def num_outstanding_blocks(self, group: Group) -> int:
        return self._num_missing(group, [sequence.block_table for sequence in group.live])

    def is_being_computed(self, group: Group, running: Iterable[Group]) -> bool:
        leader = group.runnable[0]
        position = len(self._match(group).block_ids)
        if position >= min(self._num_cacheable(leader), (leader.num_prompt_tokens - 1) // self.block_size):
            return False
        key = self._keys(leader, position + 1)[position]
        for other in running:
            first = other.live[0]
            begin, end = first.num_registered_blocks, first.num_prompt_tokens // self.block_size
            if begin < end and key in self._keys(first, min(self._num_cacheable(first), end))[begin:end]:
                return True
        return False

    # --- growth -----------------------------------------------------------------------------------------------------

    def can_grow(self, shares: Shares) -> bool:
        # A bound first, which holds unless the pool is nearly full: a copy and a begun block for each, and full ones.
        bound = sum(2 + num_tokens // self.block_size for _, num_tokens in shares)
        if self._pool.can_allocate(bound):
            return True
        needed = 0
        for sequence, num_tokens in shares:
            end = sequence.num_computed_tokens + num_tokens
            needed += max(0, self._pool.num_blocks_for(end) - sequence.block_table.num_blocks)
        writers = [(sequence, sequence.block_table) for sequence, _ in shares]
        return self._pool.can_allocate(needed + self._num_copies(writers, self._pool))

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        table = sequence.block_table
        start, block_size = sequence.num_computed_tokens, self.block_size
        index = start // block_size
        if index < table.num_blocks:
            copied = self._pool.copy_on_write(table, index)
            if copied is not None:
                self._ops.add(Move.COPY, *copied)
                self.counts.num_copies_on_write += 1
        if start + num_tokens > table.num_blocks * block_size:
            missing = self._pool.num_blocks_for(start + num_tokens) - table.num_blocks
            table.extend(self._pool.allocate(missing))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self._pool.fork(parent.block_table, child.block_table)
        child.num_computed_tokens = parent.num_computed_tokens
        child.block_keys = list(parent.block_keys)
        child.num_registered_blocks = parent.num_registered_blocks
        self._host_pool.fork(parent.host_table, child.host_table)

    def register_full_blocks(self, sequence: Sequence) -> None:
        if sequence.num_computed_tokens < (sequence.num_registered_blocks + 1) * self.block_size:
            return
        num_known = min(sequence.num_computed_tokens, len(sequence.token_ids))
        num_full = min(num_known // self.block_size, self._num_cacheable(sequence))
        first = sequence.num_registered_blocks
        if first >= num_full or sequence.root_key is None:
            return
        keys = self._keys(sequence, num_full)
        for i in range(first, num_full):
            parent = keys[i - 1] if i else sequence.root_key
            tokens = sequence.token_ids[i * self.block_size : (i + 1) * self.block_size]
            self._cache.insert(sequence.block_table.block_id(i), parent, keys[i], tokens)
        sequence.num_registered_blocks = num_full

    def forget(self, sequence: Sequence) -> None:
        """Also what it was given; but pinned blocks, whoever pinned them, stay."""
        pinned = {block_id for table in self._pinned.values() for block_id in table.block_ids()}
        for key in self._keys(sequence, len(sequence.token_ids) // self.block_size):
            if key in self._host_blocks:
                del self._host_keys[self._host_blocks.pop(key)]
            block_id = self._cache.find(key) if self._cache.has_key(key) else None
            if block_id is not None and block_id not in pinned:
                self._cache.forget(block_id)
                self._num_cached -= self._pool.is_free(block_id)
        sequence.root_key = None

    def release(self, sequence: Sequence) -> None:
        self.register_full_blocks(sequence)
        self._free(sequence.block_table)
        self._host_pool.release(sequence.host_table)
        sequence.num_computed_tokens = 0
        sequence.num_registered_blocks = 0

    # --- host memory ------------------------------------------------------------------------------------------------

    def can_swap_out(self, group: Group) -> bool:
        blocks = {block_id for sequence in group.live for block_id in sequence.block_table.block_ids()}
        return self._host_pool.can_allocate(len(blocks))

    def swap_out(self, group: Group) -> None:
        homes: dict[int, int] = {}
        for sequence in group.live:
            self.register_full_blocks(sequence)
            self._move(sequence.block_table, sequence.host_table, self._host_pool, homes)
        for source, destination in homes.items():
            self._ops.add(Move.SWAP_OUT, source, destination)
        self.counts.num_swapped_out += len(homes)
        for sequence in group.live:
            self._free(sequence.block_table)

    def can_swap_in(self, group: Group, num_spare_blocks: int) -> bool:
        tables = [sequence.host_table for sequence in group.live]
        needed = len({block_id for table in tables for block_id in table.block_ids()})
        needed += self._num_missing(group, tables)
        needed += self._num_copies(list(zip(group.live, tables, strict=True)), self._host_pool)
        return self._pool.can_allocate(needed + num_spare_blocks)

    def swap_in(self, group: Group) -> None:
        homes: dict[int, int] = {}
        for sequence in group.live:
            self._move(sequence.host_table, sequence.block_table, self._pool, homes)
            sequence.num_registered_blocks = 0
        for source, destination in homes.items():
            self._ops.add(Move.SWAP_IN, source, destination)
        self.counts.num_swapped_in += len(homes)
        for sequence in group.live:
            self._host_pool.release(sequence.host_table)

    # --- pinned prefixes --------------------------------------------------------------------------------------------

    @property
    def can_cache(self) -> bool:
        return self._prefix.is_enabled

    @property
    def max_cached_tokens(self) -> int | None:
        return self._prefix.max_tokens

    def num_cacheable_blocks(self, num_prompt_tokens: int) -> int:
        """Full blocks of a prompt that may be cached."""
        limit = self._prefix.max_tokens
        is_too_long = limit is not None and num_prompt_tokens > limit
        return 0 if is_too_long or not self._prefix.is_enabled else num_prompt_tokens // self.block_size

    def pin(self, name: Hashable, sequence: Sequence) -> int:
        """Keeps the full blocks of a computed prompt under a name until `unpin`; the number of tokens kept.

        Where another block holds the same tokens it is that one which is found by its key, and pinned.
        """
        sequence.num_registered_blocks = 0
        self.register_full_blocks(sequence)
        keys = self._keys(sequence, self.num_cacheable_blocks(sequence.num_prompt_tokens))
        table = BlockTable(len(keys))
        for key in keys:
            block_id = self._cache.find(key)
            self._num_cached -= self._pool.acquire(block_id)
            table.extend([block_id])
        self._pinned[name] = table
        return len(keys) * self.block_size

    def unpin(self, name: Hashable) -> bool:
        """Lets a pinned prefix be evicted again; False when there is none of that name."""
        table = self._pinned.pop(name, None)
        if table is not None:
            self._free(table)
        return table is not None

    @property
    def num_pinned_blocks(self) -> int:
        """Different blocks that are pinned."""
        return len({block_id for table in self._pinned.values() for block_id in table.block_ids()})

    # --- facts ------------------------------------------------------------------------------------------------------

    def has_prefix(self, key: Key) -> bool:
        """A block with this key is here, on the device or in host memory. Any thread may ask.

        It is two look-ups in dicts that the engine's thread writes, each of which is whole under the interpreter's
        lock; an answer that is out of date costs a hit, never a token.
        """
        return self._cache.has_key(key) or key in self._host_blocks

    def num_reserved_slots(self) -> int:
        return self._pool.num_used * self.block_size

    def num_stored_tokens(self, holders: Iterable[Group]) -> int:
        """Every block in use is full but the last of a table; one that several tables share is as full as most say."""
        empty: dict[int, int] = {}
        for group in holders:
            for sequence in group.sequences:
                num_tail_tokens = sequence.num_computed_tokens % self.block_size
                if num_tail_tokens:
                    block_id = sequence.block_table.block_id(-1)
                    num_empty = self.block_size - num_tail_tokens
                    empty[block_id] = min(empty.get(block_id, num_empty), num_empty)
        return self.num_reserved_slots() - sum(empty.values())

    def can_ever_fit(self, group: Group) -> bool:
        """The group could run alone, with every pinned prefix in its place."""
        return self.num_blocks_alone(group) <= self.num_blocks - self.num_pinned_blocks

    def num_blocks_alone(self, group: Group) -> int:
        """Blocks that a group takes at most when it runs alone: its prompt's once, and what each row adds."""
        sampling, num_prompt_tokens = group.request.sampling, len(group.request.prompt_token_ids)
        num_shared = num_prompt_tokens // self.block_size
        num_own = self._pool.num_blocks_for(num_prompt_tokens + sampling.max_tokens) - num_shared
        return num_shared + group.num_rows * num_own

    def use(self) -> MemoryUse:
        return MemoryUse(
            num_blocks=self._pool.num_blocks,
            num_free=self._pool.num_free - self._num_cached,
            num_cached=self._num_cached,
            num_referenced=self._pool.num_used,
            num_host_blocks=self._host_pool.num_blocks,
            num_host_referenced=self._host_pool.num_used,
        )

    def take_ops(self) -> MemoryOps:
        ops, self._ops = self._ops, MemoryOps()
        return ops

    def check(self, groups: Iterable[Group]) -> None:
        sequences = [sequence for group in groups for sequence in group.sequences]
        self._pool.check([*(s.block_table for s in sequences), *self._pinned.values()])
        self._host_pool.check(sequence.host_table for sequence in sequences)
        num_cached = sum(self._pool.is_free(block_id) for block_id in self._cache.block_ids())
        if num_cached != self._num_cached:
            raise InternalError(f"{num_cached} free blocks are cached, {self._num_cached} were counted")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _num_missing(self, group: Group, tables: list[BlockTable]) -> int:
        """Blocks that a group's tables lack for the tokens that its sequences have."""
        missing = 0
        for i, (sequence, table) in enumerate(zip(group.live, tables, strict=True)):
            needed = self._pool.num_blocks_for(sequence.num_tokens)
            if group.is_forked or i == 0:
                missing += max(0, needed - table.num_blocks)
            else:  # it will share the leader's full blocks
                missing += needed - sequence.num_prompt_tokens // self.block_size
        return missing

    def _num_copies(self, writers: list[tuple[Sequence, BlockTable]], pool: BlockPool) -> int:
        """Copies that are made when each writer writes its next token: the last holder of a block keeps it."""
        shared: dict[int, int] = {}
        for sequence, table in writers:
            index = sequence.num_computed_tokens // self.block_size
            if index < table.num_blocks and pool.ref_count(table.block_id(index)) > 1:
                block_id = table.block_id(index)
                shared[block_id] = shared.get(block_id, 0) + 1
        return sum(min(count, pool.ref_count(block_id) - 1) for block_id, count in shared.items())

    def _match(self, group: Group) -> PrefixMatch:
        """What is known of the tokens that a group's leader has to run."""
        leader = group.live[0]
        if leader.root_key is None or not self._prefix.is_enabled:
            return PrefixMatch([])
        limit = self._num_leading_tokens(group)
        if self._prefix.max_tokens is not None:
            # One more than can be cached: the last token of what is matched always runs.
            limit = min(
                limit, self._prefix.max_tokens + 1 if leader.num_prompt_tokens <= self._prefix.max_tokens else 0
            )
        keys = self._keys(leader, limit // self.block_size)
        return self._cache.match(leader.root_key, keys, leader.token_ids[:limit])

    def _num_leading_tokens(self, group: Group) -> int:
        """Tokens that the leader runs alone: the prompt before a fork, everything it has where there is none."""
        leader = group.live[0]
        return len(leader.token_ids) if group.is_forked else leader.num_prompt_tokens

    def _num_cacheable(self, sequence: Sequence) -> int:
        """Blocks of a sequence that may be cached."""
        limit = self._prefix.max_tokens
        if sequence.root_key is None or not self._prefix.is_enabled:
            return 0
        if limit is None:
            return len(sequence.token_ids) // self.block_size
        if sequence.num_prompt_tokens > limit:
            return 0
        return min(limit, len(sequence.token_ids)) // self.block_size

    def _keys(self, sequence: Sequence, num_blocks: int) -> list[Key]:
        """The chain of a sequence's first num_blocks full blocks, computed once."""
        keys = sequence.block_keys
        while len(keys) < num_blocks and sequence.root_key is not None:
            i = len(keys)
            tokens = sequence.token_ids[i * self.block_size : (i + 1) * self.block_size]
            keys.append(block_key(keys[-1] if keys else sequence.root_key, tokens))
        return keys

    def _copy(self, source: int) -> int:
        (destination,) = self._pool.allocate(1)
        if destination != source:
            self._ops.add(Move.COPY, source, destination)
        return destination

    def _restore(self, group: Group, num_matched: int) -> int:
        """Brings back the blocks from the second tier that continue a match; how many."""
        leader = group.live[0]
        end = min(self._num_cacheable(leader), (self._num_leading_tokens(group) - 1) // self.block_size)
        keys = self._keys(leader, end)
        index = num_matched
        while index < end and keys[index] in self._host_blocks and self._pool.can_allocate(1):
            source = self._host_blocks[keys[index]]
            held = BlockTable(1)  # while it is read: allocating may evict another block to host memory
            self._host_pool.acquire(source)
            held.extend([source])
            (destination,) = self._pool.allocate(1)
            self._ops.add(Move.SWAP_IN, source, destination)
            self._host_pool.release(held)
            self.counts.num_swapped_in += 1
            leader.block_table.extend([destination])
            parent = keys[index - 1] if index else leader.root_key or b""
            tokens = leader.token_ids[index * self.block_size : (index + 1) * self.block_size]
            self._cache.insert(destination, parent, keys[index], tokens)
            index += 1
        return index - num_matched

    def _move(self, source: BlockTable, target: BlockTable, pool: BlockPool, homes: dict[int, int]) -> None:
        """Fills a table with new homes for the blocks of another; shared blocks keep one home."""
        for block_id in source.block_ids():
            if block_id in homes:
                pool.acquire(homes[block_id])
            else:
                (homes[block_id],) = pool.allocate(1)
            target.extend([homes[block_id]])

    def _free(self, table: BlockTable) -> None:
        self._num_cached += sum(block_id in self._cache for block_id in self._pool.release(table))

    def _evict(self, block_id: int) -> None:
        """A free block is about to be reissued: its prefix moves to the second tier while that has room."""
        key = self._cache.forget(block_id)
        if key is None:
            return
        self._num_cached -= 1
        if key in self._host_blocks or not self._host_pool.can_allocate(1):
            return
        (home,) = self._host_pool.allocate(1)
        self._host_blocks[key], self._host_keys[home] = home, key
        self._ops.add(Move.SWAP_OUT, block_id, home)
        self.counts.num_swapped_out += 1
        table = BlockTable(1)
        table.extend([home])
        self._host_pool.release(table)

    def _evict_host(self, home: int) -> None:
        key = self._host_keys.pop(home, None)
        if key is not None:
            del self._host_blocks[key]
