"""Blocks that nobody may have: a pool that is made smaller while it is in use, and larger again.

    N = 12, limit 8    [ 7 8 9 . ][ . . . . ][ x x x x ]     free + cached + referenced + aside = N

Blocks are set aside as they come free, the last of the pool first; those that are cached lose what they hold.
"""

from __future__ import annotations

from jpaged.engine.kv.blocks import BlockPool, BlockTable


class Aside:
    """Sets blocks aside.

    Attributes:
        limit: blocks that requests may have, once all others have come free.
        table: the blocks that are set aside.
        num_blocks: how many these are.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.limit = pool.num_blocks
        self.table = BlockTable(pool.num_blocks)
        self.num_blocks = 0

    def leave(self, limit: int) -> None:
        """Leaves so many blocks to requests: gives back what is too much, and sets aside what is free of the rest."""
        self.limit = limit
        num_aside = self._pool.num_blocks - limit
        if num_aside < self.num_blocks:
            self._pool.release(self.table, num_kept=num_aside)
        elif num_aside > self.num_blocks:
            self.table.extend(self._pool.allocate_last(num_aside - self.num_blocks))
        self.num_blocks = self.table.num_blocks
