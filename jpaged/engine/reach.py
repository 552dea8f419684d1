"""How far the queries of a KV group see, in blocks: what a sequence has to hold, and what it holds at once at most.

full blocks   0  1  2  3  4  5  6 | 7     the block that is being filled
window        .  .  .  .  x  x  x   x     num_seen = 3: nobody who comes later sees the first four
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """What the layers of one KV group see.

    Attributes:
        block_size: token slots in a block.
        num_seen: full blocks before the one that a query is in; None is all of them.
        most_at_once: tokens that a step computes at most.
    """

    block_size: int
    num_seen: int | None = None
    most_at_once: int = 0

    @classmethod
    def of(cls, window: int | None, block_size: int, most_at_once: int) -> Reach:
        """The reach of a window, of which a query's own token is one."""
        return cls(block_size, None if window is None else -(-(window - 1) // block_size), most_at_once)

    @property
    def max_num_held(self) -> int | None:
        """Blocks that a sequence holds at most, whatever its length: while it computes as many as a step may."""
        if self.num_seen is None:
            return None
        return self.num_seen + (self.most_at_once + 2 * self.block_size - 2) // self.block_size

    def first_block(self, num_full: int) -> int:
        """The first block that any later query sees, once so many are full."""
        return 0 if self.num_seen is None else max(0, num_full - self.num_seen)

    def num_held(self, num_blocks: int) -> int:
        """Blocks at most of so many that one sequence has filled or begun to fill."""
        limit = self.max_num_held
        return num_blocks if limit is None else min(num_blocks, limit)

    def num_kept(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds while it decodes."""
        return -(-num_tokens // self.block_size) - self.first_block(num_tokens // self.block_size)

    def num_blocks(self, num_prompt_tokens: int, lens: Iterable[int]) -> int:
        """Blocks at most of sequences of these lengths, at one time: they compute their prompt once, and share it."""
        num_shared = num_prompt_tokens // self.block_size
        own = [-(-length // self.block_size) - num_shared for length in lens]
        if self.num_seen is None:
            return num_shared + sum(own)
        if len(own) == 1:
            return self.num_held(num_shared + own[0])
        # Together they compute no more at once than one would; each of them begins and ends within a block.
        at_once = len(own) * (self.num_seen + 2) + self.most_at_once // self.block_size + 1
        forked = min(num_shared, self.num_seen) + min(sum(map(self.num_held, own)), at_once)
        return max(self.num_held(-(-num_prompt_tokens // self.block_size)), forked)


@dataclass(frozen=True, slots=True)
class KeyLengths:
    """Up to which lengths keys of a model are what they are; None is any.

    Attributes:
        max_cached_tokens: positions from here on are never shared by prefix.
        outgrown_len: tokens beyond which all keys of a sequence are computed again.
    """

    max_cached_tokens: int | None = None
    outgrown_len: int | None = None
