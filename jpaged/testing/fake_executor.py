"""An executor without a model, whose tokens can be computed by hand and depend on every slot of the context.

The pool is real: a step writes its tokens into their slots, and reads the context back through the block table. Rows of
a run read the shared prefix through the table of the run's first row. The next token of a context c[0], c[1], ... is

    (1 * c[0] + 2 * c[1] + 3 * c[2] + ...  + noise) mod vocab_size

with a sum for each KV group over its window of the context: once the first group's, twice the second's, ... So a wrong
slot, a stale block or a shared one changes it. `noise` is 0 for a greedy row, and otherwise a function of (seed,
sequence index, position). Keys depend on all previous tokens, so a slot stores their digest next to its token. The
right tokens after another prefix are therefore an error, too, and reading them raises. A slot may be NaN, see `Faults`:
a row that reads it samples nothing. Host blocks hold tokens and digests as bytes.

An adapter is a number that is added to the noise and to the digest of each token. Reading keys that another adapter
computed is therefore an error, too.

Logits processors check token counts against the rows' own tokens, and change tokens. A token t that a row would sample
becomes the first of t + shift, t + shift + 1, ... that is allowed, where

    shift = 4 (repetition - 1) * distinct tokens + 4 frequency * generated tokens + 4 presence * distinct generated ones

so that a token that is missed or counted twice changes the output. The likelihood of a token falls with its distance
from the next token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import (
    I32,
    MAX_NUM_STEPS,
    NULL_BLOCK,
    SLEEP_TAGS,
    TOP_WIDTH,
    BlockArrays,
    BlockMoves,
    BucketTable,
    Detail,
    DeviceRates,
    ExpertStats,
    Geometry,
    Move,
    Progress,
    SamplingInputs,
    Sleeper,
    SleepTag,
    StepInputs,
    StepOutputs,
    WeightUpdate,
)
from jpaged.engine.executor.aux_io import AuxInputs, AuxKind, AuxOutputs
from jpaged.engine.executor.io import ANY_TOKEN, MASK_BITS, CascadeCosts, LogitsProcessorInputs, TokenCountReset
from jpaged.errors import InternalError, InvalidArgument
from jpaged.testing.fake_model import NAN, ByteTokenizer, Script, SeenTokens, Window, places_seen, sampled
from jpaged.testing.fake_steps import FakeDraft, FakeFeed, FakeInterrupt, FakeRounds
from jpaged.types import Adapter


@dataclass(slots=True)
class CountedTokens:
    """The tokens that are counted in each slot."""

    _tokens: dict[int, list[int]] = field(default_factory=dict)
    _num_prompt: dict[int, int] = field(default_factory=dict)

    def count(self, due: Sequence[TokenCountReset], num_slots: int) -> None:
        """Reset these slots, and count their tokens."""
        for slot, token_ids, num_prompt in due:
            if not 1 <= slot <= num_slots:
                raise InternalError(f"tokens are to be counted in slot {slot} of {num_slots}")
            self._tokens[slot], self._num_prompt[slot] = list(token_ids), num_prompt

    def edited(
        self,
        token_id: int,
        edits: LogitsProcessorInputs,
        row: int,
        context: list[int],
        vocab_size: int,
        banned_ids: frozenset[int] = frozenset(),
    ) -> int | None:
        """Return the token that a row samples, counted if the row has a slot; None if nothing is allowed.

        Args:
            context: all tokens of the row's sequence.
            banned_ids: further tokens that the row may not sample.

        Raises:
            InternalError: the slot counts other tokens than the context.
        """
        record = edits.rows_r[row]
        slot, last = int(record["slots_r"]), int(context[-1])
        if slot:
            counted = self._tokens.get(slot)
            if counted != context:
                raise InternalError(f"slot {slot} of row {row} counts {counted}, of {context}")
            token_id += _shift(record, counted, self._num_prompt[slot])
        unlikely, allowed = set[int](), set(range(vocab_size)) - banned_ids
        if edits.singles_rx is not None:
            singles = edits.singles_rx[row]
            applies = (singles["after"] == ANY_TOKEN) | (singles["after"] == last)
            unlikely = set(singles["ids"][applies & (singles["values"] < 0)].tolist())
            allowed -= set(singles["ids"][applies & np.isneginf(singles["values"])].tolist())
        if edits.mask_rw is not None:
            mask = edits.mask_rw[row].astype(np.uint32)
            allowed = {t for t in allowed if mask[t // MASK_BITS] >> np.uint32(t % MASK_BITS) & 1}
        likely = allowed - unlikely or allowed
        in_order = (t % vocab_size for t in range(token_id, token_id + vocab_size))
        chosen = next((t for t in in_order if t in likely), None)
        if slot:
            self._tokens[slot].append(chosen or 0)
        return chosen


def _shift(record: np.void, tokens: list[int], num_prompt: int) -> int:
    generated = tokens[num_prompt:]
    parts = (
        (float(record["repetition_r"]) - 1) * len(set(tokens)),
        float(record["frequency_r"]) * len(generated),
        float(record["presence_r"]) * len(set(generated)),
    )
    return round(4 * sum(parts))


class FakeHostBlocks:
    """Implements `jpaged.engine.executor.HostBlocks`; swap-outs complete at once."""

    def __init__(self, host: NDArray[np.int64], pool: NDArray[np.int64], block_size: int, identity: bytes) -> None:
        self._host = host
        self._pool = pool
        self.place = block_size
        self._identity = identity
        self._weight = 0
        self._block_size = block_size
        self.bytes_per_block = block_size * host.shape[1] * host.itemsize

    def view(self, block_id: int) -> memoryview:
        """Return the tokens of a block and their digests."""
        rows = self._host[block_id * self._block_size : (block_id + 1) * self._block_size]
        if block_id < 1 or len(rows) < self._block_size:
            raise InternalError(f"there is no host block {block_id}")
        return rows.reshape(-1).view(np.uint8).data

    def have_landed(self, block_ids: Sequence[int]) -> bool:
        return True

    def read(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> BlockArrays:
        """Return one array of the blocks."""
        named = [(self._pool, block_id) for block_id in block_ids]
        named += [(self._host, block_id) for block_id in host_block_ids]
        rows = [memory[block_id * self.place : (block_id + 1) * self.place].copy() for memory, block_id in named]
        return BlockArrays((np.stack(rows),), (len(rows),))

    def receive(self, contents: BlockArrays, block_ids: Sequence[int]) -> None:
        """Write blocks at once."""
        for row, block_id in zip(contents.arrays[0], block_ids, strict=True):
            if block_id:
                self._host[block_id * self.place : (block_id + 1) * self.place] = row

    def kv_identity(self) -> bytes:
        """Return a hash shared by all fakes that write the same numbers."""
        return hashlib.sha256(self._identity + (str(self._weight).encode() if self._weight else b"")).digest()

    def set_weight(self, weight: int) -> None:
        """Set what the blocks are written with."""
        self._weight = weight


@dataclass(slots=True)
class FakeRoutes:
    """Implements `jpaged.engine.executor.RoutedExperts`: a token's experts are bytes from the digest of the prefix."""

    pool: NDArray[np.int64]
    block_size: int

    def read(self, block_ids: Sequence[int], num_tokens: int) -> NDArray[np.uint8]:
        """Return two experts in each of three layers, of which the first has none."""
        digests = self.pool[slots_of_blocks([*block_ids], self.block_size), 1][:num_tokens]
        ids = np.zeros((num_tokens, 3, 2), np.uint8)
        ids[:, 1:] = digests.view(np.uint8).reshape(-1, 8)[:, :4].reshape(-1, 2, 2)
        return ids


