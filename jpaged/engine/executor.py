"""What the engine asks of a device: the shapes of one step, and five verbs. Owned by the engine, implemented below it.

The engine decides, the executor computes. A step goes down as one `StepInputs` of padded numpy arrays and comes back as
one `StepOutputs`; in between it is a handle. The executor never changes what it was told to run, and the engine never
sees a device array.

    T  tokens packed in the step, padded to a bucket       S  rows of a step, always max_num_seqs
    M  width of a block-table row                          R  rows that the sampler runs on, padded to a bucket
    X  token ids that a row may ban                     K  alternatives reported with log-probabilities
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.buckets import BucketTable

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]
Bool = NDArray[np.bool_]

BANNED_WIDTH = 40
"""Token ids that a row may ban (X): a request's stop tokens and the model's own end-of-sequence tokens."""
TOP_WIDTH = 32
"""Alternatives that the device reports of a row that wants them (K): what a request or a beam search may ask for."""
NULL_BLOCK = 0
"""Padding rows and padding tokens write here; nothing reads it. Usable blocks are 1 to num_blocks."""


@dataclass(frozen=True, slots=True)
class CascadeCosts:
    """What it costs to read a prefix once for several rows, in a second pass of attention.

    The unit is a token of context read for one query alone, by a row that decodes: its keys and values in all layers,
    so many bytes at the rate of the device. Queries that go over a prefix together do so in tiles,

        tile(q) = 1 for one query, else ceil(q / w) * (tile_tokens + query_share * w)     w = min(tile_queries, T)
        gain    = sum of tile(queries of a row) * n - tile(queries of all rows) * n - queries * query_tokens

    for n tokens that rows have in common. With tile(q) = 1, as where memory is all that counts, this is the bytes that
    are not read again, (rows - 1) * n, less what the outputs of two passes cost. A step has to gain more than
    step_tokens by all its runs.

    Attributes:
        granule_tokens: prefixes are shared in multiples of it, which is a multiple of the block size: the tokens that
            a kernel reads at a time, so that neither pass reads a part of them in vain.
        tile_queries: queries of a tile at most.
        tile_tokens: a tile's cost for each token, besides what its queries add.
        query_share: what each place of a tile adds, whether or not a query is in it.
        query_tokens: writing, reading and merging the two outputs of a query.
        step_tokens: starting the second pass in every layer.
    """

    granule_tokens: int
    tile_queries: int
    tile_tokens: float
    query_share: float
    query_tokens: float
    step_tokens: float

    def tile_cost(self, num_queries: int, width: int) -> float:
        """tile(q): what a token costs that so many queries read together, in tiles of a width."""
        if num_queries == 1:
            return 1.0
        return -(-num_queries // width) * (self.tile_tokens + self.query_share * width)


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
        bytes_per_block: of KV memory, all layers, both keys and values.
        buckets: the shapes that were compiled.
        cascade: what reading a shared prefix once costs; None where the executor does not.
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

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of a step, all rows."""
        return self.buckets.tokens[-1]

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block-table row (M)."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What the device does in a second, measured when it starts; for choosing between two ways to the same end."""

    swap_out_bytes_per_s: float
    swap_in_bytes_per_s: float
    prefill_tokens_per_s: float


