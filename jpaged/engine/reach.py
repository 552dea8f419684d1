"""How far the queries of a KV group see, in blocks: what a sequence has to hold, and what it holds at once at most.

full blocks   0  1  2  3  4  5  6 | 7     the block that is being filled
window        .  .  .  .  x  x  x   x     num_seen = 3: nobody who comes later sees the first four
and a first   x  .  .  .  x  x  x   x     num_sinks = 1: what is lossy sees the first tokens as well
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """What the layers of one KV group see.

    Attributes:
        block_size: token slots in a block.
        num_seen: full blocks before the one that a query is in; None is all of them.
        most_at_once: tokens that a step computes at most.
        num_sinks: blocks at the beginning that everybody sees besides; none where all are seen.
    """

    block_size: int
    num_seen: int | None = None
    most_at_once: int = 0
    num_sinks: int = 0

    @classmethod
    def of(cls, window: int | None, block_size: int, most_at_once: int, num_sink_tokens: int = 0) -> Reach:
        """The reach of a window, of which a query's own token is one, and of so many first tokens besides."""
        if window is None:
            return cls(block_size, None, most_at_once)
        return cls(block_size, -(-(window - 1) // block_size), most_at_once, -(-num_sink_tokens // block_size))

    @property
    def max_num_held(self) -> int | None:
        """Blocks that a sequence holds at most, whatever its length: while it computes as many as a step may."""
        if self.num_seen is None:
            return None
        return self.num_sinks + self.num_seen + (self.most_at_once + 2 * self.block_size - 2) // self.block_size

    def first_block(self, num_full: int) -> int:
        """The first block from which on any later query sees all, once so many are full."""
        return 0 if self.num_seen is None else max(0, num_full - self.num_seen)

    def places(self, first: int, num_blocks: int) -> Sequence[int]:
        """The places of so many blocks from `first` on, and those at the beginning that everybody sees."""
        if not self.num_sinks:
            return range(first, num_blocks)
        return [*range(min(self.num_sinks, first)), *range(first, num_blocks)]

    def seen(self, num_full: int) -> Sequence[int]:
        """The places of so many full blocks that are seen from behind them, in order."""
        return self.places(self.first_block(num_full), num_full)

    def above(self, index: int) -> int | None:
        """The place of the last block in front of one that whoever sees that one sees too; None where there is none."""
        place = (index if self.num_seen is None else min(index, self.num_sinks)) - 1
        return place if place >= 0 else None

    def num_held(self, num_blocks: int) -> int:
        """Blocks at most of so many that one sequence has filled or begun to fill."""
        limit = self.max_num_held
        return num_blocks if limit is None else min(num_blocks, limit)

    def num_kept(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds while it decodes."""
        num_dropped = max(0, self.first_block(num_tokens // self.block_size) - self.num_sinks)
        return -(-num_tokens // self.block_size) - num_dropped

    def num_blocks(self, num_prompt_tokens: int, lens: Iterable[int]) -> int:
        """Blocks at most of sequences of these lengths, at one time: they compute their prompt once, and share it."""
        num_shared = num_prompt_tokens // self.block_size
        own = [-(-length // self.block_size) - num_shared for length in lens]
        if self.num_seen is None:
            return num_shared + sum(own)
        if len(own) == 1:
            return self.num_held(num_shared + own[0])
        # Together they compute no more at once than one would; each of them begins and ends within a block.
        own_sinks = max(0, self.num_sinks - num_shared)
        at_once = len(own) * (own_sinks + self.num_seen + 2) + self.most_at_once // self.block_size + 1
        forked = min(num_shared, self.num_sinks + self.num_seen) + min(sum(map(self.num_held, own)), at_once)
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
