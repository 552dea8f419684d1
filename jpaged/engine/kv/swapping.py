"""Groups in host memory: their blocks go there when the pool is short, and come back.

swap out   tables  [ 7 8 9 ] [ 7 8 4 ]   homes  7>h1 8>h2 9>h3 4>h4      a shared block has one home
swap in    the same the other way, into whatever blocks are free by then
"""

from __future__ import annotations

from jpaged.engine.executor import Move
from jpaged.engine.kv.blocks import BlockPool, MemoryOps
from jpaged.engine.kv.needs import Needs, Tables
from jpaged.engine.kv.prefixes import Prefixes
from jpaged.engine.sequence import Group


class Swapping:
    """Moves whole groups between the pool of the device and that of the host.

    Args:
        needs: counts what groups still take.
        prefixes: told of full blocks before they leave; None where nothing is cached.
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
        """Host memory has room for all blocks of a running group."""
        blocks = {block_id for sequence in group.live for block_id in sequence.kv.block_ids()}
        return self._host_pool.can_allocate(len(blocks))

    def swap_out(self, group: Group) -> None:
        """Moves a group's blocks to host memory; those on the device are free."""
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
        """A swapped group finds blocks for all that it has and the tokens it waits for, and so many are left free."""
        live = group.live
        tables = [table for sequence in live for table in sequence.kv.host_tables]
        needed = len({block_id for table in tables for block_id in table.block_ids()})
        needed += self._needs.to_go_on(group, [sequence.kv.host_tables for sequence in live], self._host_pool)
        writers = [(table, sequence.num_computed_tokens) for sequence in live for table in sequence.kv.host_tables]
        needed += self._host_pool.num_copies(writers)
        return self._pool.can_allocate(needed + num_spare_blocks)

    def swap_in(self, group: Group) -> None:
        """Moves a group's blocks back; those in host memory are free."""
        homes: dict[int, int] = {}
        for sequence in group.live:
            _move(sequence.kv.host_tables, sequence.kv.tables, self._pool, homes)
            sequence.kv.registered(0)
        for source, destination in homes.items():
            self._ops.add(Move.SWAP_IN, source, destination)
        for sequence in group.live:
            self._host_pool.release(*sequence.kv.host_tables)


def _move(sources: Tables, targets: Tables, pool: BlockPool, homes: dict[int, int]) -> None:
    """Fills a sequence's tables with new homes for the blocks of others; shared blocks keep one home."""
    for source, target in zip(sources, targets, strict=True):
        for block_id in source.block_ids():
            if block_id in homes:
                pool.acquire(homes[block_id])
            else:
                (homes[block_id],) = pool.allocate(1)
        target.fill([homes[block_id] for block_id in source.block_ids()], source.num_dropped, source.num_sinks)