@dataclass(slots=True)
class FakeUpdate:
    """New weights of a fake: a number that is added to the next token, like that of an adapter.

    Attributes:
        fails: replacing the weights fails halfway.
        is_closed: `close` was called.
    """

    weight: int
    is_complete: bool = True
    fails: bool = False
    is_closed: bool = False

    def close(self) -> None:
        """Record the call."""
        self.is_closed = True


def get_run(inputs: StepInputs, row: int) -> tuple[int, int]:
    """Return the first row and the end of the run that a row is in; the row alone if there are no runs."""
    if not inputs.num_runs:
        return row, row + 1
    run = int(np.searchsorted(inputs.run_starts_s1[: inputs.num_runs + 1], row, side="right")) - 1
    first, end = inputs.run_starts_s1[run : run + 2]
    if not first <= row < end or inputs.kv_begins_s[row] != inputs.kv_begins_s[first]:
        raise InternalError(f"row {row} shares {inputs.kv_begins_s[row]} tokens with the rows {first} to {end}")
    begin, shared = inputs.query_starts_s1[row], inputs.kv_begins_s[row]
    if begin < inputs.query_starts_s1[row + 1] and shared > inputs.positions_t[begin]:
        raise InternalError(f"row {row} is at {inputs.positions_t[begin]} and shares {shared} tokens")
    return int(first), int(end)


def adapter_slot(inputs: StepInputs, row: int) -> int:
    """Return the adapter slot of a row, which all its tokens share."""
    slots = inputs.adapters_t[inputs.query_starts_s1[row] : inputs.query_starts_s1[row + 1]]
    slot = int(inputs.adapters_t[inputs.sample_tokens_s[row]])
    if np.any(slots != slot):
        raise InternalError(f"row {row} of adapter slot {slot} has tokens of {slots.tolist()}")
    return slot


LOGPROB_STEP = -0.125
"""Sums of it are exact, so that equal sums are equal."""


