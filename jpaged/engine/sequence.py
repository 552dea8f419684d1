"""State of a request: a `SequenceGroup` of sequences, and the tokens and progress of each `Sequence`.

    WAITING ──admit──> RUNNING ──finish──> FINISHED
       ^                │   ^ │
       └─── recompute ──┘   │ └─ swap out ─> SWAPPED        a group is waiting, running or swapped as a whole;
                            └──── swap in ──────┘           in any state it can finish (abort, deadline)

    token_ids   [ prompt .......... | collected outputs .... ] (in flight)
                 └ num_computed: KV written by the steps dispatched so far ┘

A token "in flight" has been sampled by a dispatched step whose results the host has not seen: the sequence is already
longer by it, but its value is on the device only. While a step is put together, a sequence has at most one token in
flight, or the tokens of one multi-step dispatch. Between the dispatch of that step and the collection of the previous
one it has up to twice that number.

A group of several sequences computes its prompt once: only its leader runs until the prompt is in the pool. Then the
others fork from it, sharing every block, and each samples its own first token from the same logits. A sequence that
continues after tokens generated on another server runs like one that was preempted and is recomputed.

Many modules read the fields; only this module writes them, by methods.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

from jpaged.engine.executor import Geometry
from jpaged.engine.kv_cache.blocks import BlockHash, SequenceBlocks, root_block_hash
from jpaged.errors import InternalError
from jpaged.pool import PrefixOwner
from jpaged.structured import GrammarState
from jpaged.types import (
    OutputEvent,
    PackedTokens,
    PriorOutput,
    Request,
    RequestTimes,
    ResumedSequence,
    WeightVersionRun,
)

OutputCallback = Callable[[OutputEvent], None]
"""Callback for a request's events; called on the engine thread."""


