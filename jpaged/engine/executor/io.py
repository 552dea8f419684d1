"""Data that engine and executor exchange: sizes, sampling parameters of each row, inputs and outputs of a step.

Sliding windows of a KV group in blocks (`WindowSpec`): which blocks a sequence must hold.

full blocks   0  1  2  3  4  5  6 | 7     the block that is being filled
window        .  .  .  .  x  x  x   x     num_seen = 3: no later token sees the first four blocks
with sinks    x  .  .  .  x  x  x   x     num_sinks = 1: attention sinks, the first tokens stay visible

Logits processors (`LogitsProcessorInputs`): per-row records, like `ROW_FIELDS`. Rows without logits processors are
sampled by programs that do not contain them. The token counts of a sequence are on the device, in a slot (P of them, 1
to P) that the sequence holds while it runs.

Aux outputs (`AuxInputs`) of a step beyond its samples: log-probabilities of given tokens or of all, or hidden states.

    prompt      t0  t1  t2  t3  t4        the log-probability of t2 is computed from the hidden state of t1
    hidden      h0  h1  h2  h3  h4        of the S sampled rows first, then of num_positions requested prompt tokens

A forward leaves both on the device. An aux call reads a bounded number of them, so that no array is as long as a prompt
and as wide as the vocabulary.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpaged.errors import InternalError
from jpaged.types import PositionLogprobs, SamplingParams, TokenLogprob


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
class WindowSpec:
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
    def of(cls, window: int | None, block_size: int, most_at_once: int, num_sink_tokens: int = 0) -> WindowSpec:
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

    def visible_blocks(self, first: int, num_blocks: int) -> Sequence[int]:
        """Return the indices of the visible blocks: the sinks and the range from `first` to `num_blocks`."""
        if not self.num_sinks:
            return range(first, num_blocks)
        return [*range(min(self.num_sinks, first)), *range(first, num_blocks)]

    def seen(self, num_full: int) -> Sequence[int]:
        """Return the indices of the blocks that the token after `num_full` full blocks sees, in order."""
        return self.visible_blocks(self.first_block(num_full), num_full)

    def above(self, index: int) -> int | None:
        """Return the index of the nearest earlier block visible to every query that sees block `index`, or None."""
        nearest = (index if self.num_seen is None else min(index, self.num_sinks)) - 1
        return nearest if nearest >= 0 else None

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
class RopeLengthLimits:
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
    draft-model programs. If attention is data-parallel, each size is split
    equally over the devices.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    decodes: tuple[int, ...] = ()
    speculates: tuple[int, ...] = ()

    @classmethod
    def build(
        cls,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_num_steps: int = 1,
        halves_from: int | None = None,
        multiple: int = 1,
    ) -> BucketTable:
        tokens, rows = (
            tuple(multiple * size for size in _sizes_up_to(-(-limit // multiple), halves))
            for limit, halves in ((max_num_batched_tokens, halves_from), (max_num_seqs, None))
        )
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
        num_aux: maximum prompt tokens of a step with aux outputs (Q).
        num_speculative_tokens: tokens that a draft model on the device proposes to a row in a round; 0 without one.
        dp_size: devices that each hold all blocks of some sequences (data-parallel attention); 1 if there is one pool
            for all. Rank r has the blocks r * N / dp_size + 1 to (r + 1) * N / dp_size.
        state_bytes: recurrent state of a sequence, which has one of num_state_slots slots, from 1 on; 0 without any.
        state_checkpoint_interval: tokens of the pool for each slot that holds a checkpoint of recurrent state, a
            multiple of block_size; 0 without checkpoints.
        num_draft_states: slots of recurrent state for the draft tokens of rounds, beyond those of sequences.
        is_encoder: a prompt is computed in one step, which pools its hidden states; nothing is generated.
        embed_width: width of input embeddings, which may replace tokens of a step (E); 0 without any.
        image_tokens: tokens of an image, which see each other and so are computed in one step; 0 if a step may end
            inside an image.
        has_rope_shifts: rotary embedding has three positions for each token; see `StepInputs.rope_shifts_3t`.
        has_prompt_embeds: requests may have input embeddings; otherwise only images have some.
        embed_max: largest absolute value of these.
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
    num_aux: int = MIN_BUCKET
    num_speculative_tokens: int = 0
    dp_size: int = 1
    state_bytes: int = 0
    state_checkpoint_interval: int = 0
    num_draft_states: int = 0
    is_encoder: bool = False
    embed_width: int = 0
    has_prompt_embeds: bool = True
    has_rope_shifts: bool = False
    image_tokens: int = 0
    embed_max: float = 0.0

    @property
    def num_state_checkpoints(self) -> int:
        """Slots of recurrent state beyond those of running sequences."""
        return self.num_blocks // self.blocks_per_checkpoint if self.blocks_per_checkpoint else 0

    @property
    def blocks_per_checkpoint(self) -> int:
        """Blocks of the pool for each checkpoint, in all KV groups; 0 without checkpoints."""
        return len(self.windows) * (self.state_checkpoint_interval // self.block_size)

    @property
    def num_state_slots(self) -> int:
        """Slots of recurrent state: of running sequences, of draft tokens, and of checkpoints."""
        return self.num_running_states + self.num_state_checkpoints

    @property
    def num_running_states(self) -> int:
        """Slots of recurrent state of running sequences, and of their draft tokens."""
        return self.max_num_seqs + self.num_draft_states

    @property
    def max_num_seqs_of_rank(self) -> int:
        """Maximum rows of a step whose blocks are on one device."""
        return -(-self.max_num_seqs // self.dp_size)

    @property
    def max_num_batched_tokens_of_rank(self) -> int:
        """Maximum tokens of a step whose blocks are on one device."""
        return self.max_num_batched_tokens // self.dp_size

    @property
    def num_blocks_of_rank(self) -> int:
        """Usable blocks of one device."""
        return self.num_blocks // self.dp_size

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum tokens of a step, all rows."""
        return self.buckets.tokens[-1]

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block-table row (M)."""
        return -(-self.max_model_len // self.block_size)

    @property
    def reaches(self) -> tuple[WindowSpec, ...]:
        """Attention window of each KV group, in blocks."""
        sizes = self.block_size, self.max_num_batched_tokens, self.num_sink_tokens
        return tuple(WindowSpec.of(window, *sizes) for window in self.windows)

    @property
    def num_blocks_of_longest(self) -> int:
        """Maximum number of blocks that a sequence of max_model_len tokens holds."""
        return sum(reach.num_held(self.max_blocks_per_seq) for reach in self.reaches)

    def num_blocks_alone(self, num_prompt_tokens: int, max_tokens: int, num_rows: int) -> int:
        """Return the maximum number of blocks of a request that runs alone: its prompt once, and each row's output."""
        lens = [num_prompt_tokens + max_tokens] * num_rows
        return sum(reach.num_blocks(num_prompt_tokens, lens) for reach in self.reaches)


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Counters of balanced experts.

    Attributes:
        num_reads: times that the load of experts was read.
        num_rearrangements: reads after which experts moved.
        num_moved: physical experts that got other contents, in all layers.
        balancedness: mean load of a device by that of the busiest, when the load was read last.
        peak_ratio: load of the busiest expert divided by the mean load, averaged over layers.
    """

    num_reads: int = 0
    num_rearrangements: int = 0
    num_moved: int = 0
    balancedness: float = 0.0
    peak_ratio: float = 0.0


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

    def prefill_s(self, begin: int, end: int) -> float:
        """Return the seconds to compute the tokens `begin` to `end` of a prompt, in steps of the largest size."""
        num_tokens, seconds = self.forward_s[-1]
        return (end - begin) * seconds / num_tokens + self.pair_s * (end**2 - begin**2) / 2


class RowField(NamedTuple):
    """One field of the record that controls how a row's next token is sampled.

    Attributes:
        dtype: a 32-bit type.
        neutral: value in padding, in rows that do not sample, and if the request does not set it.
        width: number of values per row; None for a single value without an axis.
    """

    name: str
    dtype: str
    neutral: float
    width: int | None = None


BEYOND_TOKENS = (1 << 31) - 1
"""A number greater than every token id and every count of tokens."""


NUM_SINGLES = 576
"""Maximum number of token biases of a row (X)."""
ANY_TOKEN = -1
"""Condition of a token bias that holds after any token."""
MASK_BITS = 32
"""Tokens of a mask word; the lowest bit is the first token."""

EDIT_FIELDS = (
    RowField("slots_r", "int32", 0),  # slot of the sequence's token counts; 0 counts nothing
    RowField("repetition_r", "float32", 1),  # logits of prompt and output tokens: divided if positive, else multiplied
    RowField("frequency_r", "float32", 0),  # subtracted for each time that a token was generated
    RowField("presence_r", "float32", 0),  # subtracted once from tokens that were generated
    RowField("top_n_sigma_r", "float32", 0),  # keeps logits up to this many deviations below the maximum; 0 keeps all
    RowField("typical_p_r", "float32", 1),  # keeps the most typical tokens with this total probability; 1 keeps all
)
EDIT_DTYPE = np.dtype([(field.name, field.dtype, field.width or ()) for field in EDIT_FIELDS])
_NEUTRAL = np.zeros(1, EDIT_DTYPE)
for _edit_field in EDIT_FIELDS:
    _NEUTRAL[_edit_field.name] = _edit_field.neutral


SINGLE_DTYPE = np.dtype([("ids", "int32"), ("after", "int32"), ("values", "float32")])
"""A token bias: the token, the last token after which it applies (or ANY_TOKEN), and the added value."""
NO_SINGLE = np.array((BEYOND_TOKENS, ANY_TOKEN, 0.0), SINGLE_DTYPE)


def num_mask_words(vocab_size: int) -> int:
    """Return the number of words of a row's mask (W)."""
    return -(-vocab_size // MASK_BITS)


class TokenCountReset(NamedTuple):
    """Initialization of a count slot with the tokens of a sequence.

    Attributes:
        slot: 1 to max_num_seqs.
        num_prompt: number of prompt tokens, which come first in token_ids.
    """

    slot: int
    token_ids: list[int]
    num_prompt: int


@dataclass(frozen=True, slots=True)
class LogitsProcessorInputs:
    """Logits-processor inputs of the rows of a sample.

    Attributes:
        rows_r: elements of EDIT_DTYPE.
        singles_rx: elements of SINGLE_DTYPE, `[R, NUM_SINGLES]`; None if no row has any.
        due: count slots to initialize before.
        mask_rw: bitmask of the allowed tokens, `[R, num_mask_words]`; None allows every token in every row.
    """

    rows_r: NDArray[np.void]
    singles_rx: NDArray[np.void] | None = None
    mask_rw: I32 | None = None
    due: tuple[TokenCountReset, ...] = ()

    @classmethod
    def neutral(cls, num_rows: int) -> LogitsProcessorInputs:
        """Return records without effect."""
        return cls(_NEUTRAL.repeat(num_rows))

    @property
    def words(self) -> I32:
        """The records as a program takes them, row after row."""
        return self.rows_r.view(np.int32)

    def padded(self, num_rows: int) -> LogitsProcessorInputs:
        """Return the inputs extended by rows without effect to num_rows rows; itself if it has that number."""
        num_more = num_rows - len(self.rows_r)
        if num_more == 0:
            return self
        singles_rx, mask_rw = self.singles_rx, self.mask_rw
        return LogitsProcessorInputs(
            np.concatenate([self.rows_r, _NEUTRAL.repeat(num_more)]),
            None if singles_rx is None else np.concatenate([singles_rx, no_singles(num_more)]),
            None if mask_rw is None else np.concatenate([mask_rw, np.full((num_more, mask_rw.shape[1]), -1, np.int32)]),
            self.due,
        )

    def of_next_step(self) -> LogitsProcessorInputs:
        """Return the inputs of the same rows one token later, without count slots to initialize.

        Masks allow every token.
        """
        return replace(self, mask_rw=None if self.mask_rw is None else np.full_like(self.mask_rw, -1), due=())

    def reordered(self, order: list[int]) -> LogitsProcessorInputs:
        """Return the inputs with the first rows reordered, `order[new] = old`."""
        whole = [*order, *range(len(order), len(self.rows_r))]
        singles_rx = None if self.singles_rx is None else self.singles_rx[whole]
        mask_rw = None if self.mask_rw is None else self.mask_rw[whole]
        return LogitsProcessorInputs(self.rows_r[whole], singles_rx, mask_rw, self.due)

    @property
    def single_words(self) -> I32 | None:
        """The token biases as a program takes them: `[R, X, 3]`."""
        return None if self.singles_rx is None else words_of_singles(self.singles_rx)


def words_of_singles(singles_rx: NDArray[np.void]) -> I32:
    """Return token biases as words: `[R, X, 3]`."""
    return singles_rx.view(np.int32).reshape(*singles_rx.shape, 3)


def no_singles(num_rows: int) -> NDArray[np.void]:
    """Return rows without token biases, `[R, NUM_SINGLES]`."""
    return np.full((num_rows, NUM_SINGLES), NO_SINGLE, SINGLE_DTYPE)


def no_masks(num_rows: int, vocab_size: int) -> I32:
    """Return masks that allow every token in every row, `[R, num_mask_words]`."""
    return np.full((num_rows, num_mask_words(vocab_size)), -1, np.int32)


BANNED_WIDTH = 40
"""Maximum number of banned token ids of a row (X): a request's stop tokens and the model's end-of-sequence tokens."""

TOP_WIDTH = 32
"""Top log-probabilities computed per row (K): the maximum that a request or a beam search may need."""


class Detail(enum.IntEnum):
    """Outputs of a sample for each token. A higher level also serves lower ones, with the same tokens."""

    TOKENS = 0
    LOGPROBS = 1
    TOP_LOGPROBS = 2

    @classmethod
    def of(cls, params: SamplingParams) -> Detail:
        """Return the level that a request needs."""
        if params.logprobs or params.beam_width:
            return cls.TOP_LOGPROBS
        return cls.LOGPROBS if params.needs_logprobs else cls.TOKENS


ROW_FIELDS = (
    RowField("temperature_r", "float32", 0),  # 0 is greedy
    RowField("top_k_r", "int32", BEYOND_TOKENS),  # the vocabulary size or more keeps all
    RowField("top_p_r", "float32", 1),  # 1 keeps all
    RowField("min_p_r", "float32", 0),  # 0 keeps all
    RowField("seeds_r2", "uint32", 0, width=2),  # the request's 64-bit seed as (high, low) words
    RowField("sequence_indices_r", "int32", 0),  # index of the row's sequence in its request
    RowField("positions_r", "int32", 0),  # position in the sequence of the token that is sampled
    RowField("is_padding_r", "int32", 0),  # 1 for the rows after the last one that is sampled
    RowField("banned_token_ids_rx", "int32", BEYOND_TOKENS, width=BANNED_WIDTH),  # cannot be sampled
)
"""All per-row inputs of the sampler.

Records, padding, the buffer of a call and the messages to other processes are derived from it. `random_columns` and
`row_lists` fill it, and `jpaged.kernels.sampling.RowSampling` names it on devices.
"""

ROW_DTYPE = np.dtype([(field.name, field.dtype, field.width or ()) for field in ROW_FIELDS])
_NEUTRAL_ROW = np.zeros(1, ROW_DTYPE)
for _field in ROW_FIELDS:
    _NEUTRAL_ROW[_field.name] = _field.neutral


def random_columns(
    params: Sequence[SamplingParams], sequence_indices: Sequence[int], positions: Sequence[int]
) -> dict[str, Sequence[Any]]:
    """Return the fields of rows that sample at random, one entry per row; those of greedy rows stay neutral."""
    return {
        "temperature_r": [one.temperature for one in params],
        "top_k_r": [min(one.top_k, BEYOND_TOKENS) if one.top_k > 0 else BEYOND_TOKENS for one in params],
        "top_p_r": [one.top_p for one in params],
        "min_p_r": [one.min_p for one in params],
        "seeds_r2": [divmod(one.seed or 0, 1 << 32) for one in params],
        "sequence_indices_r": sequence_indices,
        "positions_r": positions,
    }


def row_lists(params: SamplingParams, eos_token_ids: frozenset[int], output_index: int) -> dict[str, Sequence[Any]]:
    """Return the non-empty list fields of one row, greedy or not; the rest of each field stays neutral."""
    if output_index < params.min_tokens:
        return {"banned_token_ids_rx": sorted(params.ending_ids(eos_token_ids))}
    return {}


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling inputs of all rows: records of `ROW_FIELDS`, never static arguments.

    Attributes:
        rows_r: elements of ROW_DTYPE.
        detail: the highest level that any row needs; the sampler has a variant for each.
        edits: logits processors; None if no row has any.
    """

    rows_r: NDArray[np.void]
    detail: Detail = Detail.TOKENS
    edits: LogitsProcessorInputs | None = None

    @classmethod
    def neutral(cls, num_rows: int, *, detail: Detail = Detail.TOKENS) -> SamplingInputs:
        """Return rows that sample the likeliest token."""
        return cls(_NEUTRAL_ROW.repeat(num_rows), detail)

    def padded(self, num_rows: int) -> SamplingInputs:
        """Return the inputs padded to num_rows rows, without edits; itself if it has that number."""
        if num_rows == len(self.rows_r):
            return self
        more = _NEUTRAL_ROW.repeat(num_rows - len(self.rows_r))
        more["is_padding_r"] = 1
        return SamplingInputs(np.concatenate([self.rows_r, more]), self.detail)

    def of_next_step(self) -> SamplingInputs:
        """Return the inputs of the same rows one token later, with masks that allow every token."""
        rows_r, edits = self.rows_r.copy(), self.edits
        rows_r["positions_r"] += rows_r["positions_r"] > 0  # greedy rows have position 0
        return SamplingInputs(rows_r, self.detail, None if edits is None else edits.of_next_step())

    @property
    def words(self) -> I32:
        """The same memory as a program takes it, row after row."""
        return self.rows_r.view(np.int32)

    def fill_columns(self, rows: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> None:
        """Write fields of some rows, one entry per row."""
        row_indices = np.array(rows)
        for name, values in columns.items():
            self.rows_r[name][row_indices] = values

    def fill_lists(self, row: int, lists: Mapping[str, Sequence[Any]]) -> None:
        """Write the first entries of list fields of one row."""
        for name, values in lists.items():
            self.rows_r[name][row, : len(values)] = values


MAX_NUM_STEPS = 16
"""Maximum number of decode steps in one dispatch."""
MAX_NUM_ROUNDS = 16
"""Maximum number of draft-model rounds in one dispatch."""
NULL_BLOCK = 0
"""Padding rows and padding tokens write here; nothing reads it. Usable blocks are 1 to num_blocks."""


class Move(enum.Enum):
    """Direction of a block move: within the pool, out to host memory, or back in."""

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
class StepInputs:
    """One step, padded. Row i owns tokens query_starts[i] to query_starts[i + 1] of the packed axis.

    A device gets the fields in this order. The suffixes of the names are their shapes.

    Attributes:
        token_ids_t: input tokens; ignored where is_prev_sampled_t.
        is_prev_sampled_t: the token is what the previous dispatched step sampled for row prev_sampled_rows_t, and the
            host has not seen it.
        prev_sampled_rows_t: a row of the previous step; 0 where not used.
        positions_t: position of each token in its sequence.
        rope_lens_t: max(position + 1, prompt length), for position embeddings that depend on the sequence's length.
        slots_gt: slot for the token's keys and values in each KV group: block * block_size + offset; slot 0 of the null
            block for padding.
        adapters_t: adapter slot of each token; 0 is none.
        sample_tokens_s: index in the packed axis of each row's last token, from which its next is sampled.
        query_starts_s1: [S + 1]; rows beyond num_rows are empty.
        kv_lens_s: tokens of each row's context, including those of this step; 0 beyond num_rows.
        block_tables_gsm: block ids of each KV group; the null block beyond a row's context, and outside the window of
            all the row's queries.
        aux_tokens_q: indices in the packed axis of the tokens with aux outputs; 0 where not used.
        num_rows: rows in use.
        kv_begins_s: tokens that a row shares with the rest of the run; their block tables start with the same blocks.
        run_starts_s1: [S + 1]; run g is the rows run_starts[g] to run_starts[g + 1]. num_rows beyond num_runs.
        num_runs: runs in use, which cover the rows in use; 0 if no two rows share a prefix.
        num_tokens: tokens in use.
        state_sources_s: slot from which each row's recurrent state is read; unused by a row that begins its sequence.
            A row with a draft token has the one that the sequence's row has.
        state_slots_s: slot to which it is written; 0 beyond num_rows, and for rows without tokens.
        is_draft_s: with recurrent state: the row has a draft token, and continues the row before it.
        draft_slots_sk: with recurrent state: slots for the states after the draft tokens of rounds; 0 for tokens beyond
            those that a row may sample. None for other dispatches.
        poolings_s: of an encoder: index of each row's pooling in `POOLINGS`; None for other models, as what follows.
        pair_starts_s: position of the first token of each row's second text; the row's length without one.
        is_embed_t: the input is a row of embeds_te, not a token; None if the geometry takes no embeddings.
        rope_shifts_3t: what to subtract from each token's position for rotary embedding, for time, row and column; None
            if the geometry has one position for each token.
        embeds_te: float32, a separate argument of the program; None if no input is an embedding.
    """

    token_ids_t: I32
    is_prev_sampled_t: Bool
    prev_sampled_rows_t: I32
    positions_t: I32
    rope_lens_t: I32
    slots_gt: I32
    adapters_t: I32
    sample_tokens_s: I32
    query_starts_s1: I32
    kv_lens_s: I32
    block_tables_gsm: I32
    aux_tokens_q: I32
    num_rows: int
    kv_begins_s: I32
    run_starts_s1: I32
    num_runs: int
    num_tokens: int
    state_sources_s: I32
    state_slots_s: I32
    is_draft_s: Bool
    draft_slots_sk: I32 | None = None
    poolings_s: I32 | None = None
    pair_starts_s: I32 | None = None
    is_embed_t: Bool | None = None
    rope_shifts_3t: I32 | None = None
    embeds_te: F32 | None = None

    def further(self, num_steps: int, block_size: int) -> Iterator[StepInputs]:
        """Yield the inputs of the next `num_steps - 1` steps of rows with one token each, sampled by the step before.

        The block tables already contain every block that these steps write to.
        """
        num_rows, ahead_k1 = self.num_rows, np.arange(1, num_steps, dtype=np.int32)[:, None]
        rows, is_used_t = np.arange(num_rows), np.arange(len(self.positions_t)) < num_rows
        positions_kt = self.positions_t + ahead_k1 * is_used_t
        rope_lens_kt = np.maximum(self.rope_lens_t, positions_kt + 1)
        kv_lens_ks = self.kv_lens_s + ahead_k1 * (np.arange(len(self.kv_lens_s)) < num_rows)
        positions_kr = positions_kt[:, :num_rows]
        slots_gkt = np.zeros((len(self.slots_gt), *positions_kt.shape), np.int32)
        slots_gkt[:, :, :num_rows] = self.block_tables_gsm[:, rows, positions_kr // block_size] * block_size
        slots_gkt[:, :, :num_rows] += positions_kr % block_size
        prev_rows_t = np.zeros_like(self.prev_sampled_rows_t)
        prev_rows_t[:num_rows] = rows
        for i in range(num_steps - 1):
            yield replace(
                self,
                is_prev_sampled_t=is_used_t,
                prev_sampled_rows_t=prev_rows_t,
                positions_t=positions_kt[i],
                rope_lens_t=rope_lens_kt[i],
                slots_gt=np.ascontiguousarray(slots_gkt[:, i]),
                kv_lens_s=kv_lens_ks[i],
                state_sources_s=self.state_slots_s,
            )

    @property
    def num_pairs(self) -> int:
        """Number of (query, key) pairs that attention computes, over all rows, in one head of one layer."""
        return num_pairs(self.query_starts_s1[: self.num_rows + 1], self.kv_lens_s[: self.num_rows])


def num_pairs(query_starts: I32, kv_lens: I32) -> int:
    """Return the number of (query, key) pairs, if the queries of each row come last in the context."""
    query_lens = np.diff(query_starts).astype(np.int64)
    return int(np.dot(query_lens, kv_lens) - np.dot(query_lens, query_lens - 1) // 2)


@dataclass(frozen=True, slots=True)
class Speculated:
    """Counts of a speculative dispatch.

    Attributes:
        num_tokens_r: valid tokens of each row in `StepOutputs`; later ones are undefined.
        num_proposed_nr: [rounds, R] draft tokens that a row could have accepted; 0 if it had ended before.
        num_accepted_nr: [rounds, R] draft tokens that were accepted, including those after an ending token.
        num_rounds: rounds that were run.
        state_slots_r: slot of the recurrent state after each row's tokens; 0 without recurrent layers.
    """

    num_tokens_r: I32
    num_proposed_nr: I32
    num_accepted_nr: I32
    num_rounds: int
    state_slots_r: I32


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Samples of one dispatch in host memory, n tokens per row in order.

    Attributes:
        token_ids_rn: the sampled tokens.
        is_finite_rn: False if a token is undefined: the logits hold NaN or plus infinity, or no token is left to
            sample.
        logprobs_rn: their log-probabilities under the model's distribution (before temperature and truncation); None
            for Detail.TOKENS.
        ranks_rn: 1 for the likeliest token; None for Detail.TOKENS.
        top_ids_rnk: the likeliest tokens in order; None unless Detail.TOP_LOGPROBS.
        top_logprobs_rnk: their log-probabilities.
        speculated: counts of a speculative dispatch, whose rows have different numbers of tokens; otherwise None.
    """

    token_ids_rn: I32
    is_finite_rn: Bool
    logprobs_rn: F32 | None = None
    ranks_rn: I32 | None = None
    top_ids_rnk: I32 | None = None
    top_logprobs_rnk: F32 | None = None
    speculated: Speculated | None = None

    def at(self, index: int) -> StepOutputs:
        """Return the outputs of one step of a dispatch without log-probabilities."""
        only = slice(index, index + 1)
        return StepOutputs(self.token_ids_rn[:, only], self.is_finite_rn[:, only])

    def token(self, row: int, index: int = 0) -> int:
        """Return the token that a row sampled at an index."""
        return self.token_ids_rn.item(row, index)

    def logprob(self, row: int, index: int = 0) -> float:
        """Return the log-probability of that token.

        Raises:
            InternalError: the step computed no log-probabilities.
        """
        if self.logprobs_rn is None:
            raise InternalError("the step has no log-probabilities")
        return self.logprobs_rn.item(row, index)

    def position(self, row: int, num_top: int, index: int = 0) -> PositionLogprobs:
        """Return the token at `index` with its rank, and the num_top likeliest in order, if the step reported them.

        Raises:
            InternalError: the step computed no log-probabilities.
        """
        rank = None if self.ranks_rn is None else self.ranks_rn.item(row, index)
        chosen = TokenLogprob(self.token(row, index), self.logprob(row, index), rank)
        if not num_top or self.top_ids_rnk is None or self.top_logprobs_rnk is None:
            return PositionLogprobs(chosen)
        ids, values = self.top_ids_rnk[row, index, :num_top], self.top_logprobs_rnk[row, index, :num_top]
        pairs = enumerate(zip(ids.tolist(), values.tolist(), strict=True), start=1)
        return PositionLogprobs(chosen, tuple(TokenLogprob(token_id, value, rank) for rank, (token_id, value) in pairs))
