"""Draft tokens run in the same step as a row's last token: each is one more row, of one token.

    row      token in          at    samples the token at
    r        t7, its last       7     8
    r + 1    a, draft           8     9        with the sequence's keys, and those of the tokens before it in this step
    r + 2    b, draft           9    10

The token sampled by a draft row is the sequence's if all drafts before it equal the sampled tokens.
So a step with drafts computes the same rows as decoding step by step. The next step waits for its
results, because its start positions depend on them.

Blocks are allocated for draft tokens, and released for rejected ones. No group is preempted for a draft.

Verification of draft tokens: a step accepts those that equal the sampled tokens.

    drafts           a  b  c  d            a step runs the last token and its drafts, and samples after each of them
    sampled       a  b  x  .  .
                  └ accepted: 2    tokens: a b x         the sample after the last accepted draft is a token as well

A sample depends on seed, position and the tokens before it. After an accepted draft token these are the same as in
plain decoding, and so is the sample. The samples after a rejected draft token are dropped. There is no resampling or
weighting: distribution and tokens are those of plain decoding.

`RoundRows` are the decode rows that a round of a draft model schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as AbcSequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import Geometry, StepOutputs
from jpaged.engine.kv_cache.interface import KVCacheManager
from jpaged.engine.scheduler.decode_batch import PersistentDecodeBatch, commit_full_blocks
from jpaged.engine.scheduler.output import ScheduledRow, SchedulerOutput
from jpaged.engine.sequence import Sequence, SequenceGroup
from jpaged.errors import InternalError
from jpaged.structured import GrammarState

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """New tokens of the rows of a step.

    Attributes:
        num_accepted: number of accepted draft tokens of each row, those after an ending token included.
        token_ids: accepted draft tokens of each row and the next sample, up to and including an ending token.
    """

    num_accepted: list[int]
    token_ids: list[list[int]]


def verify(
    proposals_rk: I32, num_proposals_r: I32, drawn_rn: I32, ending_token_ids: AbcSequence[frozenset[int]]
) -> VerifiedTokens:
    """Compare the draft tokens of each row with the sampled tokens.

    Args:
        proposals_rk: [R, k] draft tokens of each row, padded.
        num_proposals_r: [R] number of draft tokens of each row, 0 to k.
        drawn_rn: [R, k + 1] samples after the last token of each row and after each draft token.
        ending_token_ids: token ids that end each row; empty if none does yet.

    Raises:
        InternalError: the shapes do not match.
    """
    num_rows, width = proposals_rk.shape
    if drawn_rn.shape != (num_rows, width + 1) or num_proposals_r.shape != (num_rows,):
        raise InternalError(
            f"proposals of shape {proposals_rk.shape} have {num_proposals_r.shape} counts and {drawn_rn.shape} draws"
        )
    if len(ending_token_ids) != num_rows or (
        num_rows and not 0 <= num_proposals_r.min() <= num_proposals_r.max() <= width
    ):
        raise InternalError(
            f"{num_rows} rows of at most {width} proposals have {len(ending_token_ids)} sets of ending ids and "
            f"{num_proposals_r.tolist()} proposals"
        )
    is_drawn_rk = (proposals_rk == drawn_rn[:, :width]) & (np.arange(width) < num_proposals_r[:, None])
    num_accepted = np.logical_and.accumulate(is_drawn_rk, axis=1).sum(axis=1).tolist()
    token_ids = [
        _up_to_end(drawn[: count + 1], ending)
        for drawn, count, ending in zip(drawn_rn.tolist(), num_accepted, ending_token_ids, strict=True)
    ]
    return VerifiedTokens(num_accepted, token_ids)


def _up_to_end(token_ids: list[int], ending: frozenset[int]) -> list[int]:
    """Return the tokens up to and including the first that ends the row."""
    if ending.isdisjoint(token_ids):
        return token_ids
    return token_ids[: next(row_index for row_index, token_id in enumerate(token_ids, start=1) if token_id in ending)]


Choose = Callable[[list[Sequence], list[int], int], list[int]]
"""(decode rows, draft tokens available for each, prefill tokens in the step) -> number of draft tokens to run."""


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Draft tokens for the next step.

    Attributes:
        token_ids: drafts of decoding sequences, all of whose tokens the host knows.
        choose: selects how many of them run.
    """

    token_ids: Mapping[Sequence, list[int]]
    choose: Choose


