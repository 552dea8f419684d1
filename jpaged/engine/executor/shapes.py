"""Sizes that engine and executor share, and measured rates of the device."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.cascade_costs import CascadeCosts
from jpaged.engine.reach import Reach

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
