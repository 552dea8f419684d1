"""Swapping of groups: their blocks move to host memory if the pool is short, and return later.

swap out   tables  [ 7 8 9 ] [ 7 8 4 ]   destinations  7>h1 8>h2 9>h3 4>h4      a shared block has one
swap in    the reverse, into any free device blocks

Recurrent state stays in its slot on the device.

Sliding windows: frees the blocks of a sequence that no later query attends to.

a window   [ . ][ . ][ 7 ][ 4 ][ 9 ]      its entries stay and hold the null block; sequences that share the blocks keep
after      [ . ][ . ][ . ][ 4 ][ 9 ]      them, and their keys stay cached until they are reissued
sinks      [ 2 ][ . ][ . ][ 4 ][ 9 ]      attention sinks, the first tokens, are always visible, and stay

Run-time limit of the pool: blocks are withheld to shrink it and released to grow it again.

    N = 12, limit 8    [ 7 8 9 . ][ . . . . ][ x x x x ]     free + cached + referenced + reserved = N

Blocks are withheld as they become free, highest ids first. A withheld block loses its cached prefix.

Prefetch of a waiting prompt's host blocks over several steps, so that no running step is delayed by the whole copy.

step 0    [h0 h1 h2]                    the group waits; copied blocks are cached and free, like those of past requests
step 1              [h3 h4 h5]
step 2                        [h6 h7]   few enough for one step: the group is admitted, which copies them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jpaged.engine.executor import Move
from jpaged.engine.executor.io import WindowSpec
from jpaged.engine.kv_cache.blocks import BlockCopyPlan, BlockPool, BlockTable, StateSlots, group_block_hash
from jpaged.engine.kv_cache.offload.host import HostTier
from jpaged.engine.kv_cache.prefix_cache import PrefixCacheManager, keys_seen
from jpaged.engine.sequence import Sequence as TokenSequence
from jpaged.engine.sequence import SequenceGroup

Tables = tuple[BlockTable, ...]
"""Block tables of one sequence, one for each KV group."""


class Swapper:
    """Mover of whole groups between the device pool and the host pool.

    Args:
        count_missing: returns the number of blocks that a group still needs (`BlockDemand.for_running`).
        prefixes: registers full blocks before they are moved; None without a prefix cache.
        states: slots of recurrent state, which swapped sequences keep; None without recurrent layers.
    """

    def __init__(
        self,
        pool: BlockPool,
        host_pool: BlockPool,
        ops: BlockCopyPlan,
        count_missing: Callable[[SequenceGroup, Sequence[Tables], BlockPool], int],
        prefixes: PrefixCacheManager | None,
        states: StateSlots | None = None,
    ) -> None:
        self._states = states
        self._pool = pool
        self._host_pool = host_pool
        self._ops = ops
        self._count_missing = count_missing
        self._prefixes = prefixes

    def can_swap_out(self, group: SequenceGroup) -> bool:
        """Return True if host memory has room for a running group, and its states can keep their slots."""
        if self._states is not None and not self._states.can_swap_out(len(group.live)):
            return False
        blocks = {block_id for sequence in group.live for block_id in sequence.kv.block_ids()}
        return self._host_pool.can_allocate(len(blocks))

    def swap_out(self, group: SequenceGroup) -> None:
        """Move a group's blocks to host memory and free the device blocks."""
        destinations: dict[int, int] = {}
        for sequence in group.live:
            if self._prefixes is not None:
                self._prefixes.register_full_blocks(sequence)
            _move(sequence.kv.tables, sequence.kv.host_tables, self._host_pool, destinations)
            if self._states is not None:
                self._states.swap_out(sequence.kv)
        for source, destination in destinations.items():
            self._ops.add(Move.SWAP_OUT, source, destination)
        for sequence in group.live:
            self._pool.release(*sequence.kv.tables)

    def can_swap_in(self, group: SequenceGroup, num_spare_blocks: int) -> bool:
        """Return True if the device can hold a swapped group and its next tokens, with num_spare_blocks left."""
        live = group.live
        tables = [table for sequence in live for table in sequence.kv.host_tables]
        needed = len({block_id for table in tables for block_id in table.block_ids()})
        needed += self._count_missing(group, [one.kv.host_tables for one in live], self._host_pool)
        writers = [(table, sequence.num_computed_tokens) for sequence in live for table in sequence.kv.host_tables]
        needed += self._host_pool.num_copies(writers)
        return self._pool.can_allocate(needed + num_spare_blocks)

    def swap_in(self, group: SequenceGroup) -> None:
        """Move a group's blocks back to the device and free the host blocks."""
        destinations: dict[int, int] = {}
        for sequence in group.live:
            _move(sequence.kv.host_tables, sequence.kv.tables, self._pool, destinations)
            if self._states is not None:
                self._states.swap_in(sequence.kv)
            sequence.kv.registered(0)
        for source, destination in destinations.items():
            self._ops.add(Move.SWAP_IN, source, destination)
        for sequence in group.live:
            self._host_pool.release(*sequence.kv.host_tables)


