"""Number of blocks that groups need: to be admitted, to be swapped in, and for their current tokens.

A sliding window frees blocks as it moves, so its count is limited to the blocks that it holds at once. The count is
never too low.
"""

from __future__ import annotations

from collections.abc import Sequence

from jpaged.engine.kv.blocks import BlockPool, BlockTable
from jpaged.engine.kv.prefix_cache import PrefixMatch
from jpaged.engine.reach import Reach
from jpaged.engine.sequence import Group
from jpaged.engine.sequence import Sequence as TokenSequence

Tables = tuple[BlockTable, ...]
"""Block tables of one sequence, one for each KV group."""


class Needs:
    """Counter of needed blocks, without side effects.

    Args:
        pool: device blocks.
        reaches: attention window of each KV group.
    """

    def __init__(self, pool: BlockPool, reaches: Sequence[Reach]) -> None:
        self._pool = pool
        self._reaches = reaches

    def to_admit(self, group: Group, match: PrefixMatch | None) -> int:
        """Return the number of blocks that a waiting group takes from the free list, given its prefix match."""
        leader, lens = group.live[0], [sequence.num_tokens for sequence in group.live]
        needed = 0
        for kv_group, reach in enumerate(self._reaches):
            most = reach.num_blocks(leader.num_prompt_tokens, lens)
            if match is None:
                needed += most
                continue
            num_free_matched = sum(map(self._pool.is_free, match.block_ids[kv_group]))
            all_in_all = Reach(reach.block_size).num_blocks(leader.num_prompt_tokens, lens)
            needed += min(most, all_in_all - match.num_blocks + num_free_matched)
        return needed

    def to_go_on(self, group: Group, tables: Sequence[Tables], pool: BlockPool) -> int:
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

    def _of_one(self, sequence: TokenSequence, tables: Tables, pool: BlockPool) -> int:
        num_new = max(0, pool.num_blocks_for(sequence.num_tokens) - tables[0].num_blocks)
        if not num_new:
            return 0
        needed = 0
        for reach, table in zip(self._reaches, tables, strict=True):
            limit = reach.max_num_held
            needed += num_new if limit is None else min(num_new, max(0, limit - pool.num_owned(table)))
        return needed