class Move(enum.Enum):
    """Where a block's content goes: within the pool, out to host memory, or back in."""

    COPY = "copy"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Moves of one kind that may run as one: no destination is a source of another.

    Block ids are the pool's (1 to num_blocks) or, on the host's side of a swap, host block ids (1 to num_host_blocks).
    """

    move: Move
    sources: list[int]
    destinations: list[int]


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How each row's next token is sampled: rows of arrays, never static arguments.

    Attributes:
        temperature_r: 0 is greedy.
        top_k_r: vocab_size keeps all.
        top_p_r: 1 keeps all.
        min_p_r: 0 keeps all.
        seeds_r2: the request's 64-bit seed as (high, low) words.
        sequence_indices_r: which sequence of its request the row is.
        positions_r: position in the sequence of the token that is sampled.
        banned_token_ids_rx: tokens that this row cannot sample; vocab_size in unused places.
        want_top_logprobs: some row wants alternatives, so the sampler's larger variant runs.
    """

    temperature_r: F32
    top_k_r: I32
    top_p_r: F32
    min_p_r: F32
    seeds_r2: U32
    sequence_indices_r: I32
    positions_r: I32
    banned_token_ids_rx: I32
    want_top_logprobs: bool


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, padded. Row i owns tokens query_starts[i] to query_starts[i + 1] of the packed axis.

    Attributes:
        token_ids_t: input tokens; ignored where is_fed_back_t.
        is_fed_back_t: the token is what the previous dispatched step drew for row prev_sampled_rows_t, and has not been
            seen by the host.
        prev_sampled_rows_t: a row of the previous step; 0 where not used.
        positions_t: position of each token in its sequence.
        rope_lens_t: max(position + 1, prompt length), for position embeddings that depend on the sequence's length.
        slots_t: where the token's keys and values go: block * block_size + offset; slot 0 of the null block for
            padding.
        query_starts_s1: [S + 1]; rows beyond num_rows are empty.
        kv_lens_s: tokens of each row's context, those of this step included; 0 beyond num_rows.
        block_tables_sm: block ids; the null block beyond a row's context.
        kv_begins_s: tokens that a row shares with the other rows of its run; their block tables begin alike.
        run_starts_s1: [S + 1]; run g is the rows run_starts[g] to run_starts[g + 1]. num_rows beyond num_runs.
        sample_tokens_s: place in the packed axis of each row's last token, from which its next is sampled.
        num_rows: rows in use.
        num_tokens: tokens in use.
        num_runs: runs in use, which cover the rows in use; 0 where no two rows read anything together.
    """

    token_ids_t: I32
    is_fed_back_t: Bool
    prev_sampled_rows_t: I32
    positions_t: I32
    rope_lens_t: I32
    slots_t: I32
    query_starts_s1: I32
    kv_lens_s: I32
    block_tables_sm: I32
    kv_begins_s: I32
    run_starts_s1: I32
    sample_tokens_s: I32
    sampling: SamplingInputs
    num_rows: int
    num_tokens: int
    num_runs: int


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one step drew, one entry a row, in host memory.

    Attributes:
        token_ids_r: the sampled tokens.
        logprobs_r: their log-probabilities under the model's own distribution (before temperature and truncation); NaN
            in the rows that are not sound, see `is_sound_r`.
        ranks_r: 1 for the likeliest token.
        top_ids_rk: the likeliest tokens in order; None unless want_top_logprobs.
        top_logprobs_rk: theirs.
    """

    token_ids_r: I32
    logprobs_r: F32
    ranks_r: I32
    top_ids_rk: I32 | None = None
    top_logprobs_rk: F32 | None = None

    @property
    def is_sound_r(self) -> Bool:
        """False where a token means nothing: the logits hold NaN or plus infinity, or nothing is left to sample."""
        return ~np.isnan(self.logprobs_r)


Handle = TypeVar("Handle")
"""A dispatched step whose results may not exist yet. Opaque to the engine; collected once, in order of dispatch."""

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) while the executor starts."""


class Executor(Protocol[Handle]):
    """A device, or many, or a fake: holds the weights and the pool, runs steps in the order of their dispatch.

    Because steps run in that order, a block may be given to another sequence as soon as the host lets it go, even while
    an earlier step still writes to it.
    """

    @property
    def geometry(self) -> Geometry: ...

    @property
    def rates(self) -> DeviceRates:
        """Known once `warm_up` has returned."""
        ...

    @property
    def num_compiles_after_warm_up(self) -> int:
        """Programs compiled since `warm_up` returned: 0, or something is wrong."""
        ...

    def warm_up(self, progress: Progress) -> None:
        """Compiles every program on the list and runs none of them on real data."""
        ...

    def move_blocks(self, moves: BlockMoves) -> None:
        """Starts moving blocks, all layers of them, as one transfer; before any step that is dispatched later.

        Returns before it is done, also where blocks leave for host memory.
        """
        ...

    def dispatch(self, inputs: StepInputs) -> Handle:
        """Starts a step; returns before it is done."""
        ...

    def collect(self, handle: Handle) -> StepOutputs:
        """Waits for a step and brings its results to the host."""
        ...

    def shutdown(self) -> None:
        """Gives all device memory back. The executor is spent: any further call raises."""
        ...
