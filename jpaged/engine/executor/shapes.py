"""The sizes that engine and executor agree on, and how long the device takes for what."""

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
    """The finite list of shapes: sizes that were compiled, ascending; a step is padded to the smallest that holds it.

    Two axes only. The forward is compiled for a number of packed tokens (T), the sampler for a number of rows (R);
    tables and row arrays have one size. Powers of two keep padding below half; from some tokens on there may be one
    more halfway between two. `decodes` are rows of programs that decode several steps, if any, and `speculates` rows of
    those in which a draft model proposes tokens.
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
        """The bucket for n packed tokens."""
        return self.tokens[bisect_left(self.tokens, n)]

    def num_rows(self, n: int) -> int:
        """The bucket for n rows."""
        return self.rows[bisect_left(self.rows, n)]

    def num_decode_rows(self, n: int) -> int | None:
        """The bucket for n rows that decode several steps; None where there is none."""
        return next((size for size in self.decodes if size >= n), None)

    def num_speculate_rows(self, n: int) -> int | None:
        """The bucket for n rows that a draft model proposes tokens for; None where there is none."""
        return next((size for size in self.speculates if size >= n), None)

    def __str__(self) -> str:
        return f"tokens {', '.join(map(str, self.tokens))}; rows {', '.join(map(str, self.rows))}"


def _sizes_up_to(limit: int, halves_from: int | None = None) -> tuple[int, ...]:
    """8, 16, ... and the limit itself, which need not be a power of two; at least MIN_BUCKET."""
    powers = [MIN_BUCKET << i for i in range(limit.bit_length()) if MIN_BUCKET << i < limit]
    halves = [size * 3 // 2 for size in powers if halves_from and halves_from <= size < limit * 2 / 3]
    return (*sorted(powers + halves), max(limit, MIN_BUCKET))


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that engine and executor agree on, fixed once the pool is allocated.

    Attributes:
        num_blocks: usable blocks, the null block not counted (N).
        block_size: token slots in a block (B).
        max_num_seqs: rows of a step (S).
        max_model_len: tokens of a sequence at most.
        vocab_size: token ids are below it (V).
        num_host_blocks: blocks in host memory that groups can be swapped out to, and cached prefixes kept in.
        bytes_per_block: of KV memory, all layers of a KV group, both keys and values.
        buckets: the shapes that were compiled.
        cascade: what reading a shared prefix once costs; None where the executor does not.
        max_num_steps: decode steps of one dispatch at most.
        windows: tokens that the layers of each KV group see; None is everything. A block is of one group.
        num_sink_tokens: first tokens of a sequence that those with a window see besides.
        max_loras: adapter slots, 1 to max_loras; 0 where the device takes no adapters.
        has_fed_steps: several steps can be given masks while they are under way.
        num_told: tokens of a step of which more than a sample is asked, at most (Q).
        num_speculative_tokens: tokens that a draft model on the device proposes to a row in a round; 0 where there is
            none.
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
        """Tokens of a step, all rows."""
        return self.buckets.tokens[-1]

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block-table row (M)."""
        return -(-self.max_model_len // self.block_size)

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """What the layers of each KV group see, in blocks."""
        sizes = self.block_size, self.max_num_batched_tokens, self.num_sink_tokens
        return tuple(Reach.of(window, *sizes) for window in self.windows)

    @property
    def num_blocks_of_longest(self) -> int:
        """Blocks that a sequence of max_model_len tokens holds at most."""
        return sum(reach.num_held(self.max_blocks_per_seq) for reach in self.reaches)

    def num_blocks_alone(self, num_prompt_tokens: int, max_tokens: int, num_rows: int) -> int:
        """Blocks that a request holds at most when it runs alone: its prompt's once, and what each row adds."""
        lens = [num_prompt_tokens + max_tokens] * num_rows
        return sum(reach.num_blocks(num_prompt_tokens, lens) for reach in self.reaches)


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What the device does in which time, measured when it starts; for choosing between two ways to the same end.

    Attributes:
        forward_s: (tokens, seconds) of a step of so many tokens, padding included, ascending, without what attention
            takes for its pairs.
        pair_s: seconds for a pair of a query and a key that it looks at, in all heads and layers; 0 is not known.
    """

    swap_out_bytes_per_s: float
    swap_in_bytes_per_s: float
    forward_s: tuple[tuple[int, float], ...]
    pair_s: float = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens of a prompt in a second, in the largest step."""
        num_tokens, seconds = self.forward_s[-1]
        return num_tokens / (seconds + self.pair_s * num_tokens**2 / 2)
