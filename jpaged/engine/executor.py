"""What the engine asks of a device: the shapes of one step, and its verbs. Owned by the engine, implemented below it.

    forward(StepInputs) ── hidden ──> sample(hidden, SamplingInputs) ── handle ──> collect(handle) ──> StepOutputs
    decode(StepInputs, SamplingInputs, ...), the two again and again ─ handle ──┘

The engine decides, the executor computes. Padded numpy arrays go down and come back; what is in between stays on the
device, and nothing waits before `collect`. The executor never changes what it was told to run, and the engine never
sees a device array.

    T  tokens packed in the step, padded to a bucket       S  rows of a step, always max_num_seqs
    M  width of a block-table row                          R  rows that the sampler runs on, padded to a bucket
    G  KV groups, each with block tables of its own        K  top log-probabilities reported
    X  token ids that a row may ban
    n  tokens that a row samples in a dispatch: 1, or one in each of its steps
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.cascade_costs import CascadeCosts
from jpaged.engine.reach import Reach
from jpaged.errors import InternalError
from jpaged.types import Adapter, PositionLogprobs, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from jpaged.engine.edits import EditInputs
    from jpaged.engine.telling import TellInputs, ToldOutputs

MIN_BUCKET = 8
"""Smallest shape. Never fewer rows: a bf16 matrix product with one row is 10 times slower than with two on CPU."""


@dataclass(frozen=True, slots=True)
class BucketTable:
    """The finite list of shapes: sizes that were compiled, ascending; a step is padded to the smallest that holds it.

    Two axes only. The forward is compiled for a number of packed tokens (T), the sampler for a number of rows (R);
    tables and row arrays have one size. Powers of two keep padding below half; from some tokens on there may be one
    more halfway between two. `decodes` are rows of programs that decode several steps, if any.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    decodes: tuple[int, ...] = ()

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

    def __str__(self) -> str:
        return f"tokens {', '.join(map(str, self.tokens))}; rows {', '.join(map(str, self.rows))}"


