"""Sliding windows of a KV group in blocks: which blocks a sequence must hold, and how many at most at one time.

full blocks   0  1  2  3  4  5  6 | 7     the block that is being filled
window        .  .  .  .  x  x  x   x     num_seen = 3: no later token sees the first four blocks
with sinks    x  .  .  .  x  x  x   x     num_sinks = 1: attention sinks, the first tokens stay visible
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """Attention window of the layers of one KV group, in blocks.

    Attributes:
        block_size: token slots in a block.
        num_seen: full blocks before the one that a query is in; None for all of them.
        most_at_once: maximum number of tokens that a step computes.
        num_sinks: blocks at the beginning that stay visible (attention sinks); 0 if all blocks are visible.
    """

    block_size: int
    num_seen: int | None = None
    most_at_once: int = 0
    num_sinks: int = 0

    @classmethod
    def of(cls, window: int | None, block_size: int, most_at_once: int, num_sink_tokens: int = 0) -> Reach:
        """Return the reach of a window, which includes the query's own token, and of the sink tokens."""
        if window is None:
            return cls(block_size, None, most_at_once)
        return cls(block_size, -(-(window - 1) // block_size), most_at_once, -(-num_sink_tokens // block_size))

    @property
    def max_num_held(self) -> int | None:
        """Return the maximum number of blocks that a sequence of any length holds; None for no bound.

        It is reached while the sequence computes `most_at_once` tokens in a step.
        """
        if self.num_seen is None:
            return None
        return self.num_sinks + self.num_seen + (self.most_at_once + 2 * self.block_size - 2) // self.block_size

    def first_block(self, num_full: int) -> int:
        """Return the first block that later queries may still see, once `num_full` blocks are full."""
        return 0 if self.num_seen is None else max(0, num_full - self.num_seen)

    def places(self, first: int, num_blocks: int) -> Sequence[int]:
        """Return the indices of the visible blocks: the sinks and the range from `first` to `num_blocks`."""
        if not self.num_sinks:
            return range(first, num_blocks)
        return [*range(min(self.num_sinks, first)), *range(first, num_blocks)]

    def seen(self, num_full: int) -> Sequence[int]:
        """Return the indices of the blocks that the token after `num_full` full blocks sees, in order."""
        return self.places(self.first_block(num_full), num_full)

    def above(self, index: int) -> int | None:
        """Return the index of the nearest earlier block visible to every query that sees block `index`, or None."""
        place = (index if self.num_seen is None else min(index, self.num_sinks)) - 1
        return place if place >= 0 else None

    def num_held(self, num_blocks: int) -> int:
        """Return the maximum number of blocks that a sequence holds of the `num_blocks` that it has used."""
        limit = self.max_num_held
        return num_blocks if limit is None else min(num_blocks, limit)

    def num_kept(self, num_tokens: int) -> int:
        """Return the number of blocks that a sequence of `num_tokens` tokens holds while it decodes."""
        num_dropped = max(0, self.first_block(num_tokens // self.block_size) - self.num_sinks)
        return -(-num_tokens // self.block_size) - num_dropped

    def num_blocks(self, num_prompt_tokens: int, lens: Iterable[int]) -> int:
        """Return the maximum number of blocks that sequences of these lengths hold at one time.

        They share one prompt, which is computed once.
        """
        num_shared = num_prompt_tokens // self.block_size
        own = [-(-length // self.block_size) - num_shared for length in lens]
        if self.num_seen is None:
            return num_shared + sum(own)
        if len(own) == 1:
            return self.num_held(num_shared + own[0])
        # Together they compute no more tokens per step than one would; each of them starts and ends within a block.
        own_sinks = max(0, self.num_sinks - num_shared)
        at_once = len(own) * (own_sinks + self.num_seen + 2) + self.most_at_once // self.block_size + 1
        forked = min(num_shared, self.num_sinks + self.num_seen) + min(sum(map(self.num_held, own)), at_once)
        return max(self.num_held(-(-num_prompt_tokens // self.block_size)), forked)


@dataclass(frozen=True, slots=True)
class KeyLengths:
    """Lengths up to which a model's keys stay valid; None is no limit.

    Attributes:
        max_cached_tokens: positions from here on are never shared in the prefix cache.
        outgrown_len: tokens beyond which all keys of a sequence are recomputed (LongRoPE).
    """

    max_cached_tokens: int | None = None
    outgrown_len: int | None = None
