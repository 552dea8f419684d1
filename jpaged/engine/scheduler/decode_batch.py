"""Persistent decode batch: arrays of the decoding rows. A step adds one to all of them and rebuilds none.

    sequences      s0   s1   s2   s3      a place each, from 0 and without a hole
    starts         40   17   64   31      every step adds one
    block tables   [.]  [.]  [.]  [.]     written when a row has filled its last block: s2
    sampling       {.}  {.}  {.}  {.}     written when a row enters

    enter    a sequence that has just been given one token, in a block that it does not share
    leave    it ended, was preempted, or its last token is in flight; the last row moves to its place

All values can be derived from the sequences, which are the source of truth; `check` compares them. Excluded are beams,
which are chosen at every step, sequences below min_tokens, and rows with logits processors.

Limit of the prompt tokens with aux outputs (log-probabilities or hidden states) in a step.

LongRoPE: models that rotate keys differently once a sequence exceeds a length.

    up to the length   [ k k k k k k ]          keys with the short factors
    one token more     [ K K K K K K K ]        all are recomputed with the long factors, once
    from there on      [ K K K K K K K K ]      as usual

Phi-3 is such a model. The sequences of a group share its prompt, so they wait for each other and are recomputed
together.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import (
    BANNED_WIDTH,
    BEYOND_TOKENS,
    I32,
    Bool,
    Detail,
    Geometry,
    SamplingInputs,
    random_columns,
)
from jpaged.engine.kv_cache.interface import KVCacheManager
from jpaged.engine.scheduler.logits_processors import LogitsProcessorState
from jpaged.engine.sequence import Sequence, SequenceGroup, Status, advance_all, rewind_all
from jpaged.errors import InternalError

_NEVER = 1 << 30


class LongRopeRecompute:
    """Recomputation of groups whose sequences pass the LongRoPE length.

    Args:
        length: number of tokens up to which keys use the short factors.
    """

    def __init__(self, memory: KVCacheManager, length: int) -> None:
        self._memory = memory
        self._length = length

    def num_left(self, sequence: Sequence) -> int:
        """Return the number of tokens that a sequence may compute before it must be recomputed."""
        if sequence.rope_len > self._length:
            return _NEVER
        return max(0, self._length - sequence.num_computed_tokens)

    def begin_again(self, running: Iterable[SequenceGroup]) -> int:
        """Rewind the groups that are due for recomputation; return the number of tokens to compute again."""
        num_tokens = 0
        for group in running:
            if self._is_due(group):
                num_tokens += self._begin_again(group)
        return num_tokens

    def _is_due(self, group: SequenceGroup) -> bool:
        """Return True if all unfinished sequences have computed up to the length and their tokens are known."""
        most, live = group.request.sampling.max_num_tokens, group.live
        if not group.is_forked or any(sequence.num_in_flight_tokens > 1 for sequence in live):
            return False
        going = [sequence for sequence in live if sequence.num_output_tokens < most]
        return bool(going) and all(each.num_uncomputed_tokens > 0 == self.num_left(each) for each in going)

    def _begin_again(self, group: SequenceGroup) -> int:
        for sequence in group.live:
            if self._memory.prefixes is not None:
                self._memory.prefixes.register_full_blocks(sequence)
            sequence.switch_to_long_rope(self._length)
            self._memory.rewind(sequence)
        group.reset_for_recompute()
        return group.live[0].num_prompt_tokens + sum(sequence.num_output_tokens for sequence in group.live)


class PromptLogprobBudget:
    """Number of prompt tokens with aux outputs that the current step still has room for."""

    def __init__(self, num_positions: int) -> None:
        self._num_positions = self._num_left = num_positions

    def begin_step(self) -> None:
        self._num_left = self._num_positions

    def within(self, sequence: Sequence, num_tokens: int) -> int:
        """Cap the next tokens of a sequence to the remaining budget; charge those with aux outputs to it."""
        start = sequence.num_computed_tokens
        begin = max(start, sequence.prompt_logprobs_start)
        end = min(start + num_tokens, sequence.prompt_logprobs_end)
        if begin >= end:
            return num_tokens
        if end - begin > self._num_left:
            num_tokens = begin + self._num_left - start
        self._num_left -= min(end - begin, self._num_left)
        return num_tokens


class StepKind(enum.Enum):
    """Kind of a dispatch, by the programs that it needs."""

    SINGLE_STEP = enum.auto()
    """A forward and a sample."""
    MULTI_STEP = enum.auto()
    """Decode steps of one program."""
    MASKED_MULTI_STEP = enum.auto()
    """Decode steps of one program that waits for masks."""
    ALTERNATING = enum.auto()
    """Decode steps of two programs each, with masks between them."""
    DRAFT_MODEL = enum.auto()
    """Rounds of a draft model and its verification."""


def _none() -> I32:
    return np.zeros(0, np.int32)


@dataclass(slots=True)
class DecodeBatch:
    """The decoding rows of one step: one token in, one sampled.

    Attributes:
        starts_s: tokens computed before the step, which is the position of the input.
        are_last_s: the sampled token is the sequence's last one.
        token_ids: the inputs; empty if they are in flight.
        prev_rows: the rows of the previous step that sampled the inputs; empty if the host knows them.
        block_tables_gsm, sampling_s: views, valid until the rows are changed.
        adapters_s: a view; the adapter slot of each row.
        state_slots_s: a view; the slot that each row's recurrent state is written to.
        state_sources_s: the slot that it is read from.
        is_random_s: rows that sample at random.
        has_grammar_s: rows whose text follows a grammar.
        known: places whose token is known before it is sampled.
        detail: the highest output detail of any row.
        ending_ids_sx: a view; the stop tokens of each row, as `Executor.decode` takes them.
        num_steps: decode steps of the dispatch; if above 1, there are no other rows.
        num_rounds: draft-model rounds in place of steps; if above 0, there are no other rows.
        num_left_s: tokens that each row has blocks for and may sample in those rounds; empty without rounds.
        kind: several steps or rounds are a kind of dispatch; any other one is a single step.
        is_interruptible: a request that arrives while several steps run ends them after the current one.
    """

    sequences: list[Sequence] = field(default_factory=list)
    groups: list[SequenceGroup] = field(default_factory=list)
    starts_s: I32 = field(default_factory=_none)
    prompt_lens_s: I32 = field(default_factory=_none)
    are_last_s: Bool = field(default_factory=lambda: np.zeros(0, np.bool_))
    token_ids: list[int] = field(default_factory=list)
    prev_rows: list[int] = field(default_factory=list)
    block_tables_gsm: I32 = field(default_factory=_none)
    adapters_s: I32 = field(default_factory=_none)
    state_slots_s: I32 = field(default_factory=_none)
    state_sources_s: I32 = field(default_factory=_none)
    sampling_s: NDArray[np.void] = field(default_factory=lambda: SamplingInputs.neutral(0).rows_r)
    is_random_s: Bool = field(default_factory=lambda: np.zeros(0, np.bool_))
    has_grammar_s: Bool = field(default_factory=lambda: np.zeros(0, np.bool_))
    known: set[int] = field(default_factory=set)
    detail: Detail = Detail.TOKENS
    ending_ids_sx: I32 = field(default_factory=lambda: np.zeros((0, BANNED_WIDTH), np.int32))
    num_steps: int = 1
    num_rounds: int = 0
    num_left_s: I32 = field(default_factory=_none)
    kind: StepKind = StepKind.SINGLE_STEP
    is_interruptible: bool = False

    @property
    def are_masked(self) -> bool:
        """True if masks are made between several steps."""
        return self.kind in (StepKind.MASKED_MULTI_STEP, StepKind.ALTERNATING)

    @property
    def may_be_cut_short(self) -> bool:
        """True if the number of steps is known only at the end; `Scheduler.truncate_steps` sets it."""
        return self.is_interruptible or self.are_masked

    def set_interruptible(self) -> None:
        """Let a request that arrives end the steps early, if they are one program without masks."""
        self.is_interruptible = self.kind is StepKind.MULTI_STEP and self.num_steps > 1

    def __len__(self) -> int:
        return len(self.sequences)

    def cut_short(self, num_steps: int) -> None:
        """Reduce the dispatch to fewer steps than planned."""
        self.num_steps = num_steps
        self.are_last_s[:] = False


class MultiStepLimits(NamedTuple):
    """Limits of the next steps of the rows.

    Attributes:
        least_left: steps until the first row has all its tokens or must be recomputed; 0 without rows.
        go_singly: some row needs more output than tokens.
        are_bound: some row follows a grammar, which is evaluated at every step.
        may_end: some row may end before it has all its tokens.
    """

    least_left: int
    go_singly: bool
    are_bound: bool
    may_end: bool


class PersistentDecodeBatch:
    """Maintains the decoding rows, for the scheduler alone, which reports every change of their sequences.

    Attributes:
        logits_processors: logits processors of rows that are not in this batch.
        prompt_logprob_budget: limit of the prompt tokens with aux outputs.
        fully_batched_groups: groups all of whose live sequences have rows here.
        long_rope: how far sequences may grow before they are recomputed (LongRoPE); None if keys stay valid at any
            length.

    Args:
        eos_token_ids: EOS tokens of the model.
    """

    def __init__(
        self, geometry: Geometry, long_rope: LongRopeRecompute | None, eos_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self.logits_processors = LogitsProcessorState(geometry.max_num_seqs, geometry.vocab_size)
        self.prompt_logprob_budget = PromptLogprobBudget(geometry.num_aux)
        self.fully_batched_groups: set[SequenceGroup] = set()
        self._block_size = geometry.block_size
        self._has_fed_steps = geometry.has_fed_steps
        self.long_rope = long_rope
        self._sequences: list[Sequence] = []
        self._groups: list[SequenceGroup] = []
        self._rows: dict[Sequence, int] = {}
        most = geometry.max_num_seqs
        self._starts_s = np.zeros(most, np.int32)
        self._prompt_lens_s = np.zeros(most, np.int32)
        self._num_left_s = np.zeros(most, np.int32)  # steps until max_tokens or a recompute
        self._block_tables_gsm = np.zeros((len(geometry.windows), most, geometry.max_blocks_per_seq), np.int32)
        self._adapters_s = np.zeros(most, np.int32)
        self._state_slots_s = np.zeros(most, np.int32)
        self._state_sources_s = np.zeros(most, np.int32)  # another slot in the step after a checkpoint
        self._sampling = SamplingInputs.neutral(most)
        self._neutral = SamplingInputs.neutral(1).rows_r[0]
        self._is_random_s = np.zeros(most, np.bool_)
        self._are_bound_s = np.zeros(most, np.bool_)
        self._details_s = np.zeros(most, np.int32)
        self._eos_token_ids = eos_token_ids
        self._ending_ids_sx = np.full((most, BANNED_WIDTH), BEYOND_TOKENS, np.int32)
        self._may_end_s = np.zeros(most, np.bool_)

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._rows

    @property
    def lens_s(self) -> I32:
        """Number of computed tokens of each row, once every dispatched step has run."""
        return self._starts_s[: len(self._sequences)]

    def others(self, groups: Iterable[SequenceGroup]) -> list[Sequence]:
        """Return the sequences of some groups that have no rows here."""
        rest = [group for group in groups if group not in self.fully_batched_groups]
        return [sequence for group in rest for sequence in group.sequences if sequence not in self._rows]

    def add(self, entrants: list[tuple[SequenceGroup, Sequence]]) -> None:
        """Add rows for sequences, each of which has written its last token to a block that it does not share."""
        random = []
        for group, sequence in entrants:
            row, params = len(self._sequences), group.request.sampling
            self._rows[sequence] = row
            self._sequences.append(sequence)
            self._groups.append(group)
            self._starts_s[row] = sequence.num_computed_tokens
            self._prompt_lens_s[row] = sequence.num_prompt_tokens
            self._num_left_s[row] = _num_left(group, sequence, self.long_rope)
            self._block_tables_gsm[:, row] = sequence.kv.ids_gm
            self._adapters_s[row] = group.adapter_slot
            self._state_slots_s[row] = self._state_sources_s[row] = sequence.kv.state_slot
            self._sampling.rows_r[row] = self._neutral
            self._details_s[row] = Detail.of(params)
            self._is_random_s[row] = not params.is_greedy
            self._are_bound_s[row] = sequence.grammar is not None
            ending_ids = sorted(params.ending_ids(self._eos_token_ids))[:BANNED_WIDTH]
            self._ending_ids_sx[row] = BEYOND_TOKENS
            self._ending_ids_sx[row, : len(ending_ids)] = ending_ids
            self._may_end_s[row] = bool(ending_ids or params.stop)
            if not params.is_greedy:
                random.append((row, params, sequence.index))
        if random:
            rows, params_r, indices = zip(*random, strict=True)
            self._sampling.fill_columns(rows, random_columns(params_r, indices, [0] * len(random)))
        for group, _ in entrants:
            self._judge(group)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence's row, if it has one; the last row moves to its place."""
        row = self._rows.pop(sequence, None)
        if row is None:
            return
        group, last = self._groups[row], len(self._sequences) - 1
        if row != last:
            moved = self._sequences[last]
            self._sequences[row], self._groups[row], self._rows[moved] = moved, self._groups[last], row
            for column in self._columns():
                column[row] = column[last]
            self._block_tables_gsm[:, row] = self._block_tables_gsm[:, last]
        del self._sequences[last], self._groups[last]
        self._judge(group)

    def clear(self) -> None:
        """Remove every row."""
        self.fully_batched_groups.clear()
        self._rows.clear()
        self._sequences.clear()
        self._groups.clear()

    def finished(self) -> list[Sequence]:
        """Return the sequences whose last token is in flight, or that must be recomputed."""
        return self._where(self._num_left_s[: len(self._sequences)] <= 0)

    def needing_blocks(self, num_steps: int = 1) -> list[Sequence]:
        """Return the sequences that need new blocks for the next `num_steps` steps."""
        return self._where(-self.lens_s % self._block_size < num_steps)

    def left(self, most: int) -> list[tuple[Sequence, int]]:
        """Return each sequence with its steps until it has all its tokens or is recomputed, capped at `most`."""
        return list(zip(self._sequences, np.minimum(self._num_left_s[: len(self)], most).tolist(), strict=True))

    @property
    def multi_step_limits(self) -> MultiStepLimits:
        """Limits of the next steps."""
        num_rows = len(self)
        return MultiStepLimits(
            least_left=int(self._num_left_s[:num_rows].min()) if self else 0,
            go_singly=bool((self._details_s[:num_rows] > Detail.TOKENS).any()),
            are_bound=bool(self._are_bound_s[:num_rows].any()),
            may_end=bool(self._may_end_s[:num_rows].any()),
        )

    @property
    def first_blocks_s(self) -> I32:
        """First block of each row, in the first KV group."""
        return self._block_tables_gsm[0, : len(self), 0]

    def grown(self, sequence: Sequence, num_accepted: int = 0) -> None:
        """Update the row of a sequence whose block tables have changed, or which had a draft.

        Args:
            num_accepted: accepted draft tokens, by which it is ahead of the step.
        """
        row = self._rows[sequence]
        self._starts_s[row] += num_accepted
        self._num_left_s[row] -= num_accepted
        self._block_tables_gsm[:, row] = sequence.kv.ids_gm
        # A row whose slot stays the same reads what its last step has written.
        self._state_slots_s[row] = sequence.kv.state_slot
        if num_accepted:
            self._state_sources_s[row] = sequence.kv.state_slot

    def get_group(self, sequence: Sequence) -> SequenceGroup:
        """Return the group of a sequence that has a row."""
        return self._groups[self._rows[sequence]]

    def take(
        self, num_steps: int = 1, rounds: tuple[int, list[int]] | None = None, *, is_alone: bool = False
    ) -> DecodeBatch:
        """Return every row as input of the next dispatch, and advance all of them past its steps.

        Args:
            is_alone: no other rows run in the dispatch, and the program of several steps is available: even a single
                step runs as one program.
            rounds: number of draft-model rounds in place of steps, and the tokens that each row may sample in them; a
                row samples at least one.
        """
        num_rows, sequences = len(self._sequences), list(self._sequences)
        # Each row was in the previous step and in no later one, so the tokens of all rows are in flight, or of none.
        kind = StepKind.DRAFT_MODEL if rounds else StepKind.SINGLE_STEP
        if self._are_bound_s[:num_rows].any():
            if num_steps > 1:
                kind = StepKind.MASKED_MULTI_STEP if self._has_fed_steps else StepKind.ALTERNATING
        elif num_steps > 1 or (is_alone and num_rows > 0):
            kind = StepKind.MULTI_STEP
        is_in_flight = num_rows > 0 and sequences[0].num_in_flight_tokens > 0
        decodes = DecodeBatch(
            sequences,
            list(self._groups),
            self._starts_s[:num_rows].copy(),
            self._prompt_lens_s[:num_rows].copy(),
            self._num_left_s[:num_rows] == num_steps,
            token_ids=[] if is_in_flight else [sequence.token_ids[-1] for sequence in sequences],
            prev_rows=[sequence.in_flight_row for sequence in sequences] if is_in_flight else [],
            block_tables_gsm=self._block_tables_gsm[:, :num_rows],
            adapters_s=self._adapters_s[:num_rows],
            state_slots_s=self._state_slots_s[:num_rows],
            state_sources_s=self._state_sources_s[:num_rows].copy(),
            sampling_s=self._sampling.rows_r[:num_rows],
            is_random_s=self._is_random_s[:num_rows],
            has_grammar_s=self._are_bound_s[:num_rows].copy(),
            detail=Detail(self._details_s[:num_rows].max(initial=Detail.TOKENS)),
            ending_ids_sx=self._ending_ids_sx[:num_rows],
            num_steps=num_steps,
            num_rounds=rounds[0] if rounds else 0,
            num_left_s=np.array(rounds[1] if rounds else [], np.int32),
            kind=kind,
        )
        self._state_sources_s[:num_rows] = self._state_slots_s[:num_rows]
        self._starts_s[:num_rows] += num_steps
        self._num_left_s[:num_rows] -= num_steps
        advance_all(sequences, num_steps)
        return decodes

    def go_back(self, num_steps: int) -> None:
        """Undo the last `num_steps` steps of the last dispatch, which are not executed."""
        num_rows = len(self._sequences)
        self._starts_s[:num_rows] -= num_steps
        self._num_left_s[:num_rows] += num_steps
        rewind_all(self._sequences, num_steps)

    def check(self) -> None:
        """Raise InternalError if a row differs from its sequence."""
        for row, (sequence, group) in enumerate(zip(self._sequences, self._groups, strict=True)):
            kept = self._starts_s[row], self._num_left_s[row], self._rows[sequence]
            num_left = _num_left(group, sequence, self.long_rope)
            if kept != (sequence.num_computed_tokens, num_left, row) or sequence.status is not Status.RUNNING:
                raise InternalError(f"row {row} of a {sequence.status.value} sequence has {kept}, not {num_left}")
            if not np.array_equal(self._block_tables_gsm[:, row], sequence.kv.ids_gm):
                raise InternalError(f"row {row} has other blocks than {sequence.kv.block_ids()}")
            if self._adapters_s[row] != group.adapter_slot:
                raise InternalError(f"row {row} has adapter slot {self._adapters_s[row]}")
            if not self._state_slots_s[row] == self._state_sources_s[row] == sequence.kv.state_slot:
                raise InternalError(f"row {row} has state slot {self._state_slots_s[row]}")
        if len(self._rows) != len(self._sequences):
            raise InternalError(f"{len(self._rows)} sequences have {len(self._sequences)} rows")

    def _where(self, is_meant_s: Bool) -> list[Sequence]:
        return [self._sequences[row] for row in np.flatnonzero(is_meant_s).tolist()]

    def _judge(self, group: SequenceGroup) -> None:
        live = group.live
        if live and all(sequence in self._rows for sequence in live):
            self.fully_batched_groups.add(group)
        else:
            self.fully_batched_groups.discard(group)

    def _columns(self) -> tuple[NDArray[np.generic], ...]:
        return (
            self._starts_s,
            self._prompt_lens_s,
            self._num_left_s,
            self._adapters_s,
            self._state_slots_s,
            self._state_sources_s,
            self._sampling.rows_r,
            self._is_random_s,
            self._are_bound_s,
            self._details_s,
            self._ending_ids_sx,
            self._may_end_s,
        )


def commit_full_blocks(sequence: Sequence, memory: KVCacheManager) -> None:
    """Register the full blocks of a running sequence in the prefix cache, and free those outside its windows."""
    if memory.prefixes is not None:
        memory.prefixes.register_full_blocks(sequence)
    if memory.windows is not None:
        memory.windows.free_out_of_window(sequence)


def _num_left(group: SequenceGroup, sequence: Sequence, long_rope: LongRopeRecompute | None) -> int:
    num_left = group.request.sampling.max_num_tokens - sequence.num_output_tokens
    return num_left if long_rope is None else min(num_left, long_rope.num_left(sequence))
