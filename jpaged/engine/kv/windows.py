"""Sliding windows: frees the blocks of a sequence that no later query attends to.

a window   [ . ][ . ][ 7 ][ 4 ][ 9 ]      its entries stay and hold the null block; sequences that share the blocks keep
after      [ . ][ . ][ . ][ 4 ][ 9 ]      them, and their keys stay cached until they are reissued
sinks      [ 2 ][ . ][ . ][ 4 ][ 9 ]      attention sinks, the first tokens, are always visible, and stay
"""

from __future__ import annotations

from collections.abc import Sequence

from jpaged.engine.kv.blocks import BlockPool
from jpaged.engine.reach import Reach
from jpaged.engine.sequence import Sequence as TokenSequence


class Windows:
    """Release of out-of-window blocks.

    Args:
        pool: device blocks.
        reaches: attention window of each KV group, at least one of which is a sliding window.
    """

    def __init__(self, pool: BlockPool, reaches: Sequence[Reach]) -> None:
        self._pool = pool
        self._reaches = reaches

    def move_on(self, sequence: TokenSequence) -> None:
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
