"""One request's life: a `Group` of sequences, and what each sequence knows of itself.

    WAITING ──admit──> RUNNING ──finish──> FINISHED
       ^                │   ^ │
       └─── recompute ──┘   │ └─ swap out ─> SWAPPED        a group is waiting, running or swapped as a whole;
                            └──── swap in ──────┘           in any state it can finish (abort, deadline)

    token_ids   [ prompt .......... | collected outputs .... ] (in flight)
                 └ num_computed: KV written by the steps dispatched so far ┘

A token "in flight" has been sampled by a dispatched step whose results the host has not seen: the sequence is already
longer by it, but its value lives on the device alone. While a step is put together at most one token of a sequence is
in flight, or those of one dispatch of several steps; twice as many are between the dispatch of that step and the
collection of the one before.

A group of several sequences computes its prompt once: only its leader runs until the prompt is in the pool. Then the
others fork from it, sharing every block, and each samples its own first token from the same logits. One that goes on
behind tokens that were generated elsewhere is run as one that was preempted and is computed again.

Fields are read by many and written here alone, by verbs that say what happened.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

from jpaged.engine.executor import Geometry
from jpaged.engine.kv.blocks import KVHandle, root_key
from jpaged.errors import InternalError
from jpaged.pool import Owner
from jpaged.structured import GrammarState
from jpaged.types import Continued, Generated, OutputEvent, Request, RequestTimes

Sink = Callable[[OutputEvent], None]
"""Where a request's events go; called on the engine thread."""


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.SWAPPED, Status.FINISHED}),
    Status.SWAPPED: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One chain of tokens. Written by the engine thread alone.

    Attributes:
        kv: what the memory keeps of it.
        num_computed_tokens: tokens whose keys and values are in the pool once every dispatched step has run.
        num_in_flight_tokens: tokens sampled by dispatched steps that were not collected yet.
        in_flight_row: the sequence's row in the last step that sampled a token for it; used while that is in flight.
        told_from, told_end: positions whose hidden states are told of, from the first that has yet to be dispatched.
        grammar: where its text is in the request's grammar; None without one.
        rope_len: length that its first tokens are turned for, where that depends on the length: the prompt's at first.
        num_given_tokens: tokens that it had when it came: its prompt, and what it has generated elsewhere.
    """

    index: int
    token_ids: list[int]
    kv: KVHandle
    num_prompt_tokens: int = field(init=False)
    rope_len: int = field(init=False)
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    in_flight_row: int = 0
    cumulative_logprob: float = 0.0
    told_from: int = 0
    told_end: int = 0
    grammar: GrammarState | None = None
    num_given_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.rope_len = self.num_given_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Length, a token in flight included."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, one in flight included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that still have to go through the model: 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_live(self) -> bool:
        return self.status is not Status.FINISHED

    def resume_at(self, num_tokens: int) -> None:
        """The memory holds the keys and values of the first num_tokens, and of no other."""
        self.num_computed_tokens = num_tokens

    def outgrew(self, length: int) -> None:
        """It is longer than a length up to which its keys were turned otherwise: none of them serves any more."""
        self.rope_len, self.num_computed_tokens = length + 1, 0

    def dispatched(self, num_tokens: int, row: int, *, samples_token: bool) -> None:
        """A step will compute the next num_tokens, and may sample the token after them, in that row."""
        self.num_computed_tokens += num_tokens
        if samples_token:
            self.num_in_flight_tokens += 1
            self.in_flight_row = row

    def asked_of(self, positions: range) -> None:
        """Positions of its prompt are told of, each once."""
        self.told_from, self.told_end = positions.start, positions.stop

    def tell(self, begin: int, end: int) -> range:
        """Those that are told of among positions that a step computes."""
        first, last = max(begin, self.told_from), min(end, self.told_end)
        if first >= last:
            return range(0)
        self.told_from = last
        return range(first, last)

    def moved_to_row(self, row: int) -> None:
        """The step that is put together has the sequence in another row."""
        self.in_flight_row = row

    def append(self, token_id: int, logprob: float) -> None:
        """The oldest token in flight is collected."""
        self.num_in_flight_tokens -= 1
        self.token_ids.append(token_id)
        self.cumulative_logprob += logprob

    def jump(self, token_ids: list[int]) -> None:
        """These tokens follow without being sampled; one in flight is the first of them, and is not waited for."""
        self.num_in_flight_tokens = 0
        self.token_ids += token_ids

    def ended_on_the_way(self) -> None:
        """It ended with its last token, and steps behind that were dispatched: what they write is not its."""
        self.num_computed_tokens = min(self.num_computed_tokens, len(self.token_ids) - 1)

    def went_on(self) -> None:
        """The token behind its last one was proposed and is the one that was drawn: what comes behind is there, too."""
        self.num_computed_tokens += 1
        self.num_in_flight_tokens += 1

    def discard_in_flight(self) -> None:
        """The oldest token in flight is collected, and means nothing: a beam goes on with tokens that are chosen."""
        self.num_in_flight_tokens -= 1

    def become(self, index: int, token_id: int, cumulative_logprob: float) -> None:
        """Goes on as the beam of that index, with a token that was chosen for it."""
        self.index = index
        self.token_ids.append(token_id)
        self.cumulative_logprob = cumulative_logprob

    def rewind(self, num_tokens: int) -> None:
        """Goes back to its first num_tokens; the memory follows with a `rewind` of its own.

        Raises:
            InternalError: that would take back a part of the prompt, or tokens whose values the host does not know.
        """
        if not self.num_prompt_tokens <= num_tokens <= len(self.token_ids) or self.num_in_flight_tokens:
            raise InternalError(
                f"{self.num_prompt_tokens} prompt tokens, {len(self.token_ids)} in all and {self.num_in_flight_tokens} "
                f"in flight cannot go back to {num_tokens}"
            )
        del self.token_ids[num_tokens:]
        self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)

    def branch(self, index: int) -> Sequence:
        """A sequence with the same tokens, in the same state, and without blocks."""
        twin = Sequence(index, list(self.token_ids), self.kv.twin(), self.status)
        twin.num_prompt_tokens, twin.rope_len = self.num_prompt_tokens, self.rope_len
        twin.cumulative_logprob = self.cumulative_logprob
        return twin

    def move_to(self, status: Status) -> None:
        if status not in TRANSITIONS[self.status]:
            raise InternalError(f"a {self.status.value} sequence cannot become {status.value}")
        self.status = status


def go_on_behind(sequence: Sequence, generated: Generated) -> None:
    """It has not begun, and has generated this elsewhere; where it has ended there, it is not run."""
    sequence.token_ids += generated.token_ids
    sequence.num_given_tokens = len(sequence.token_ids)
    sequence.cumulative_logprob = generated.cumulative_logprob
    if generated.has_finished:
        sequence.status = Status.FINISHED


def dispatched_each(sequences: list[Sequence], num_steps: int) -> None:
    """So many steps will compute the next token of each and sample the one after it, in rows of their order."""
    for row, sequence in enumerate(sequences):
        sequence.num_computed_tokens += num_steps
        sequence.num_in_flight_tokens += num_steps
        sequence.in_flight_row = row


def not_dispatched_each(sequences: list[Sequence], num_steps: int) -> None:
    """So many of the steps of `dispatched_each`, the last ones, are not made."""
    for sequence in sequences:
        sequence.num_computed_tokens -= num_steps
        sequence.num_in_flight_tokens -= num_steps


def collected_one_each(sequences: list[Sequence], token_ids: list[int], logprobs: list[float]) -> None:
    """The oldest token in flight of each is collected."""
    for sequence, token_id, logprob in zip(sequences, token_ids, logprobs, strict=True):
        sequence.num_in_flight_tokens -= 1
        sequence.token_ids.append(token_id)
        sequence.cumulative_logprob += logprob


MAX_ABSENCES_TOLD = 32


@dataclass(slots=True, eq=False)
class Absences:
    """From when, until when a request was preempted, in turn; the first MAX_ABSENCES_TOLD times are kept."""

    told_s: list[float] = field(default_factory=list)
    began_s: float | None = None

    def begin(self, now_s: float) -> None:
        """It was preempted just now."""
        self.began_s = now_s

    def end(self, now_s: float) -> None:
        """It runs again, if it was preempted."""
        if self.began_s is not None and len(self.told_s) < 2 * MAX_ABSENCES_TOLD:
            self.told_s += self.began_s, now_s
        self.began_s = None


@dataclass(slots=True, eq=False, repr=False)
class Group:
    """The sequences of one request: scheduled, preempted and ended together.

    Attributes:
        arrival: position in the order of arrival.
        changes_logits: its logits are changed before a token is sampled; asked at every step.
        is_by_name: of its sampling parameters, as often.
        may_jump: tokens that follow without a choice need not be sampled to be told of, or counted.
        is_forked: every sequence has its own table; before, only the leader's prompt runs.
        num_overtaken: later arrivals that were admitted before this one.
        first_token_s: when the results of the first step that sampled a token for it were here.
        token_gap_s: between its last two steps that sampled tokens; None before the second.
        ended_by: the finish reason of its last event, "deadline" or "error"; None before that.
        num_sampled_tokens: by all its sequences and beams together, and those generated elsewhere.
        num_cached_tokens: prompt tokens that the prefix cache held when the group was first admitted.
        absences: when it was preempted.
        adapter_slot: where on the device its adapter is while it runs; 0 is none.
    """

    request: Request
    arrival: int
    arrival_s: float
    sink: Sink
    max_blocks: InitVar[int]
    num_kv_groups: InitVar[int] = 1
    sequences: list[Sequence] = field(init=False, default_factory=list)
    is_forked: bool = field(init=False)
    changes_logits: bool = field(init=False)
    is_by_name: bool = field(init=False)
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
    absences: Absences = field(default_factory=Absences)
    adapter_slot: int = 0

    def __post_init__(self, max_blocks: int, num_kv_groups: int) -> None:
        request, sampling = self.request, self.request.sampling
        self.changes_logits = sampling.changes_logits or request.grammar is not None
        self.is_by_name = sampling.is_by_name
        self.may_jump = not (sampling.needs_logprobs or sampling.needs_counts or sampling.allowed_token_ids is not None)
        num_sequences = 1 if sampling.beam_width else sampling.num_samples
        whose = request.cache_tenant, request.adapter_digest
        root = root_key(sampling.cache_salt, *whose) if sampling.use_prefix_cache else None
        adapter = request.adapter
        owner = Owner(sampling.cache_salt, request.cache_tenant, "" if adapter is None else adapter.name)
        continued = {one.generated.index: one for one in request.continued}
        for i in range(num_sequences):
            kv, behind = KVHandle(max_blocks, root, num_kv_groups, owner), continued.get(i)
            grammar = _begin(request) if behind is None else _behind(behind)
            sequence = Sequence(i, list(request.prompt_token_ids), kv, grammar=grammar)
            if behind is not None:
                go_on_behind(sequence, behind.generated)
                self.num_sampled_tokens += len(behind.generated.token_ids)
            self.sequences.append(sequence)
        self.starts_over()
        self.sequences[0].asked_of(request.told_positions)

    @property
    def is_streamed(self) -> bool:
        """Its tokens are sent as they come; not where they are told at the end, or who is returned is decided then."""
        sampling = self.request.sampling
        return not (self.request.is_whole or sampling.beam_width or sampling.num_samples > sampling.n)

    @property
    def num_rows(self) -> int:
        """Rows that the group may take in a step."""
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
        """The whole prompt is computed and in the pool."""
        leader = self.live[0]
        return self.status is Status.RUNNING and leader.num_computed_tokens >= leader.num_prompt_tokens

    def num_blocks_alone(self, geometry: Geometry) -> int:
        """Blocks that it takes at most when it runs alone."""
        request = self.request
        return geometry.num_blocks_alone(len(request.prompt_token_ids), request.sampling.max_tokens, self.num_rows)

    def admitted(self, num_cached_tokens: int) -> bool:
        """Notes that it runs, with so many tokens of its prompt in the pool; True the first time."""
        is_first = self.num_cached_tokens is None
        if is_first:
            self.num_cached_tokens = min(num_cached_tokens, len(self.request.prompt_token_ids))
        return is_first

    def overtaken(self) -> None:
        self.num_overtaken += 1

    def preempted(self) -> None:
        self.num_preemptions += 1

    def uses_slot(self, slot: int) -> None:
        """Its adapter is in that slot of the device; 0 is none."""
        self.adapter_slot = slot

    def forked(self) -> None:
        """Every sequence of it has its own table."""
        self.is_forked = True

    def starts_over(self) -> None:
        """Notes that nothing of it is in the pool: its leader runs the prompt again before the others."""
        self.is_forked = len(self.live) == 1

    def continues_as(self, beams: list[Sequence]) -> None:
        """The beams that live on take the place of those that were."""
        self.sequences = beams
        if self.status is Status.WAITING:  # it was preempted meanwhile, and runs its prompt first
            self.starts_over()

    def scheduled(self, now_s: float) -> None:
        self.first_scheduled_s = now_s

    def sampled(self, num_tokens: int) -> None:
        self.num_sampled_tokens += num_tokens

    def collected(self, now_s: float, num_steps: int = 1) -> None:
        """The results of a dispatch of some steps with tokens for it are here."""
        if self.last_token_s is not None:
            self.token_gap_s = (now_s - self.last_token_s) / num_steps
        else:
            self.first_token_s = now_s
        self.last_token_s = now_s

    @property
    def times(self) -> RequestTimes:
        """When it got where, so far."""
        return RequestTimes(
            self.arrival_s, self.first_scheduled_s, self.first_token_s, self.last_token_s, tuple(self.absences.told_s)
        )

    def ended(self, reason: str) -> None:
        """Notes why it ended: its last event is known, or nobody wants to have it."""
        self.ended_by = reason

    def move_to(self, status: Status) -> None:
        """Moves the group and every live sequence of it."""
        for sequence in self.live:
            sequence.move_to(status)
        self.status = status


def _begin(request: Request) -> GrammarState | None:
    """The beginning of a text that follows the request's grammar."""
    if request.grammar is None:
        return None
    state, outputs = request.grammar.start(), request.sampling.structured_outputs
    if outputs is not None and outputs.always_complete:
        state.closing(request.sampling.max_tokens)
    return state


def _behind(continued: Continued) -> GrammarState | None:
    return None if continued.grammar is None else continued.grammar.copy()


def has_unknown_tokens(group: Group) -> bool:
    """The host lacks tokens that it needs to run a group: all but the last, and that too where tokens are counted."""
    num_unknown = 0 if group.request.sampling.needs_counts else 1
    return any(sequence.num_in_flight_tokens > num_unknown for sequence in group.live)
