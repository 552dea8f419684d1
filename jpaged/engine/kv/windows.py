"""Takes back the blocks of a sequence that no later query sees, as the windows of its KV groups move on.

a window   [ . ][ . ][ 7 ][ 4 ][ 9 ]      its places stay, and hold the null block; who shares the blocks keeps them
after      [ . ][ . ][ . ][ 4 ][ 9 ]      or finds them again by their keys, until they are reissued
lossy      [ 2 ][ . ][ . ][ 4 ][ 9 ]      the first tokens are seen from everywhere, and stay
"""

from __future__ import annotations

from collections.abc import Sequence

from jpaged.engine.kv.blocks import BlockPool
from jpaged.engine.reach import Reach
from jpaged.engine.sequence import Sequence as TokenSequence


class Windows:
    """Drops what is out of reach.

    Args:
        pool: the blocks of the device.
        reaches: of each KV group, at least one of which has a window.
    """

    def __init__(self, pool: BlockPool, reaches: Sequence[Reach]) -> None:
        self._pool = pool
        self._reaches = reaches

    def move_on(self, sequence: TokenSequence) -> None:
        """Takes back what nobody sees who comes behind a running sequence's computed tokens."""
        kv = sequence.kv
        for reach, table in zip(self._reaches, kv.tables, strict=True):
            first = reach.first_block(sequence.num_computed_tokens // reach.block_size)
            if first > max(table.num_dropped, reach.num_sinks):
                self._pool.drop(table, first, reach.num_sinks)

    def can_go_back(self, sequence: TokenSequence) -> bool:
        """Whether everything is there that who comes behind a sequence's computed tokens sees."""
        return all(
            table.num_dropped <= reach.first_block(sequence.num_computed_tokens // reach.block_size)
            for reach, table in zip(self._reaches, sequence.kv.tables, strict=True)
        )
