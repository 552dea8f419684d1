"""Run-time limit of the pool: blocks are withheld to shrink it and released to grow it again.

    N = 12, limit 8    [ 7 8 9 . ][ . . . . ][ x x x x ]     free + cached + referenced + aside = N

Blocks are withheld as they become free, highest ids first. A withheld block loses its cached prefix.
"""

from __future__ import annotations

from jpaged.engine.kv.blocks import BlockPool, BlockTable


class Aside:
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
        num_aside = self._pool.num_blocks - limit
        if num_aside < self.num_blocks:
            self._pool.release(self.table, num_kept=num_aside)
        elif num_aside > self.num_blocks:
            self.table.extend(self._pool.allocate_last(num_aside - self.num_blocks))
        self.num_blocks = self.table.num_blocks