class Status(enum.Enum):
    """State of a sequence or group; see the diagram of the module."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.SWAPPED, Status.FINISHED}),
    Status.SWAPPED: frozenset({Status.RUNNING, Status.WAITING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One chain of tokens. Only the engine thread writes it.

    Attributes:
        kv: its block tables and hash chain.
        num_computed_tokens: tokens whose keys and values are in the pool once every dispatched step has run.
        num_in_flight_tokens: tokens sampled by dispatched steps and not yet collected.
        in_flight_row: the sequence's row in the last step that sampled a token for it; used while that is in flight.
        prompt_logprobs_start, told_end: prompt positions whose aux outputs (log-probabilities or hidden states) are
        still to be
            dispatched.
        grammar: its state in the request's grammar; None without one.
        rope_len: length that selects the RoPE scaling of the first tokens (LongRoPE); the prompt length at first.
        num_given_tokens: tokens that it had on arrival: its prompt, and output generated on another server.
        versions: former weights that sampled tokens, and the length when they were replaced.
    """

    index: int
    token_ids: list[int]
    kv: SequenceBlocks
    num_prompt_tokens: int = field(init=False)
    rope_len: int = field(init=False)
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    in_flight_row: int = 0
    cumulative_logprob: float = 0.0
    prompt_logprobs_start: int = 0
    prompt_logprobs_end: int = 0
    grammar: GrammarState | None = None
    num_given_tokens: int = field(init=False)
    versions: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.rope_len = self.num_given_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Length, including tokens in flight."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, including those in flight."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that still have to go through the model: 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_live(self) -> bool:
        return self.status is not Status.FINISHED

    def set_num_computed_tokens(self, num_tokens: int) -> None:
        """Set the number of computed tokens: the pool holds the keys and values of these and of no others."""
        self.num_computed_tokens = num_tokens

    def switch_to_long_rope(self, length: int) -> None:
        """Mark all keys as stale: the sequence has passed the length up to which they were computed (LongRoPE)."""
        self.rope_len, self.num_computed_tokens = length + 1, 0

    def dispatched(self, num_tokens: int, row: int, *, samples_token: bool) -> None:
        """Advance by the tokens that a dispatched step computes, and by the token that it samples in that row."""
        self.num_computed_tokens += num_tokens
        if samples_token:
            self.num_in_flight_tokens += 1
            self.in_flight_row = row

    def request_prompt_logprobs(self, positions: range) -> None:
        """Request aux outputs for positions of the prompt, each once."""
        self.prompt_logprobs_start, self.prompt_logprobs_end = positions.start, positions.stop

    def take_logprob_positions(self, begin: int, end: int) -> range:
        """Return and consume the positions with requested aux outputs among those that a step computes."""
        first, last = max(begin, self.prompt_logprobs_start), min(end, self.prompt_logprobs_end)
        if first >= last:
            return range(0)
        self.prompt_logprobs_start = last
        return range(first, last)

    def moved_to_row(self, row: int) -> None:
        """Record the sequence's new row in the step that is being put together."""
        self.in_flight_row = row

    def append(self, token_id: int, logprob: float) -> None:
        """Append the oldest token in flight, which has been collected."""
        self.num_in_flight_tokens -= 1
        self.token_ids.append(token_id)
        self.cumulative_logprob += logprob

    def append_forced(self, token_ids: list[int]) -> None:
        """Append tokens forced by the grammar, without sampling; a token in flight is the first of them."""
        self.num_in_flight_tokens = 0
        self.token_ids += token_ids

    def truncate_after_stop(self) -> None:
        """Rewind the computed tokens of a sequence that ended while later steps were in flight."""
        self.num_computed_tokens = min(self.num_computed_tokens, len(self.token_ids) - 1)

    def accept_draft_token(self) -> None:
        """Accept the draft token after the last token: its keys are computed and the next token is sampled."""
        self.num_computed_tokens += 1
        self.num_in_flight_tokens += 1

    def discard_in_flight(self) -> None:
        """Drop the oldest token in flight: a beam continues with tokens chosen by the beam search."""
        self.num_in_flight_tokens -= 1

    def replace_as_beam(self, index: int, token_id: int, cumulative_logprob: float) -> None:
        """Continue as the beam of that index, with the token chosen for it."""
        self.index = index
        self.token_ids.append(token_id)
        self.cumulative_logprob = cumulative_logprob

    def rewind(self, num_tokens: int) -> None:
        """Rewind to the first num_tokens; the caller rewinds the memory.

        Raises:
            InternalError: the rewind would remove prompt tokens, or tokens are in flight.
        """
        if not self.num_prompt_tokens <= num_tokens <= len(self.token_ids) or self.num_in_flight_tokens:
            raise InternalError(
                f"cannot go back to {num_tokens} tokens: the sequence has {self.num_prompt_tokens} prompt tokens, "
                f"{len(self.token_ids)} tokens in total and {self.num_in_flight_tokens} in flight"
            )
        del self.token_ids[num_tokens:]
        self.versions = tuple((version, min(end, num_tokens)) for version, end in self.versions)
        self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)

    def branch(self, index: int) -> Sequence:
        """Return a new sequence with the same tokens and state, without blocks."""
        twin = Sequence(index, list(self.token_ids), self.kv.new_like(), self.status)
        twin.num_prompt_tokens, twin.num_given_tokens = self.num_prompt_tokens, self.num_given_tokens
        twin.rope_len = self.rope_len
        twin.cumulative_logprob, twin.versions = self.cumulative_logprob, self.versions
        return twin

    def end_version(self, version: str, root: BlockHash) -> None:
        """Record the version of the weights that sampled its tokens so far; others write its blocks from now on.

        Args:
            root: parent hash of the first block with the next weights.
        """
        self.versions += ((version, len(self.token_ids)),)
        self.kv.set_root(root)

    def count_versions(self, version: str, length: int | None = None) -> tuple[WeightVersionRun, ...]:
        """Return the versions of the weights that sampled its output here, in order, each with its tokens.

        Args:
            version: the current one.
            length: of a finished beam; None for all tokens.
        """
        begin, whole, runs = self.num_given_tokens, len(self.token_ids) if length is None else length, []
        for name, end in (*self.versions, (version, whole)):
            if min(end, whole) > begin:
                runs.append(WeightVersionRun(name, min(end, whole) - begin))
                begin = min(end, whole)
        return tuple(runs) or (WeightVersionRun(version, 0),)

    def move_to(self, status: Status) -> None:
        if status not in TRANSITIONS[self.status]:
            raise InternalError(f"a {self.status.value} sequence cannot become {status.value}")
        self.status = status


