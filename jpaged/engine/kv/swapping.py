"""Swapping of groups: their blocks move to host memory if the pool is short, and return later.

swap out   tables  [ 7 8 9 ] [ 7 8 4 ]   homes  7>h1 8>h2 9>h3 4>h4      a shared block has one home
swap in    the reverse, into any free device blocks
"""

from __future__ import annotations

from jpaged.engine.executor import Move
from jpaged.engine.kv.blocks import BlockPool, MemoryOps
from jpaged.engine.kv.needs import Needs, Tables
from jpaged.engine.kv.prefixes import Prefixes
from jpaged.engine.sequence import Group


class Swapping:
    """Mover of whole groups between the device pool and the host pool.

    Args:
        needs: counts the blocks that groups still need.
        prefixes: registers full blocks before they are moved; None without a prefix cache.
    """

    def __init__(
        self, pool: BlockPool, host_pool: BlockPool, ops: MemoryOps, needs: Needs, prefixes: Prefixes | None
    ) -> None:
        self._pool = pool
        self._host_pool = host_pool
        self._ops = ops
        self._needs = needs
        self._prefixes = prefixes

    def can_swap_out(self, group: Group) -> bool:
        """Return True if host memory has room for all blocks of a running group."""
        blocks = {block_id for sequence in group.live for block_id in sequence.kv.block_ids()}
        return self._host_pool.can_allocate(len(blocks))

    def swap_out(self, group: Group) -> None:
        """Move a group's blocks to host memory and free the device blocks."""
        homes: dict[int, int] = {}
        for sequence in group.live:
            if self._prefixes is not None:
                self._prefixes.register_full_blocks(sequence)
            _move(sequence.kv.tables, sequence.kv.host_tables, self._host_pool, homes)
        for source, destination in homes.items():
            self._ops.add(Move.SWAP_OUT, source, destination)
        for sequence in group.live:
            self._pool.release(*sequence.kv.tables)

    def can_swap_in(self, group: Group, num_spare_blocks: int) -> bool:
        """Return True if the device can hold a swapped group and its next tokens, with num_spare_blocks left."""
        live = group.live
        tables = [table for sequence in live for table in sequence.kv.host_tables]
        needed = len({block_id for table in tables for block_id in table.block_ids()})
        needed += self._needs.to_go_on(group, [sequence.kv.host_tables for sequence in live], self._host_pool)
        writers = [(table, sequence.num_computed_tokens) for sequence in live for table in sequence.kv.host_tables]
        needed += self._host_pool.num_copies(writers)
        return self._pool.can_allocate(needed + num_spare_blocks)

    def swap_in(self, group: Group) -> None:
        """Move a group's blocks back to the device and free the host blocks."""
        homes: dict[int, int] = {}
        for sequence in group.live:
            _move(sequence.kv.host_tables, sequence.kv.tables, self._pool, homes)
            sequence.kv.registered(0)
        for source, destination in homes.items():
            self._ops.add(Move.SWAP_IN, source, destination)
        for sequence in group.live:
            self._host_pool.release(*sequence.kv.host_tables)


def _move(sources: Tables, targets: Tables, pool: BlockPool, homes: dict[int, int]) -> None:
    """Allocate blocks for the contents of a sequence's source tables, and add them to its target tables.

    Args:
        homes: source block -> target block; shared blocks have one target.
    """
    for source, target in zip(sources, targets, strict=True):
        for block_id in source.block_ids():
            if block_id in homes:
                pool.acquire(homes[block_id])
            else:
                (homes[block_id],) = pool.allocate(1)
        target.fill([homes[block_id] for block_id in source.block_ids()], source.num_dropped, source.num_sinks)