def takes_drafts(group: SequenceGroup) -> bool:
    """Return True if a request may use drafts: not with beam search, penalties, or outputs beyond sampled tokens."""
    sampling = group.request.sampling
    return not (sampling.beam_width or sampling.needs_counts or sampling.needs_extra_logprobs)


class ServiceRecorder(Protocol):
    """Recorder of the service that groups receive: a scheduling policy."""

    def served(self, group: SequenceGroup, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Record the tokens that a group was served."""

    def decoded(self, groups: Iterable[SequenceGroup]) -> None:
        """Record one output token for each group."""


class GroupQueues(Protocol):
    """The scheduler's queues, as drafts need them.

    Attributes:
        running: running groups.
    """

    running: list[SequenceGroup]

    @property
    def num_waiting(self) -> int:
        """Number of groups that wait for rows or blocks."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Adds drafts to the steps of one scheduler, and releases the blocks of rejected ones."""

    memory: KVCacheManager
    rows: PersistentDecodeBatch
    geometry: Geometry
    policy: ServiceRecorder

    def add(self, schedule: SchedulerOutput, proposals: DraftTokens) -> None:
        """Add drafts of decode rows to a step, as far as rows, tokens and blocks allow."""
        decoding = decoding_rows(schedule)
        found = [_cut(one, proposals.token_ids.get(one.sequence, []), self.rows) for one in decoding]
        sequences, nums = [one.sequence for one in decoding], [len(token_ids) for token_ids, _ in found]
        chosen = proposals.choose(sequences, nums, schedule.num_tokens - len(decoding))
        num_rows = self.geometry.max_num_seqs - schedule.num_rows
        room, slots = min(num_rows, self.geometry.max_num_batched_tokens - schedule.num_tokens), self.memory.states
        for one, (token_ids, states), num_chosen in zip(decoding, found, chosen, strict=True):
            count = min(num_chosen, room)
            if count > 0 and slots is not None:
                count = slots.num_drafts(count)
            if count > 0 and self.memory.can_grow([(one.sequence, count)]):
                self.memory.grow(one.sequence, count, are_drafts=True)
                if one.sequence in self.rows:
                    self.rows.grown(one.sequence)
                schedule.add_draft(one.group, one.sequence, one.row_index, token_ids[:count], states[:count])
                room -= count
        if slots is not None:
            schedule.place_drafts()

    def ran(self, group: SequenceGroup, sequence: Sequence, num_accepted: int, state_slot: int | None = None) -> None:
        """Apply the result of a sequence's draft, and release the blocks and states of rejected tokens.

        Args:
            state_slot: slot of the recurrent state after the accepted tokens; None if they were one draft.
        """
        self.policy.served(group, 0, num_accepted)
        if sequence.is_live:
            if self.memory.states is not None:
                kv = sequence.kv
                if state_slot is None:
                    state_slot = kv.draft_slots[num_accepted - 1] if num_accepted else kv.state_slot
                self.memory.states.accept(kv, state_slot)
            self.memory.rewind(sequence)
            if sequence in self.rows:
                self.rows.grown(sequence, num_accepted)


@dataclass(frozen=True, slots=True)
class Accepted:
    """Rows of a step with drafts whose samples are accepted, in order for each sequence.

    Attributes:
        num_accepted: number of accepted tokens of each draft.
    """

    schedule: SchedulerOutput
    device_rows: list[int]
    num_accepted: list[int]

    @classmethod
    def of(cls, schedule: SchedulerOutput, outputs: StepOutputs) -> Accepted:
        """Verify the drafts of a step."""
        drafts, device_rows = schedule.drafts, schedule.device_rows
        width = max((len(draft.token_ids) for draft in drafts), default=0)
        proposals_rk = np.zeros((len(drafts), width), np.int32)
        drawn_rn = np.zeros((len(drafts), width + 1), np.int32)
        for number, draft in enumerate(drafts):
            proposals_rk[number, : len(draft.token_ids)] = draft.token_ids
            rows = [device_rows[row_index] for row_index in (draft.row_index, *draft.rows)]
            drawn_rn[number, : len(rows)] = outputs.token_ids_rn[rows, 0]
        num_usable_r = np.array([schedule.num_usable(draft) for draft in drafts], np.int32)
        done = verify(proposals_rk, num_usable_r, drawn_rn, [frozenset()] * len(drafts))
        return cls(schedule, device_rows, done.num_accepted)

    @property
    def depth(self) -> int:
        """Return the maximum number of accepted tokens of a draft."""
        return max(self.num_accepted, default=0)

    def longer_than(self, depth: int) -> set[Sequence]:
        """Return the sequences with more than `depth` accepted draft tokens."""
        pairs = zip(self.schedule.drafts, self.num_accepted, strict=True)
        return {draft.sequence for draft, count in pairs if count > depth}

    def at(self, depth: int) -> dict[int, ScheduledRow]:
        """Return the rows of the depth-th accepted draft tokens of live sequences, by device row."""
        row_indices = [
            draft.rows[depth - 1]
            for draft, count in zip(self.schedule.drafts, self.num_accepted, strict=True)
            if count >= depth and draft.sequence.is_live
        ]
        return {self.device_rows[row_index]: self.schedule.entered(row_index) for row_index in row_indices}


class Decoding(NamedTuple):
    """Decode row, and its index among the scheduled rows."""

    row_index: int
    group: SequenceGroup
    sequence: Sequence
    start: int


def decoding_rows(schedule: SchedulerOutput) -> list[Decoding]:
    """Return the decode rows of a step in the order of scheduling."""
    decodes = schedule.decodes
    columns = decodes.groups, decodes.sequences, decodes.starts_s.tolist()
    found = [Decoding(row_index, *columns) for row_index, columns in enumerate(zip(*columns, strict=True))]
    for row_index, row in enumerate(schedule.rows, len(decodes)):
        if (
            row.samples_token
            and row.proposed is None
            and row.num_tokens == 1
            and row.start >= row.sequence.num_prompt_tokens
        ):
            found.append(Decoding(row_index, row.group, row.sequence, row.start))
    return found


def _cut(
    row: Decoding, token_ids: list[int], rows: PersistentDecodeBatch
) -> tuple[list[int], list[GrammarState | None]]:
    """Return the draft tokens that the sequence and its grammar allow, and the grammar state after each of them."""
    sequence = row.sequence
    num_left = row.group.request.sampling.max_num_tokens - sequence.num_output_tokens
    if rows.long_rope is not None:
        num_left = min(num_left, rows.long_rope.num_left(sequence))
    token_ids = token_ids[: max(0, num_left)]
    if sequence.grammar is None or not token_ids:
        return token_ids, [None] * len(token_ids)
    token_ids = token_ids[: sequence.grammar.num_accepted(token_ids)]
    states, state = list[GrammarState | None](), sequence.grammar.copy()
    for token_id in token_ids:
        if not state.accept(token_id) or state.has_ended:
            break
        states.append(state)
        state = state.copy()
    return token_ids[: len(states)], states


@dataclass(frozen=True, slots=True)
class RoundRows:
    """Schedules rows for rounds, for one scheduler. `DraftRows.ran` releases unused blocks."""

    memory: KVCacheManager
    rows: PersistentDecodeBatch
    geometry: Geometry
    policy: ServiceRecorder

    def may_run(self, queues: GroupQueues, *, has_room: bool) -> bool:
        """Return True if every running group decodes, and no waiting group could be admitted.

        Args:
            has_room: there are free rows.
        """
        rows, ahead = self.rows, self.rows.multi_step_limits
        if not rows or ahead.go_singly or ahead.are_bound or (has_room and queues.num_waiting):
            return False
        return rows.fully_batched_groups.issuperset(queues.running)

    def enter(self, schedule: SchedulerOutput, num_rounds: int) -> bool:
        """Schedule every row for num_rounds rounds, halved until blocks for all tokens they may accept are free.

        No group is preempted. Returns False, and schedules nothing, if blocks for one round are lacking.
        """
        num_in_round = self.geometry.num_speculative_tokens + 1
        while self.rows and num_rounds and not self.memory.can_grow(self.rows.left(num_rounds * num_in_round)):
            num_rounds //= 2
        if not self.rows or not num_rounds:
            return False
        shares = self.rows.left(num_rounds * num_in_round)
        for sequence, num_tokens in shares:
            commit_full_blocks(sequence, self.memory)
            self.memory.grow(sequence, num_tokens)
            if self.memory.states is not None:
                self.memory.states.add_drafts(sequence.kv, min(num_in_round, num_tokens) - 1)
            self.rows.grown(sequence)
        schedule.decode(self.rows.take(rounds=(num_rounds, [num_tokens for _, num_tokens in shares])))
        self.policy.decoded(schedule.decodes.groups)
        return True