def resume_after_generated(sequence: Sequence, generated: PriorOutput) -> None:
    """Seed a new sequence with tokens generated on another server; it is not run if it has finished there."""
    sequence.token_ids += generated.token_ids
    sequence.num_given_tokens = len(sequence.token_ids)
    sequence.cumulative_logprob = generated.cumulative_logprob
    if generated.has_finished:
        sequence.status = Status.FINISHED


def advance_all(sequences: list[Sequence], num_steps: int) -> None:
    """Advance sequences by `num_steps` decode steps, in rows of their order."""
    for row, sequence in enumerate(sequences):
        sequence.num_computed_tokens += num_steps
        sequence.num_in_flight_tokens += num_steps
        sequence.in_flight_row = row


def rewind_all(sequences: list[Sequence], num_steps: int) -> None:
    """Undo the last `num_steps` steps of `advance_all`, which are not executed."""
    for sequence in sequences:
        sequence.num_computed_tokens -= num_steps
        sequence.num_in_flight_tokens -= num_steps


def collected_one_each(sequences: list[Sequence], token_ids: list[int], logprobs: list[float]) -> None:
    """Append the oldest token in flight of each sequence."""
    for sequence, token_id, logprob in zip(sequences, token_ids, logprobs, strict=True):
        sequence.num_in_flight_tokens -= 1
        sequence.token_ids.append(token_id)
        sequence.cumulative_logprob += logprob


MAX_PREEMPTIONS_REPORTED = 32