def _move(sources: Tables, targets: Tables, pool: BlockPool, destinations: dict[int, int]) -> None:
    """Allocate blocks for the contents of a sequence's source tables, and add them to its target tables.

    Args:
        destinations: source block -> target block; shared blocks have one target.
    """
    for source, target in zip(sources, targets, strict=True):
        for block_id in source.block_ids():
            if block_id in destinations:
                pool.acquire(destinations[block_id])
            else:
                (destinations[block_id],) = pool.allocate(1)
        target.fill([destinations[block_id] for block_id in source.block_ids()], source.num_dropped, source.num_sinks)


class SlidingWindows:
    """Release of out-of-window blocks.

    Args:
        pool: device blocks.
        reaches: attention window of each KV group, at least one of which is a sliding window.
    """

    def __init__(self, pool: BlockPool, reaches: Sequence[WindowSpec]) -> None:
        self._pool = pool
        self._reaches = reaches

    def free_out_of_window(self, sequence: TokenSequence) -> None:
        """Free the blocks of a running sequence that tokens after its computed ones cannot attend to."""
        kv = sequence.kv
        for reach, table in zip(self._reaches, kv.tables, strict=True):
            first = reach.first_block(sequence.num_computed_tokens // reach.block_size)
            if first > max(table.num_dropped, reach.num_sinks):
                self._pool.drop(table, first, reach.num_sinks)

    def can_go_back(self, sequence: TokenSequence) -> bool:
        """Return True if all blocks that the token after the computed ones attends to are still there."""
        return all(
            table.num_dropped <= reach.first_block(sequence.num_computed_tokens // reach.block_size)
            for reach, table in zip(self._reaches, sequence.kv.tables, strict=True)
        )


class PoolLimiter:
    """Limiter of the usable pool, which withholds free blocks.

    Attributes:
        limit: blocks that requests may use once enough blocks have become free.
        table: the withheld blocks.
        num_blocks: number of withheld blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.limit = pool.num_blocks
        self.table = BlockTable(pool.num_blocks)
        self.num_blocks = 0

    def leave(self, limit: int) -> None:
        """Set the limit: release withheld blocks above it, or withhold the free blocks that are missing."""
        self.limit = limit
        num_reserved = self._pool.num_blocks - limit
        if num_reserved < self.num_blocks:
            self._pool.release(self.table, num_kept=num_reserved)
        elif num_reserved > self.num_blocks:
            self.table.extend(self._pool.allocate_last(num_reserved - self.num_blocks))
        self.num_blocks = self.table.num_blocks


MAX_PREFETCH_BYTES = 64 << 20
"""Maximum bytes copied per step next to running rows: some milliseconds of copying."""


class HostPrefetcher:
    """Prefetcher for prompts that are next to be admitted and have room. Only the engine thread calls it.

    Args:
        bytes_per_block: size of a device block.
    """

    def __init__(self, prefixes: PrefixCacheManager, host: HostTier, ops: BlockCopyPlan, bytes_per_block: int) -> None:
        self._prefixes = prefixes
        self._host = host
        self._ops = ops
        self._bytes_per_block = bytes_per_block
        self._step = self._num_in_step = 0
        self._group: SequenceGroup | None = None
        self._num_steps_left = 0

    def brings(self, group: SequenceGroup) -> bool:
        """Copy a part of a group's host blocks; return False if the rest is small enough to copy at admission.

        A group whose blocks are evicted as fast as they are copied waits at most one step per part.
        """
        if not self._host.blocks:
            return False
        most = max(1, MAX_PREFETCH_BYTES // self._bytes_per_block)
        if self._step != self._ops.num_taken:
            self._step, self._num_in_step = self._ops.num_taken, 0
        prefixes = self._prefixes
        chain = prefixes.lookup_keys(group)
        num_blocks = prefixes.num_loadable(chain)
        seen = keys_seen(chain, num_blocks, prefixes.reaches)
        num_away = sum(prefixes.cache.find(key) is None for key in seen)
        if self._group is not group:
            self._group, self._num_steps_left = group, -(-num_away // most)
        if self._num_in_step + num_away <= most or self._num_steps_left == 0:
            self._group = None
            self._num_in_step += num_away
            return False
        room = most - self._num_in_step
        if room > 0:
            self._num_steps_left -= 1
            self._num_in_step = most
            prefixes.touch(seen)
            self._bring(group, num_blocks, room)
        return True

    def _bring(self, group: SequenceGroup, num_blocks: int, room: int) -> None:
        """Copy the first `room` blocks that are not on the device, in prompt order."""
        prefixes, leader, chain = self._prefixes, group.live[0], self._prefixes.lookup_keys(group)
        places = sorted(
            (index, kv_group)
            for kv_group, reach in enumerate(prefixes.reaches)
            for index in reach.seen(num_blocks)
            if prefixes.cache.find(group_block_hash(chain[index], kv_group)) is None
        )[:room]
        keys = [group_block_hash(chain[index], kv_group) for index, kv_group in places]
        seen = [self._host.times_seen(key) for key in keys]  # admission will find them on the device
        table = BlockTable(len(keys))
        table.extend(self._host.load(keys, prefixes.pool))
        for (index, kv_group), block_id, times_seen in zip(places, table.block_ids(), seen, strict=True):
            prefixes.cache.insert_in_group(leader, index, block_id, chain[index], kv_group, times_seen=times_seen)
        prefixes.pool.release(table)
        self._ops.counts.brought_back(prefixes.pool.block_size * len(keys) // len(prefixes.reaches))