def compute_aux(inputs: AuxInputs, contexts: Sequence[Sequence[int]], next_ids: Sequence[int], size: int) -> AuxOutputs:
    """Return log-probabilities or hidden states of the rows in use.

    Args:
        contexts: all tokens up to that of each hidden state.
        next_ids: the token that each would sample.
        size: of the vocabulary.
    """
    if inputs.kind == AuxKind.HIDDEN:
        hidden = [[context[-1], len(context), sum(context) % 1000] for context in contexts]
        return AuxOutputs(hidden_re=np.array(hidden, np.float32))
    next_r1 = np.array(next_ids, np.int64)[:, None]
    if inputs.kind == AuxKind.ALL_LOGPROBS:
        distances_rv = (np.arange(size) - next_r1) % size
        return AuxOutputs(all_logprobs_rv=((distances_rv + 1) * LOGPROB_STEP).astype(np.float32))
    distances_rk = (inputs.ids_rk[: len(next_ids)] - next_r1) % size
    top = np.arange(min(TOP_WIDTH, size))
    return AuxOutputs(
        is_sound_r=np.ones(len(next_ids), np.bool_),
        ranks_r=(distances_rk[:, 0] + 1).astype(np.int32),
        logprobs_rk=((distances_rk + 1) * LOGPROB_STEP).astype(np.float32),
        top_ids_rk=((next_r1 + top) % size).astype(np.int32),
        top_logprobs_rk=np.broadcast_to((top + 1) * LOGPROB_STEP, (len(next_ids), len(top))).astype(np.float32),
    )


_UNWRITTEN = -1
_DIGEST_FACTOR = 6_364_136_223_846_793_005  # odd, so that no power of it is 0 in 64 bits
_ANY_SHARING_PAYS = CascadeCosts(1, 1, tile_tokens=1.0, query_share=0.0, query_tokens=0.0, step_tokens=0.0)


@dataclass(frozen=True, slots=True)
class FakeAdapter:
    """An adapter that changes tokens by a number, its weight."""

    weight: int
    num_bytes: int = 1

    @property
    def digest(self) -> bytes:
        """Hash of the weight."""
        return hashlib.sha256(str(self.weight).encode()).digest()


@dataclass(slots=True)
class Faults:
    """Injected faults.

    Attributes:
        fail_at_step: the forward of this step (counted from 0) raises, as for a lost device.
        nan_token_ids: NaN is written for these tokens, which makes the logits of a row that reads them NaN, too.
        gate: collect waits until it is set, so that a test can hold the engine inside a step.
    """

    fail_at_step: int | None = None
    nan_token_ids: frozenset[int] = frozenset()
    gate: threading.Event = field(default_factory=threading.Event)
    _num_free: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.gate.set()

    def hold_after(self, num_steps: int) -> None:
        """Clear the gate after `num_steps` more steps are collected; the outcome does not depend on timing."""
        with self._lock:
            self._num_free = num_steps

    def release(self) -> None:
        """Open the gate permanently, even if `hold_after` would still clear it."""
        with self._lock:
            self._num_free = None
            self.gate.set()

    def wait(self) -> None:
        """Wait at the gate; called by collect."""
        with self._lock:
            if self._num_free == 0:
                self._num_free = None
                self.gate.clear()
            elif self._num_free is not None:
                self._num_free -= 1
        self.gate.wait()