@dataclass(slots=True, eq=False)
class PreemptionIntervals:
    """Times of preemption and resumption, alternating; the first MAX_PREEMPTIONS_REPORTED pairs are kept."""

    reported_s: list[float] = field(default_factory=list)
    began_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Record a preemption."""
        self.began_s = now_s

    def end(self, now_s: float) -> None:
        """Record that the request runs again, if it was preempted."""
        if self.began_s is not None and len(self.reported_s) < 2 * MAX_PREEMPTIONS_REPORTED:
            self.reported_s += self.began_s, now_s
        self.began_s = None


@dataclass(slots=True, eq=False, repr=False)
class SequenceGroup:
    """The sequences of one request: scheduled, preempted and finished together.

    Attributes:
        arrival: position in the order of arrival.
        has_logits_processors: its logits are changed before sampling; cached, because every step reads it.
        needs_row_scheduling: its rows are not eligible for the persistent decode batch; cached as well.
        may_jump: tokens forced by a grammar may be appended without sampling: they need no log-probabilities or counts.
        is_forked: every sequence has its own block table; before, only the leader's prompt runs.
        num_overtaken: later arrivals that were admitted before this one.
        first_token_s: when the host received the results of the first step that sampled a token for it.
        token_gap_s: time between its last two steps that sampled tokens; None before the second.
        ended_by: finish reason of the last event, "deadline" or "error"; None before that.
        num_sampled_tokens: tokens of all its sequences and beams, including those generated on other servers.
        num_cached_tokens: prompt tokens that the prefix cache held when the group was first admitted.
        absences: when it was preempted.
        adapter_slot: device slot of the adapter while the group runs; 0 is none.
    """

    request: Request
    arrival: int
    arrival_s: float
    sink: OutputCallback
    max_blocks: InitVar[int]
    num_kv_groups: InitVar[int] = 1
    weights: InitVar[bytes] = b""
    sequences: list[Sequence] = field(init=False, default_factory=list)
    is_forked: bool = field(init=False)
    has_logits_processors: bool = field(init=False)
    needs_row_scheduling: bool = field(init=False)
    may_jump: bool = field(init=False)
    status: Status = Status.WAITING
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_gap_s: float | None = None
    ended_by: str | None = None
    num_cached_tokens: int | None = None
    num_sampled_tokens: int = 0
    num_preemptions: int = 0
    num_overtaken: int = 0
    absences: PreemptionIntervals = field(default_factory=PreemptionIntervals)
    adapter_slot: int = 0

    def __post_init__(self, max_blocks: int, num_kv_groups: int, weights: bytes) -> None:
        request, sampling = self.request, self.request.sampling
        self.has_logits_processors = sampling.has_logits_processors or request.grammar is not None
        self.needs_row_scheduling = sampling.needs_row_scheduling
        self.may_jump = not (sampling.needs_logprobs or sampling.needs_counts or sampling.allowed_token_ids is not None)
        num_sequences = 1 if sampling.beam_width else sampling.num_samples
        adapter = request.adapter
        root = self._root(weights) if sampling.use_prefix_cache else None
        owner = PrefixOwner(sampling.cache_salt, request.cache_tenant, "" if adapter is None else adapter.name)
        continued = {one.generated.index: one for one in request.continued}
        prompt = request.prompt_token_ids
        packed = prompt.packed if isinstance(prompt, PackedTokens) else b""
        for i in range(num_sequences):
            kv = SequenceBlocks(max_blocks, root, num_kv_groups, owner, request.block_digests, packed)
            behind = continued.get(i)
            grammar = _begin(request) if behind is None else _behind(behind)
            sequence = Sequence(i, list(prompt), kv, grammar=grammar)
            if behind is not None:
                resume_after_generated(sequence, behind.generated)
                self.num_sampled_tokens += len(behind.generated.token_ids)
            self.sequences.append(sequence)
        self.reset_for_recompute()
        self.restart_prompt()

    def restart_prompt(self) -> None:
        """Request the aux outputs of the whole prompt, if the request needs some."""
        request = self.request
        if request.prompt_logprobs_start is not None or request.pooling is not None:
            self.sequences[0].request_prompt_logprobs(request.prompt_logprob_positions)

    def _root(self, weights: bytes) -> BlockHash:
        request, adapter = self.request, self.request.adapter
        adapter_digest = b"" if adapter is None else adapter.digest
        return root_block_hash(request.sampling.cache_salt, request.cache_tenant, adapter_digest, weights)

    def end_version(self, version: str, weights: bytes) -> None:
        """Record the version of the weights that sampled the tokens so far; no sequence may have blocks.

        Args:
            weights: digest of the next weights.
        """
        for sequence in self.sequences:
            sequence.end_version(version, self._root(weights))

    @property
    def is_streamed(self) -> bool:
        """True if tokens are sent as they are sampled; False if all are returned at the end, or chosen then."""
        sampling = self.request.sampling
        return not (self.request.is_non_streaming or sampling.beam_width or sampling.num_samples > sampling.n)

    @property
    def num_rows(self) -> int:
        """Maximum number of the group's rows in a step."""
        return self.request.sampling.beam_width or len(self.sequences)

    @property
    def live(self) -> list[Sequence]:
        """Sequences that have not ended."""
        if len(self.sequences) == 1 and self.status is not Status.FINISHED:
            return self.sequences
        return [sequence for sequence in self.sequences if sequence.is_live]

    @property
    def runnable(self) -> list[Sequence]:
        """Sequences that may have rows: all live ones, or the leader alone while the prompt is computed."""
        live = self.live
        return live if self.is_forked else live[:1]

    @property
    def has_prompt_blocks(self) -> bool:
        """True if the whole prompt is computed and in the pool."""
        leader = self.live[0]
        return self.status is Status.RUNNING and leader.num_computed_tokens >= leader.num_prompt_tokens

    def num_blocks_alone(self, geometry: Geometry) -> int:
        """Return the maximum number of blocks that the group takes when it runs alone."""
        request = self.request
        return geometry.num_blocks_alone(len(request.prompt_token_ids), request.sampling.max_num_tokens, self.num_rows)

    def admitted(self, num_cached_tokens: int) -> bool:
        """Record an admission with `num_cached_tokens` cached prompt tokens. Return True the first time."""
        is_first = self.num_cached_tokens is None
        if is_first:
            self.num_cached_tokens = min(num_cached_tokens, len(self.request.prompt_token_ids))
        return is_first

    def count_overtaken(self) -> None:
        self.num_overtaken += 1

    def preempted(self) -> None:
        self.num_preemptions += 1

    def place(self, rank: int) -> None:
        """Set the part of the pool that the blocks of all sequences are taken from."""
        for sequence in self.sequences:
            sequence.kv.place(rank)

    @property
    def rank(self) -> int:
        """Part of the pool that the blocks are in; see `SequenceBlocks`."""
        return self.sequences[0].kv.rank

    def set_lora_slot(self, slot: int) -> None:
        """Set the adapter's device slot; 0 is none."""
        self.adapter_slot = slot

    def forked(self) -> None:
        """Record that every sequence has its own block table."""
        self.is_forked = True

    def reset_for_recompute(self) -> None:
        """Record that the pool holds nothing of the group: its leader runs the prompt again before the others."""
        self.is_forked = len(self.live) == 1

    def continues_as(self, beams: list[Sequence]) -> None:
        """Replace the sequences by the surviving beams."""
        self.sequences = beams
        if self.status is Status.WAITING:  # it was preempted and runs its prompt first
            self.reset_for_recompute()

    def scheduled(self, now_s: float) -> None:
        self.first_scheduled_s = now_s

    def sampled(self, num_tokens: int) -> None:
        self.num_sampled_tokens += num_tokens

    def collected(self, now_s: float, num_steps: int = 1) -> None:
        """Record the arrival of the results of a dispatch that sampled tokens for the group."""
        if self.last_token_s is not None:
            self.token_gap_s = (now_s - self.last_token_s) / num_steps
        else:
            self.first_token_s = now_s
        self.last_token_s = now_s

    @property
    def times(self) -> RequestTimes:
        """Timestamps of the request so far."""
        return RequestTimes(
            self.arrival_s,
            self.first_scheduled_s,
            self.first_token_s,
            self.last_token_s,
            tuple(self.absences.reported_s),
        )

    def ended(self, reason: str) -> None:
        """Record why the group ended: its last event is known, or its client is gone."""
        self.ended_by = reason

    def move_to(self, status: Status) -> None:
        """Move the group and its live sequences to a status."""
        for sequence in self.live:
            sequence.move_to(status)
        self.status = status


def _begin(request: Request) -> GrammarState | None:
    """Return the initial grammar state of a request, or None without a grammar."""
    if request.grammar is None:
        return None
    state, outputs = request.grammar.start(), request.sampling.structured_outputs
    if outputs is not None and outputs.always_complete:
        state.closing(request.sampling.max_num_tokens)
    return state


def _behind(continued: ResumedSequence) -> GrammarState | None:
    return None if continued.grammar is None else continued.grammar.copy()


def has_unknown_tokens(group: SequenceGroup) -> bool:
    """Return True if the host lacks tokens that it needs to run a group.

    It may lack one token per sequence, or none if tokens are counted for penalties.
    """
    num_unknown = 0 if group.request.sampling.needs_counts else 1
    return any(sequence.num_in_flight_tokens > num_unknown for sequence in group.live)
