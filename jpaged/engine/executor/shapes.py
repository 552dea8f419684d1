"""Sizes that engine and executor share, and measured rates of the device.

Cost model of cascade attention: reading a shared prefix once for several rows.

Sliding windows of a KV group in blocks: which blocks a sequence must hold, and how many at most at one time.

full blocks   0  1  2  3  4  5  6 | 7     the block that is being filled
window        .  .  .  .  x  x  x   x     num_seen = 3: no later token sees the first four blocks
with sinks    x  .  .  .  x  x  x   x     num_sinks = 1: attention sinks, the first tokens stay visible
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class CascadeCosts:
    """Costs and gains of reading a shared prefix once for several rows, in a second pass of attention.

    The unit is the cost of reading one token of context for one query, by a decoding row: its keys and values in all
    layers at the device's memory bandwidth. Queries that read a prefix together do so in tiles,

        tile(q) = 1 for one query, else ceil(q / w) * (tile_tokens + query_share * w)     w = min(tile_queries, T)
        gain    = sum of tile(queries of a row) * n - tile(queries of all rows) * n - queries * query_tokens

    for n shared tokens. If memory bandwidth is the only cost, tile(q) is 1 and the gain is the bytes that are not read
    again, (rows - 1) * n, less the cost of the outputs of two passes. All runs of a step together have to gain more
    than step_tokens.

    Attributes:
        granule_tokens: prefixes are shared in multiples of it. It is a multiple of the block size: the tokens that a
            kernel reads at a time, so that neither pass reads tokens that it does not use.
        tile_queries: maximum number of queries in a tile.
        tile_tokens: fixed cost of a tile for each token.
        query_share: additional cost of each place of a tile, used by a query or not.
        query_tokens: cost of writing, reading and merging the two outputs of a query.
        step_tokens: cost of starting the second pass in every layer.
        windows: (sliding window, share of the layers that have it); all other layers have full attention.
    """

    granule_tokens: int
    tile_queries: int
    tile_tokens: float
    query_share: float
    query_tokens: float
    step_tokens: float
    windows: tuple[tuple[int, float], ...] = ()

    def seen_tokens(self, num_tokens: int, end: int) -> float:
        """Return how many tokens of a prefix all queries of a run see, averaged over the layers.

        `end` is one past the position of the last query.
        """
        if not self.windows:
            return num_tokens
        share = 1.0 - sum(share for _, share in self.windows)
        seen = [share * max(0, num_tokens - max(0, end - window)) for window, share in self.windows]
        return share * num_tokens + sum(seen)

    def tile_cost(self, num_queries: int, width: int) -> float:
        """Return tile(q): the cost of a token that several queries read together, in tiles of `width` queries."""
        if num_queries == 1:
            return 1.0
        return -(-num_queries // width) * (self.tile_tokens + self.query_share * width)


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


I32 = NDArray[np.int32]

F32 = NDArray[np.float32]

Bool = NDArray[np.bool_]

MIN_BUCKET = 8
"""Smallest shape. Never fewer rows: a bf16 matrix product with one row is 10 times slower than with two on CPU."""


@dataclass(frozen=True, slots=True)
class BucketTable:
    """Ascending lists of the compiled shapes; a step is padded to the smallest one that holds it.

    There are only two axes. The forward is compiled for a number of packed tokens (T), the sampler for a number of rows
    (R); tables and row arrays have one size. Powers of two keep padding below half; above some size there may also be
    sizes halfway between two. `decodes` are row counts of multi-step decode programs, if any, and `speculates` those of
    draft-model programs.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    decodes: tuple[int, ...] = ()
    speculates: tuple[int, ...] = ()

    @classmethod
    def build(
        cls, *, max_num_batched_tokens: int, max_num_seqs: int, max_num_steps: int = 1, halves_from: int | None = None
    ) -> BucketTable:
        tokens, rows = _sizes_up_to(max_num_batched_tokens, halves_from), _sizes_up_to(max_num_seqs)
        return cls(tokens, rows, rows if max_num_steps > 1 else ())

    def num_tokens(self, n: int) -> int:
        """Return the bucket for n packed tokens."""
        return self.tokens[bisect_left(self.tokens, n)]

    def num_rows(self, n: int) -> int:
        """Return the bucket for n rows."""
        return self.rows[bisect_left(self.rows, n)]

    def num_decode_rows(self, n: int) -> int | None:
        """Return the multi-step decode bucket for n rows, or None."""
        return next((size for size in self.decodes if size >= n), None)

    def num_speculate_rows(self, n: int) -> int | None:
        """Return the draft-model bucket for n rows, or None."""
        return next((size for size in self.speculates if size >= n), None)

    def __str__(self) -> str:
        return f"tokens {', '.join(map(str, self.tokens))}; rows {', '.join(map(str, self.rows))}"