class FakeExecutor:
    """Implements `jpaged.engine.executor.Executor` in numpy.

    Reading a slot that was never written, or that was written after another prefix, raises.

    Attributes:
        max_num_steps: maximum decode steps of a dispatch.
        has_fed_steps: they can wait for masks.
        num_speculative_tokens: proposals of the draft model; 0 has none.
        draft: the state of the draft model.
        windows: of the KV groups.
        num_sink_tokens: first tokens that the KV groups see in addition.
        max_loras: number of adapter slots.
        embed_width: width of input embeddings, whose first number is the token that they stand for; 0 takes none.
        state_bytes: of the recurrent state of a sequence; 0 without recurrent layers.
        state_checkpoint_blocks: blocks of the pool for each checkpoint of recurrent state; 0 without checkpoints.
        num_compiles_after_warm_up: 0, because it compiles nothing.
        expert_stats: None, because it has no experts.
        host_blocks: the tokens in host memory, as bytes.
        can_reload: discarded weights can be read again.
        asleep: device memory that `sleep` has released, of `sleep_level`.
        sampled: returns the token that a row samples.
        last_tokens, have_ended: see `fake_feed.RunsSteps`.
    """

    max_num_steps = 1
    can_reload = True
    has_fed_steps = False
    num_speculative_tokens = 0
    windows: tuple[int | None, ...] = (None,)
    num_sink_tokens = 0
    dp_size = 1
    max_loras = 0
    embed_width = 0
    state_bytes = 0
    state_checkpoint_blocks = 0
    num_compiles_after_warm_up = 0
    keeps_routes = False
    expert_stats: ExpertStats | None = None
    sampled: Callable[[SeenTokens, np.void, int], int] = staticmethod(sampled)

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 128,
        vocab_size: int = 257,
        num_host_blocks: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self.faults = faults or Faults()
        self.num_steps = 0
        self._geometry = Geometry(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            bytes_per_block=block_size * 8,
            buckets=_buckets(max_num_batched_tokens, max_num_seqs, self),
            num_host_blocks=num_host_blocks,
            max_num_steps=self.max_num_steps,
            has_fed_steps=self.has_fed_steps,
            windows=self.windows,
            num_sink_tokens=self.num_sink_tokens,
            dp_size=self.dp_size,
            max_loras=self.max_loras,
            embed_width=self.embed_width,
            embed_max=float(vocab_size),
            num_speculative_tokens=self.num_speculative_tokens,
            state_bytes=self.state_bytes,
            state_checkpoint_interval=self.state_checkpoint_blocks * block_size,
            num_draft_states=max_num_seqs * self.num_speculative_tokens if self.state_bytes else 0,
            cascade=None
            if self.num_sink_tokens or self.dp_size > 1
            else dataclasses.replace(_ANY_SHARING_PAYS, granule_tokens=block_size, tile_queries=max_num_batched_tokens),
        )
        # For each slot the token, and the digest of the tokens up to it.
        self._host: NDArray[np.int64] = np.full(((num_host_blocks + 1) * block_size, 2), _UNWRITTEN, np.int64)
        self._pool: NDArray[np.int64] = np.full(((num_blocks + 1) * block_size, 2), _UNWRITTEN, np.int64)
        identity = repr((type(self).__name__, self.windows, self.num_sink_tokens, block_size)).encode()
        self.host_blocks = FakeHostBlocks(self._host, self._pool, block_size, identity) if num_host_blocks else None
        self._factors = np.cumprod(np.full(max_model_len, _DIGEST_FACTOR, np.int64))
        self.last_tokens = np.zeros(max_num_seqs, np.int64)
        self.have_ended = np.zeros(max_num_seqs, np.bool_)
        # For each slot the digest of all tokens that the state has seen.
        self._states: NDArray[np.int64] = np.full(self._geometry.num_state_slots + 1, _UNWRITTEN, np.int64)
        self._weights: NDArray[np.int64] = np.zeros(self.max_loras + 1, np.int64)  # of the adapter in each slot
        self.base_weight = 0
        self._counted = CountedTokens()
        self.draft = FakeDraft(self._geometry, _UNWRITTEN)
        self._aux: list[SeenTokens] = []  # for the last step's positions with auxiliary outputs
        self._is_shut_down = False
        self.asleep: set[SleepTag] = set()
        self.sleep_level = 0

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def routed_experts(self) -> FakeRoutes | None:
        """Reads the digests of tokens, if `keeps_routes`."""
        return FakeRoutes(self._pool, self._geometry.block_size) if self.keeps_routes else None

    @property
    def sleeper(self) -> Sleeper:
        """The executor itself."""
        return self

    @property
    def rates(self) -> DeviceRates:
        """Fixed rates: swapping a block costs the same as recomputing its tokens."""
        return DeviceRates(swap_out_bytes_per_s=16e6, swap_in_bytes_per_s=16e6, forward_s=((1, 1e-6),))

    def warm_up(self, progress: Progress) -> None:
        progress("programs", 1, 1)

    def move_blocks(self, moves: BlockMoves) -> None:
        """Move blocks at once; all sources are read before any destination is written."""
        if set(moves.sources) & set(moves.destinations) and moves.move is Move.COPY:
            raise InternalError(f"a copy reads what it writes: {moves}")
        source, destination = {
            Move.COPY: (self._pool, self._pool),
            Move.SWAP_OUT: (self._pool, self._host),
            Move.SWAP_IN: (self._host, self._pool),
        }[moves.move]
        block_size = self._geometry.block_size
        read = source[slots_of_blocks(moves.sources, block_size)]
        destination[slots_of_blocks(moves.destinations, block_size)] = read
        self.draft.move(moves)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Load the adapter at once."""
        if not 1 <= slot <= self.max_loras:
            raise InternalError(f"adapter slot {slot}; there are {self.max_loras}")
        if not isinstance(adapter, FakeAdapter):
            raise InternalError(f"{adapter} is not a fake adapter")
        self._weights[slot] = self.base_weight + adapter.weight

    def forward(self, inputs: StepInputs) -> list[SeenTokens]:
        """Run the forward at once; return what each row may look at when it samples."""
        if self._is_shut_down:
            raise InternalError("the executor was shut down")
        if self.asleep:
            raise InternalError(f"a step runs while the {sorted(self.asleep)} sleep")
        if self.num_steps == self.faults.fail_at_step:
            raise RuntimeError(f"injected fault at step {self.num_steps}")
        self.num_steps += 1
        self._check_ranks(inputs)
        tokens_t = np.where(inputs.is_prev_sampled_t, self.last_tokens[inputs.prev_sampled_rows_t], inputs.token_ids_t)
        if inputs.embeds_te is not None and inputs.is_embed_t is not None:
            tokens_t = np.where(inputs.is_embed_t, inputs.embeds_te[:, 0].astype(np.int64), tokens_t)
        used = slice(0, inputs.num_tokens)
        is_nan_t = np.isin(tokens_t, list(self.faults.nan_token_ids))
        self._pool[inputs.slots_gt[:, used], 0] = (tokens_t + is_nan_t * NAN)[used]
        for row in range(inputs.num_rows):
            self._write_digests(inputs, row)
        self._aux = [self._seen_at(inputs, int(place)) for place in inputs.aux_tokens_q]
        last_t = inputs.query_starts_s1[1 : inputs.num_rows + 1] - 1
        has_ended = inputs.is_prev_sampled_t[last_t] & self.have_ended[inputs.prev_sampled_rows_t[last_t]]
        if self.state_bytes:
            self._write_states(inputs, has_ended)
        return [self._seen(inputs, row, is_checked=not has_ended[row]) for row in range(inputs.num_rows)]

    def _check_ranks(self, inputs: StepInputs) -> None:
        """Check that all blocks of a row are of one rank, and that each rank's tokens fit into its part of the step.

        Raises:
            InternalError: they are not, or do not.
        """
        geometry = self._geometry
        if geometry.dp_size == 1:
            return
        tables_sm = inputs.block_tables_gsm[0, : inputs.num_rows]
        ranks_sm = np.where(tables_sm > 0, (tables_sm - 1) // geometry.num_blocks_of_rank, -1)
        ranks_s, lens_s = ranks_sm[:, 0], np.diff(inputs.query_starts_s1)[: inputs.num_rows]
        if ((ranks_sm >= 0) & (ranks_sm != ranks_s[:, None])).any():
            raise InternalError(f"rows have blocks of several ranks: {ranks_sm}")
        limit = len(inputs.token_ids_t) // geometry.dp_size
        if np.bincount(ranks_s, lens_s).max() > limit:
            raise InternalError(f"a rank has over {limit} tokens: {lens_s} tokens of ranks {ranks_s}")

    def sample(self, hidden: list[SeenTokens], inputs: SamplingInputs) -> StepOutputs:
        """Sample at once; the handle is the result."""
        token_ids_r = np.zeros(len(inputs.rows_r), np.int32)
        is_sound_r = np.ones(len(token_ids_r), np.bool_)
        if inputs.edits is not None:
            self._counted.count(inputs.edits.due, self._geometry.max_num_seqs)
        for row, seen in enumerate(hidden):
            is_sound_r[row] = all(tokens.max() < NAN for tokens in seen.tokens)
            token_ids_r[row] = self.sampled(seen, inputs.rows_r[row], self._geometry.vocab_size)
            if inputs.edits is not None:
                banned = frozenset(inputs.rows_r[row]["banned_token_ids_rx"].tolist())
                edited = self._counted.edited(
                    int(token_ids_r[row]), inputs.edits, row, seen.context, self._geometry.vocab_size, banned
                )
                token_ids_r[row], is_sound_r[row] = edited or 0, is_sound_r[row] and edited is not None
        self.last_tokens[: len(token_ids_r)] = token_ids_r[: len(self.last_tokens)]
        self.have_ended[:] = False
        return _outputs(token_ids_r[:, None], is_sound_r[:, None], inputs.detail, self._geometry.vocab_size)

    def compute_aux(self, hidden: list[SeenTokens], inputs: AuxInputs) -> Callable[[], AuxOutputs]:
        """Compute log-probabilities or hidden states at once."""
        num_rows, vocab_size = self._geometry.buckets.rows[-1], self._geometry.vocab_size
        seen = [
            hidden[place] if place < num_rows else self._aux[place - num_rows]
            for place in inputs.places_r[: inputs.num_rows].tolist()
        ]
        told = compute_aux(
            inputs, [one.context for one in seen], [one.next_token(vocab_size) for one in seen], vocab_size
        )
        return lambda: told

    def decode(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> StepOutputs:
        """Run one step after the other at once, until every row has ended."""
        return FakeFeed(self, inputs, sampling, ending_token_ids_rx, num_steps).run()

    def decode_interruptibly(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[FakeFeed, FakeInterrupt]:
        """Run the steps when they are collected, so that a test can interrupt them."""
        feed = FakeFeed(self, inputs, sampling, ending_token_ids_rx, num_steps)
        feed.set_interruptible()
        return feed, FakeInterrupt(feed)

    def decode_with_masks(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> tuple[FakeFeed, FakeFeed]:
        """Run each step when its masks arrive; the mask channel is also the handle."""
        feed = FakeFeed(self, inputs, sampling, ending_token_ids_rx, num_steps)
        return feed, feed

    def speculate(
        self,
        inputs: StepInputs,
        sampling: SamplingInputs,
        ending_token_ids_rx: I32,
        num_left_r: I32,
        num_rounds: int,
        unseen: Sequence[StepInputs] = (),
    ) -> StepOutputs:
        """Run all rounds at once; see `fake_rounds` for what is accepted.

        Raises:
            InternalError: it has no draft model, or no program for this number of rows.
        """
        if len(sampling.rows_r) not in self._geometry.buckets.speculates:
            raise InternalError(f"no program speculate[{len(sampling.rows_r)}]")
        for step in unseen:
            self.draft.show(step, self._pool)
        self.draft.begin(inputs, self._pool)
        used = slice(0, inputs.num_rows)
        last_ids = self.last_tokens[inputs.prev_sampled_rows_t[used]]
        first_ids = np.where(inputs.is_prev_sampled_t[used], last_ids, inputs.token_ids_t[used]).tolist()
        ending = ending_token_ids_rx.tolist()
        has_ended = [
            bool(inputs.is_prev_sampled_t[row]) and first_ids[row] in ending[row] for row in range(inputs.num_rows)
        ]
        rounds = FakeRounds(
            *(inputs, sampling, first_ids, ending_token_ids_rx, num_left_r),
            num_proposed=self.num_speculative_tokens,
            block_size=self._geometry.block_size,
        )
        outputs = rounds.run(lambda step, rows: self.sample(self.forward(step), rows), has_ended, num_rounds)
        counts_r = np.zeros(0, np.int32) if outputs.speculated is None else outputs.speculated.num_tokens_r
        self.draft.end(inputs, counts_r, self._pool)
        for row, first_id in enumerate(first_ids):
            self.last_tokens[row] = outputs.token(row, int(counts_r[row]) - 1) if counts_r[row] else first_id
        return outputs

    def is_done(self, handle: StepOutputs | FakeFeed) -> bool:
        return True

    def collect(self, handle: StepOutputs | FakeFeed) -> StepOutputs:
        self.faults.wait()
        return handle.outputs if isinstance(handle, FakeFeed) else handle

    def shutdown(self) -> None:
        self._is_shut_down = True

    def sleep(self, level: int) -> None:
        """Forget the blocks, and the adapters with the weights; steps raise until both tags are awake."""
        self._pool[:] = _UNWRITTEN
        self.draft = FakeDraft(self._geometry, _UNWRITTEN)
        self.sleep_level = level
        self.asleep = set(SLEEP_TAGS)
        if level > 1:
            self.base_weight = 0
            self._weights[:] = 0

    def wake_up(self, tag: SleepTag) -> None:
        """Let steps use what sleeps again."""
        self.asleep.remove(tag)

    def check_update(self, weights: object) -> FakeUpdate:
        """Return an update that was made by a test, or one of the number in a file or in the array `weight`.

        Raises:
            InvalidArgument: it is none of them.
        """
        if isinstance(weights, Mapping) and [*weights] == ["weight"] and weights["weight"].shape == (1,):
            return FakeUpdate(int(weights["weight"][0]))
        if isinstance(weights, str) and Path(weights).is_file():
            return FakeUpdate(int(Path(weights).read_text(encoding="utf-8")))
        if not isinstance(weights, FakeUpdate):
            raise InvalidArgument("weights", f"{weights!r} is not a FakeUpdate")
        return weights

    def update(self, update: WeightUpdate) -> None:
        """Replace the weights at once; adapter slots are empty after it if the weights were asleep."""
        assert isinstance(update, FakeUpdate)
        if update.fails:
            self.discard()
            raise InvalidArgument("weights", "tensor w is not finite")
        if "weights" in self.asleep:
            self._weights[:] = self.base_weight
        self._weights += update.weight - self.base_weight
        self.base_weight = update.weight
        self.asleep.discard("weights")
        self._identity_changed()

    def discard(self) -> None:
        """Forget the weights; steps raise until there are others."""
        self.base_weight = 0
        self._weights[:] = 0
        self.asleep.add("weights")

    def _identity_changed(self) -> None:
        if self.host_blocks is not None:
            self.host_blocks.set_weight(self.base_weight)

    def _write_digests(self, inputs: StepInputs, row: int) -> None:
        """Continue, in the slots that a row has written, the digest of the tokens before them."""
        begin, end = inputs.query_starts_s1[row], inputs.query_starts_s1[row + 1]
        if begin == end:
            return
        start, before = inputs.positions_t[begin], np.int64(0)
        weight = self._weights.item(adapter_slot(inputs, row))
        for group in range(len(self._geometry.windows)):
            slots = self._get_slots(inputs, row, group, max(0, start - 1))
            if start:
                # A window of one token does not include the previous one; the first group, with full attention, does.
                before = self._pool[slots[0], 1] if not group or self._geometry.windows[0] else before
                slots = slots[1:]
            self._pool[slots, 1] = _digests(self._pool[slots, 0], self._factors[start:], weight) + before

    def _write_states(self, inputs: StepInputs, has_ended_s: NDArray[np.bool_]) -> None:
        """Read the state of each row, and write the one after its tokens; all are read before one is written.

        A row of a draft token continues the row before it.

        Raises:
            InternalError: a state is not that of the tokens before the step, and the row has not ended.
        """
        written: dict[int, np.int64] = {}
        for row in range(inputs.num_rows):
            begin, end = inputs.query_starts_s1[row], inputs.query_starts_s1[row + 1]
            if begin == end:
                continue
            start, slot = int(inputs.positions_t[begin]), int(inputs.state_slots_s[row])
            slots = self._get_slots(inputs, row, 0, max(0, start - 1))
            source = inputs.state_sources_s[row]
            state = self._states[source]
            if inputs.is_draft_s[row]:
                if source != inputs.state_sources_s[row - 1]:
                    raise InternalError(f"row {row} of a draft reads state slot {source}, unlike the row before it")
                state = written.get(int(inputs.state_slots_s[row - 1]), np.int64(_UNWRITTEN))
            if start and not has_ended_s[row] and state != self._pool[slots[0], 1]:
                raise InternalError(f"state slot {source} is not that of {start} tokens")
            if slot in written or not slot:
                raise InternalError(f"state slot {slot} is written by row {row} as well")
            written[slot] = self._pool[slots[-1], 1]
        for slot, digest in written.items():
            self._states[slot] = digest

    def _get_slots(
        self, inputs: StepInputs, row: int, group: int, begin: int, places: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return the slots of a row's tokens from a position on, or at places.

        Shared tokens that all rows of the run see use the run's block table, the others the row's own.
        """
        positions = np.arange(begin, inputs.kv_lens_s[row]) if places is None else places
        block_size, window, shared = self._geometry.block_size, self._geometry.windows[group], inputs.kv_begins_s[row]
        first, end = get_run(inputs, row)
        # the beginning of the last row's window
        far = max(0, inputs.kv_lens_s[first:end].max() - window) if window else 0
        is_shared = (positions >= -(-far // block_size) * block_size) & (positions < shared)
        blocks = inputs.block_tables_gsm[group, np.where(is_shared, first, row), positions // block_size]
        slots: NDArray[np.int64] = blocks * block_size + positions % block_size
        return slots

    def _seen(self, inputs: StepInputs, row: int, *, is_checked: bool) -> SeenTokens:
        """Return what a row's last token sees, read back from the slots that attention would read."""
        end = int(inputs.kv_lens_s[row])
        seen = SeenTokens([], [], self._weights.item(adapter_slot(inputs, row)))
        if is_checked and inputs.positions_t[inputs.sample_tokens_s[row]] != end - 1:
            raise InternalError(f"row {row} of {end} tokens samples from token {inputs.sample_tokens_s[row]}")
        for group, window in enumerate(self._geometry.windows):
            if is_checked:
                self._check_reads(inputs, row, group)
            seen.places.append(places_seen(end, (window, self.num_sink_tokens) if window else None))
            seen.tokens.append(self._pool[self._get_slots(inputs, row, group, 0, seen.places[-1]), 0])
        return seen

    def _seen_at(self, inputs: StepInputs, place: int) -> SeenTokens:
        """Return what the token at a place of the packed axis sees."""
        row = int(np.searchsorted(inputs.query_starts_s1[1 : inputs.num_rows + 1], place, side="right"))
        position = int(inputs.positions_t[place])
        windows = [(window, self.num_sink_tokens) if window else None for window in self._geometry.windows]
        if row >= inputs.num_rows:
            return SeenTokens.of([0], windows, 0)
        whole = self._pool[self._get_slots(inputs, row, 0, 0), 0][: position + 1] % NAN
        return SeenTokens.of(whole.tolist(), windows, self._weights.item(adapter_slot(inputs, row)))

    def _check_reads(self, inputs: StepInputs, row: int, group: int) -> None:
        """Raise if any of a row's tokens sees a slot that was never written, or keys of another prefix."""
        windows = self._geometry.windows
        num_queries = inputs.query_starts_s1[row + 1] - inputs.query_starts_s1[row]
        start = int(inputs.kv_lens_s[row] - max(1, num_queries))
        window = windows[group]
        begin = max(0, start + 1 - window) if window else 0
        slots = self._get_slots(inputs, row, group, begin)
        tokens, digests = self._pool[slots, 0], self._pool[slots, 1]
        blocks = slots // self._geometry.block_size
        if np.any(blocks == NULL_BLOCK) or np.any(tokens == _UNWRITTEN):
            raise InternalError(f"row {row} reads a slot that was never written: blocks {blocks.tolist()}")
        weight = self._weights.item(adapter_slot(inputs, row))
        expected = _digests(tokens, self._factors[begin:], weight)
        if windows[0] is None and group:  # the first group has all previous tokens
            whole = self._get_slots(inputs, row, 0, 0)
            expected = _digests(self._pool[whole, 0], self._factors, weight)[begin:]
        elif begin:  # at least each digest follows the previous one
            expected = expected - expected[0] + digests[0]
        if np.any(is_wrong := digests != expected):
            place = begin + int(np.argmax(is_wrong))
            raise InternalError(f"row {row} reads keys of another prefix at {place}: {tokens.tolist()}")
        first = self._get_slots(inputs, row, group, 0, np.arange(min(self.num_sink_tokens, begin) if window else 0))
        if np.any(self._pool[first, 1] != _digests(self._pool[first, 0], self._factors, weight)):
            raise InternalError(f"row {row} reads first tokens of another prefix: blocks {first.tolist()}")


class SeveralStepsExecutor(FakeExecutor):
    """A fake that decodes several steps in one dispatch, at the engine's request."""

    max_num_steps = MAX_NUM_STEPS


class FedExecutor(SeveralStepsExecutor):
    """A fake whose multi-step decodes can wait for masks."""

    has_fed_steps = True


class SpeculatingExecutor(SeveralStepsExecutor):
    """A fake with a draft model that proposes three tokens."""

    num_speculative_tokens = 3


def with_adapters(max_loras: int, kind: type[FakeExecutor] = FakeExecutor) -> type[FakeExecutor]:
    """Return a kind of fake with `max_loras` adapter slots."""
    return type(f"{kind.__name__}WithAdapters", (kind,), {"max_loras": max_loras})


def with_embeds(kind: type[FakeExecutor] = FakeExecutor, width: int = 2) -> type[FakeExecutor]:
    """Return a kind of fake that takes input embeddings."""
    return type(f"{kind.__name__}WithEmbeds", (kind,), {"embed_width": width})


def seeing(windows: tuple[Window, ...], kind: type[FakeExecutor] = FakeExecutor) -> type[FakeExecutor]:
    """Return a kind of fake whose KV groups have these windows; all windows have equally many sink tokens, or none."""
    pairs = [window if isinstance(window, tuple) else (window, 0) for window in windows]
    sees = {"windows": tuple(width for width, _ in pairs), "num_sink_tokens": max(sinks for _, sinks in pairs)}
    return type(f"{kind.__name__}Seeing", (kind,), sees)


def scripted(*answers: str, kind: type[FakeExecutor] = FakeExecutor) -> type[FakeExecutor]:
    """Return a kind of fake that answers chats of a `ByteTokenizer` with these texts, one for each sequence in turn."""
    script = Script([list(answer.encode()) for answer in answers], list(b"assistant: "), ByteTokenizer.EOS)
    return type(f"{kind.__name__}Scripted", (kind,), {"sampled": staticmethod(script)})


def _buckets(max_num_batched_tokens: int, max_num_seqs: int, executor: FakeExecutor) -> BucketTable:
    buckets = BucketTable.build(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_num_steps=executor.max_num_steps,
        multiple=executor.dp_size,
    )
    return dataclasses.replace(buckets, speculates=buckets.rows if executor.num_speculative_tokens else ())


def _digests(tokens: NDArray[np.int64], factors: NDArray[np.int64], weight: int) -> NDArray[np.int64]:
    """Return the digest of each token and all before it, modulo 2^64; `factors` belong to their positions."""
    digests: NDArray[np.int64] = np.cumsum((tokens + 1 + weight) * factors[: len(tokens)])
    return digests


def _outputs(
    token_ids_rn: NDArray[np.int32], is_sound_rn: NDArray[np.bool_], detail: Detail, vocab_size: int
) -> StepOutputs:
    if detail == Detail.TOKENS:
        return StepOutputs(token_ids_rn, is_sound_rn)
    logprobs_rn = np.where(is_sound_rn, LOGPROB_STEP, np.nan).astype(np.float32)
    offsets = np.arange(TOP_WIDTH, dtype=np.int32)
    top_ids = (token_ids_rn[..., None] + offsets) % vocab_size
    top_logprobs = (offsets + 1) * logprobs_rn[..., None]
    return StepOutputs(
        token_ids_rn=token_ids_rn,
        is_finite_rn=is_sound_rn,
        logprobs_rn=logprobs_rn,
        ranks_rn=np.ones(token_ids_rn.shape, np.int32),
        top_ids_rnk=top_ids.astype(np.int32) if detail == Detail.TOP_LOGPROBS else None,
        top_logprobs_rnk=top_logprobs.astype(np.float32) if detail == Detail.TOP_LOGPROBS else None,
    )


def top_logprobs(token_id: int, vocab_size: int = 257) -> list[tuple[int, float]]:
    """Return the (token, log-probability) pairs of a row that would sample token_id, the likeliest first."""
    return [((token_id + i) % vocab_size, (i + 1) * LOGPROB_STEP) for i in range(min(TOP_WIDTH, vocab_size))]


def slots_of_blocks(block_ids: list[int], block_size: int) -> NDArray[np.int64]:
    """Return every slot of the blocks; raise for the null block, which is never moved."""
    if NULL_BLOCK in block_ids:
        raise InternalError(f"the null block is moved: {block_ids}")
    return (np.array(block_ids)[:, None] * block_size + np.arange(block_size)).reshape(-1)