def _sizes_up_to(limit: int, halves_from: int | None = None) -> tuple[int, ...]:
    """8, 16, ... and the limit itself, which need not be a power of two; at least MIN_BUCKET."""
    powers = [MIN_BUCKET << i for i in range(limit.bit_length()) if MIN_BUCKET << i < limit]
    halves = [size * 3 // 2 for size in powers if halves_from and halves_from <= size < limit * 2 / 3]
    return (*sorted(powers + halves), max(limit, MIN_BUCKET))


I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
Bool = NDArray[np.bool_]

BANNED_WIDTH = 40
"""Token ids that a row may ban (X): a request's stop tokens and the model's own end-of-sequence tokens."""
MAX_NUM_STEPS = 16
"""Decode steps of one dispatch at most."""
TOP_WIDTH = 32
"""Top log-probabilities of a row that wants them (K): as many as a request or a beam search may ask for."""
NULL_BLOCK = 0
"""Padding rows and padding tokens write here; nothing reads it. Usable blocks are 1 to num_blocks."""


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
        max_loras: adapter slots, 1 to max_loras; 0 where the device takes no adapters.
        num_told: tokens of a step of which more than a sample is asked, at most (Q).
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
    max_loras: int = 0
    num_told: int = MIN_BUCKET

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
        return tuple(Reach.of(window, self.block_size, self.max_num_batched_tokens) for window in self.windows)

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


class Detail(enum.IntEnum):
    """What a sample tells of each token that it sampled; more does for less, and the tokens are the same."""

    TOKENS = 0
    LOGPROBS = 1
    TOP_LOGPROBS = 2

    @classmethod
    def of(cls, params: SamplingParams) -> Detail:
        """What a request needs."""
        if params.logprobs or params.beam_width:
            return cls.TOP_LOGPROBS
        return cls.LOGPROBS if params.needs_logprobs else cls.TOKENS


class RowField(NamedTuple):
    """One entry of the record that says how a row's next token is sampled.

    Attributes:
        dtype: of 32 bits.
        neutral: what it holds in padding, in rows that sample nothing, and where the request does not ask for it.
        width: how many of them a row has; None is one, without an axis.
    """

    name: str
    dtype: str
    neutral: float
    width: int | None = None


BEYOND_TOKENS = (1 << 31) - 1
"""A number above every token id and every count of tokens."""

ROW_FIELDS = (
    RowField("temperature_r", "float32", 0),  # 0 is greedy
    RowField("top_k_r", "int32", BEYOND_TOKENS),  # the size of the vocabulary and more keep all
    RowField("top_p_r", "float32", 1),  # 1 keeps all
    RowField("min_p_r", "float32", 0),  # 0 keeps all
    RowField("seeds_r2", "uint32", 0, width=2),  # the request's 64-bit seed as (high, low) words
    RowField("sequence_indices_r", "int32", 0),  # which sequence of its request the row is
    RowField("positions_r", "int32", 0),  # position in the sequence of the token that is sampled
    RowField("is_padding_r", "int32", 0),  # 1 for the rows behind the last one that is sampled
    RowField("banned_token_ids_rx", "int32", BEYOND_TOKENS, width=BANNED_WIDTH),  # cannot be sampled
)
"""Everything that a row of the sampler has. Records, padding, the buffer of a call and what is sent to other processes
follow from it; `random_columns` and `row_lists` fill it, and `jpaged.kernels.sampling.RowSampling` names it on devices.
"""
ROW_DTYPE = np.dtype([(field.name, field.dtype, field.width or ()) for field in ROW_FIELDS])
_NEUTRAL_ROW = np.zeros(1, ROW_DTYPE)
for _field in ROW_FIELDS:
    _NEUTRAL_ROW[_field.name] = _field.neutral


def random_columns(
    params: Sequence[SamplingParams], sequence_indices: Sequence[int], positions: Sequence[int]
) -> dict[str, Sequence[Any]]:
    """The fields of rows that sample at random, an entry a row; those of greedy rows are neutral."""
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
    """The lists of one row, greedy or not, that hold something; the rest of each field stays neutral."""
    if output_index < params.min_tokens:
        return {"banned_token_ids_rx": sorted(params.ending_ids(eos_token_ids))}
    return {}


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How each row's next token is sampled: records of `ROW_FIELDS`, never static arguments.

    Attributes:
        rows_r: of ROW_DTYPE.
        detail: what the row that wants most is told; the sampler has a variant for each.
        edits: how logits are changed before; None where no row asks for that.
    """

    rows_r: NDArray[np.void]
    detail: Detail = Detail.TOKENS
    edits: EditInputs | None = None

    @classmethod
    def neutral(cls, num_rows: int, *, detail: Detail = Detail.TOKENS) -> SamplingInputs:
        """Rows that sample the likeliest token, whatever it is."""
        return cls(_NEUTRAL_ROW.repeat(num_rows), detail)

    @property
    def words(self) -> I32:
        """The same memory as a program takes it, row after row."""
        return self.rows_r.view(np.int32)

    def fill_columns(self, rows: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> None:
        """Writes fields of some rows, an entry a row."""
        places = np.array(rows)
        for name, values in columns.items():
            self.rows_r[name][places] = values

    def fill_lists(self, row: int, lists: Mapping[str, Sequence[Any]]) -> None:
        """Writes the first entries of fields of one row."""
        for name, values in lists.items():
            self.rows_r[name][row, : len(values)] = values


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, padded. Row i owns tokens query_starts[i] to query_starts[i + 1] of the packed axis.

    A device gets the fields in this order, in the shapes that end their names.

    Attributes:
        token_ids_t: input tokens; ignored where is_prev_sampled_t.
        is_prev_sampled_t: the token is what the previous dispatched step sampled for row prev_sampled_rows_t, and the
            host has not seen it.
        prev_sampled_rows_t: a row of the previous step; 0 where not used.
        positions_t: position of each token in its sequence.
        rope_lens_t: max(position + 1, prompt length), for position embeddings that depend on the sequence's length.
        slots_gt: where the token's keys and values go in each KV group: block * block_size + offset; slot 0 of the null
            block for padding.
        adapters_t: adapter slot of each token; 0 is none.
        sample_tokens_s: place in the packed axis of each row's last token, from which its next is sampled.
        query_starts_s1: [S + 1]; rows beyond num_rows are empty.
        kv_lens_s: tokens of each row's context, those of this step included; 0 beyond num_rows.
        block_tables_gsm: block ids of each KV group; the null block beyond a row's context, and where no query of the
            row sees as far back.
        told_tokens_q: places in the packed axis of the tokens of which more is asked; 0 where not used.
        num_rows: rows in use.
        kv_begins_s: tokens that a row shares with the other rows of its run; their block tables begin alike.
        run_starts_s1: [S + 1]; run g is the rows run_starts[g] to run_starts[g + 1]. num_rows beyond num_runs.
        num_runs: runs in use, which cover the rows in use; 0 where no two rows read anything together.
        num_tokens: tokens in use.
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
    told_tokens_q: I32
    num_rows: int
    kv_begins_s: I32
    run_starts_s1: I32
    num_runs: int
    num_tokens: int

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that attention looks at, over all rows, in one head of one layer."""
        return num_pairs(self.query_starts_s1[: self.num_rows + 1], self.kv_lens_s[: self.num_rows])


def num_pairs(query_starts: I32, kv_lens: I32) -> int:
    """Pairs of a query and a key, where the queries of each row are the last of its context."""
    query_lens = np.diff(query_starts).astype(np.int64)
    return int(np.dot(query_lens, kv_lens) - np.dot(query_lens, query_lens - 1) // 2)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one dispatch sampled, n tokens a row in their order, in host memory.

    Attributes:
        token_ids_rn: the sampled tokens.
        is_sound_rn: False where a token means nothing: the logits hold NaN or plus infinity, or nothing is left to
            sample.
        logprobs_rn: their log-probabilities under the model's own distribution (before temperature and truncation);
            None of Detail.TOKENS.
        ranks_rn: 1 for the likeliest token; None of Detail.TOKENS.
        top_ids_rnk: the likeliest tokens in order; None unless of Detail.TOP_LOGPROBS.
        top_logprobs_rnk: theirs.
    """

    token_ids_rn: I32
    is_sound_rn: Bool
    logprobs_rn: F32 | None = None
    ranks_rn: I32 | None = None
    top_ids_rnk: I32 | None = None
    top_logprobs_rnk: F32 | None = None

    def at(self, place: int) -> StepOutputs:
        """What one step of a dispatch without log-probabilities sampled."""
        only = slice(place, place + 1)
        return StepOutputs(self.token_ids_rn[:, only], self.is_sound_rn[:, only])

    def token(self, row: int, place: int = 0) -> int:
        """The token that a row sampled in a place."""
        return self.token_ids_rn.item(row, place)

    def logprob(self, row: int, place: int = 0) -> float:
        """Its log-probability.

        Raises:
            InternalError: the step told of none.
        """
        if self.logprobs_rn is None:
            raise InternalError("log-probabilities are wanted of a step that told of none")
        return self.logprobs_rn.item(row, place)

    def position(self, row: int, num_top: int, place: int = 0) -> PositionLogprobs:
        """The token at `place` with its rank, and the num_top likeliest in order, where the step reported them.

        Raises:
            InternalError: the step told of no log-probabilities.
        """
        rank = None if self.ranks_rn is None else self.ranks_rn.item(row, place)
        chosen = TokenLogprob(self.token(row, place), self.logprob(row, place), rank)
        if not num_top or self.top_ids_rnk is None or self.top_logprobs_rnk is None:
            return PositionLogprobs(chosen)
        ids, values = self.top_ids_rnk[row, place, :num_top], self.top_logprobs_rnk[row, place, :num_top]
        pairs = enumerate(zip(ids.tolist(), values.tolist(), strict=True), start=1)
        return PositionLogprobs(chosen, tuple(TokenLogprob(token_id, value, rank) for rank, (token_id, value) in pairs))


Hidden = TypeVar("Hidden")
"""What a forward leaves for its sample. Opaque to the engine, and good until the next forward."""
Handle = TypeVar("Handle")
"""A dispatched step whose results may not exist yet. Opaque to the engine; collected once, in order of dispatch."""

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) while the executor starts."""


class Executor(Protocol[Hidden, Handle]):
    """A device, or many, or a fake: holds the weights and the pool, runs steps in the order of their dispatch.

    Because steps run in that order, a block may be given to another sequence as soon as the host lets it go, even while
    an earlier step still writes to it.
    """

    @property
    def geometry(self) -> Geometry: ...

    @property
    def rates(self) -> DeviceRates:
        """The device's rates, known once `warm_up` has returned."""
        ...

    @property
    def num_compiles_after_warm_up(self) -> int:
        """Programs compiled since `warm_up` returned: 0, or something is wrong."""
        ...

    def warm_up(self, progress: Progress) -> None:
        """Compiles every program on the list and runs none of them on real data."""
        ...

    def move_blocks(self, moves: BlockMoves) -> None:
        """Starts moving blocks, all layers of their group, as one transfer; before any step that is dispatched later.

        Returns before it is done, also where blocks leave for host memory.
        """
        ...

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Starts writing an adapter over what a slot held; before any step that is dispatched later."""
        ...

    def count(self, slot: int, token_ids: Sequence[int], num_prompt: int) -> None:
        """Starts counting a sequence's tokens in a slot, whatever was there; before any step that is dispatched later.

        Args:
            slot: 1 to max_num_seqs; what is sampled in rows of that slot is counted there from now on.
            token_ids: of the sequence, the first num_prompt of them its prompt.
        """
        ...

    def forward(self, inputs: StepInputs) -> Hidden:
        """Starts the model over a step's tokens; returns before it is done."""
        ...

    def sample(self, hidden: Hidden, inputs: SamplingInputs) -> Handle:
        """Starts sampling from what the last forward leaves; returns before it is done.

        The next forward finds the sampled tokens on the device, see `StepInputs.prev_sampled_rows_t`.
        """
        ...

    def tell(self, hidden: Hidden, inputs: TellInputs) -> Any:
        """Starts telling more of what the last forward leaves than a sample does; returns before it is done."""
        ...

    def decode(self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int) -> Handle:
        """Starts several steps of rows that decode; returns before they are done. The last tokens are as `sample`'s.

        Row i has token i and no other in each of them, is of Detail.TOKENS, and its block table has room for all. One
        that samples an id that ends it (BEYOND_TOKENS is none), or that a decode before has ended so, keeps that token:
        what it gives afterwards is sound and means nothing. No further step is run when all rows have ended.
        """
        ...

    def is_done(self, handle: Handle) -> bool:
        """Whether `collect` would not wait; asks and never waits itself."""
        ...

    def collect(self, handle: Handle) -> StepOutputs:
        """Waits for a step and brings its results to the host."""
        ...

    def collect_told(self, handle: Any) -> ToldOutputs:
        """Waits for a tell and brings its results to the host; once, and in the order of their dispatch."""
        ...

    def shutdown(self) -> None:
        """Gives all device memory back. The executor is spent: any further call raises."""
        ...