def _sizes_up_to(limit: int, halves_from: int | None = None) -> tuple[int, ...]:
    """Return 8, 16, ... and the limit itself, which need not be a power of two; at least MIN_BUCKET."""
    powers = [MIN_BUCKET << i for i in range(limit.bit_length()) if MIN_BUCKET << i < limit]
    halves = [size * 3 // 2 for size in powers if halves_from and halves_from <= size < limit * 2 / 3]
    return (*sorted(powers + halves), max(limit, MIN_BUCKET))


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes that engine and executor share, fixed once the pool is allocated.

    Attributes:
        num_blocks: usable blocks, without the null block (N).
        block_size: token slots in a block (B).
        max_num_seqs: rows of a step (S).
        max_model_len: maximum tokens of a sequence.
        vocab_size: upper bound of token ids, exclusive (V).
        num_host_blocks: blocks in host memory for swapped groups and cached prefixes.
        bytes_per_block: KV memory of a block, all layers of a KV group, both keys and values.
        buckets: the shapes that were compiled.
        cascade: cost model of cascade attention; None if the executor does not support it.
        max_num_steps: maximum decode steps of one dispatch.
        windows: sliding window of each KV group in tokens; None for full attention. A block belongs to one group.
        num_sink_tokens: first tokens of a sequence that layers with a window also attend to.
        max_loras: adapter slots, 1 to max_loras; 0 if the device takes no adapters.
        has_fed_steps: a program of several steps can receive masks while it runs.
        num_told: maximum prompt tokens of a step with aux outputs (Q).
        num_speculative_tokens: tokens that a draft model on the device proposes to a row in a round; 0 without one.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    bytes_per_block: int
    buckets: BucketTable
    num_host_blocks: int = 0
    cascade: CascadeCosts | None = None
    max_num_steps: int = 1
    windows: tuple[int | None, ...] = (None,)
    num_sink_tokens: int = 0
    max_loras: int = 0
    has_fed_steps: bool = False
    num_told: int = MIN_BUCKET
    num_speculative_tokens: int = 0

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum tokens of a step, all rows."""
        return self.buckets.tokens[-1]

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block-table row (M)."""
        return -(-self.max_model_len // self.block_size)

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """Attention window of each KV group, in blocks."""
        sizes = self.block_size, self.max_num_batched_tokens, self.num_sink_tokens
        return tuple(Reach.of(window, *sizes) for window in self.windows)

    @property
    def num_blocks_of_longest(self) -> int:
        """Maximum number of blocks that a sequence of max_model_len tokens holds."""
        return sum(reach.num_held(self.max_blocks_per_seq) for reach in self.reaches)

    def num_blocks_alone(self, num_prompt_tokens: int, max_tokens: int, num_rows: int) -> int:
        """Return the maximum number of blocks of a request that runs alone: its prompt once, and each row's output."""
        lens = [num_prompt_tokens + max_tokens] * num_rows
        return sum(reach.num_blocks(num_prompt_tokens, lens) for reach in self.reaches)


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Device speeds measured at start-up, for choosing between alternatives.

    Attributes:
        forward_s: (tokens, seconds) of steps of that padded size, ascending, without the time that attention takes for
            its (query, key) pairs.
        pair_s: seconds per (query, key) pair, in all heads and layers; 0 if unknown.
    """

    swap_out_bytes_per_s: float
    swap_in_bytes_per_s: float
    forward_s: tuple[tuple[int, float], ...]
    pair_s: float = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prefill tokens per second in the largest step."""
        num_tokens, seconds = self.forward_s[-1]
        return num_tokens / (seconds + self.pair_s * num_tokens**2 / 2)
