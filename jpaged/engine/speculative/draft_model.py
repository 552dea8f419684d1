"""Rounds of a draft model on the device, instead of several decode steps.

number of rounds ──> the scheduler allocates blocks ──> begin ──> speculate[R], n rounds ──> on_results
     │ 0
     └──────────────> on_dispatched: steps without the draft model; it computes their tokens before its next proposals

Number of rounds of a draft model per dispatch, if any, from measured times.

    ON ──── tokens a round / duration of a round in plain steps is below 1 - MARGIN, twice ──> OFF: plain steps
     ^                                                                                         │  for some dispatches,
     └─ 1 + COMEBACK, in PROBE_DISPATCHES ── PROBING: a few rounds each <──────────────────────┘  doubled each time

Round and plain step times are measured for each padded number of rows. The first dispatches of a size are plain, and so
are some between the rounds, to keep the plain step time current. If rounds do not pay, both times are measured again
before rounds are turned off, because the load of other processes may have changed.

Blocks for which a draft model has KV. It computes missing KV late, before its next proposals.

    block     1     2     3     4
    model   [====][====][====][==  ]     the model's keys
    draft   [====][    ][====][    ]     2 and 4 are stale and are recomputed before the next rounds
              seen  not   seen  not

A block is seen if the draft's pool has the keys of every token whose keys the model's block has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from jpaged.config import SpeculativeOptions
from jpaged.engine.executor import I32, MAX_NUM_ROUNDS, BlockMoves, Detail, Geometry, Move, StepInputs, StepOutputs
from jpaged.engine.observers import StepObservers, StepTiming
from jpaged.engine.scheduler.output import SchedulerOutput, build_step_inputs
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.speculative.controller import COMEBACK, LEAST_OFF_STEPS, MARGIN, MOST_OFF_STEPS, AdaptationState

PROBE_DISPATCHES = 3
"""Dispatches after which a probe is judged."""
FEW_ROUNDS = 4
"""Rounds of a dispatch if round times are unknown, or during a probe."""
_NUM_PLAIN_FIRST = 2
"""Plain dispatches before the first rounds."""
_PLAIN_EVERY = 512
"""Dispatches with rounds after which plain ones are measured again."""
_NUM_KEPT = 5
_NEW = 1 / 8
"""Weight of a dispatch in the mean number of tokens per round."""


@dataclass(slots=True)
class _Size:
    """Measurements for one padded number of rows.

    Attributes:
        plain_s, round_s: seconds of the last plain steps and rounds.
        tokens: mean number of tokens of a row per round.
        num_plain_due: plain dispatches still to measure.
        num_left: dispatches until the state may change.
        off_for: dispatches of the next off time.
        is_doubted: rounds did not pay relative to older plain steps, and both are measured again before turning off.
    """

    state: AdaptationState = AdaptationState.ON
    plain_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    round_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    tokens: float = 0.0
    num_plain_due: int = _NUM_PLAIN_FIRST
    num_left: int = _PLAIN_EVERY
    off_for: int = LEAST_OFF_STEPS
    is_doubted: bool = False

    @property
    def gain(self) -> float | None:
        """Return the token rate of rounds relative to plain steps, or None if unknown."""
        if not self.plain_s or not self.round_s:
            return None
        return self.tokens * median(self.plain_s) / median(self.round_s)


class SpecRoundPolicy:
    """Controller of the number of rounds, from measurements. Deterministic: counts dispatches instead of using a clock.

    Args:
        disable_by_batch_size: number of rows above which there are no rounds; None decides by time only.
    """

    def __init__(self, disable_by_batch_size: int | None = None) -> None:
        self._most_rows = disable_by_batch_size
        self._sizes: dict[int, _Size] = {}

    def state(self, size: int) -> AdaptationState:
        """Return the state for a padded number of rows."""
        return self._get_size(size).state

    def num_rounds(self, num_rows: int, size: int, longest_s: float) -> int:
        """Return the number of rounds of the next dispatch; after 0, the plain dispatch is reported by `took_plain`.

        Args:
            size: padded number of rows.
            longest_s: maximum duration of a dispatch in seconds.
        """
        if self._most_rows is not None and num_rows > self._most_rows:
            return 0
        one = self._get_size(size)
        if one.num_plain_due > 0:
            return 0
        if one.state is AdaptationState.OFF:
            if one.num_left > 0:
                return 0
            one.state, one.num_left, one.tokens = AdaptationState.PROBING, PROBE_DISPATCHES, 0.0
            one.round_s.clear()
        if one.state is AdaptationState.PROBING or not one.round_s:
            return FEW_ROUNDS
        return min(MAX_NUM_ROUNDS, max(1, int(longest_s / median(one.round_s))))

    def took_plain(self, size: int, seconds: float) -> None:
        """Record the duration of a plain step of a dispatch; 0 is unknown."""
        one = self._get_size(size)
        if seconds > 0:
            one.plain_s.append(seconds)
        one.num_plain_due = max(0, one.num_plain_due - 1)
        if one.state is AdaptationState.OFF and one.num_left > 0:
            one.num_left -= 1

    def took(self, size: int, tokens: float, seconds: float) -> None:
        """Record the duration of a round of a dispatch and its tokens per row; 0 seconds are unknown."""
        one = self._get_size(size)
        one.tokens = tokens if not one.tokens else one.tokens + _NEW * (tokens - one.tokens)
        if seconds > 0:
            one.round_s.append(seconds)
        one.num_left -= 1
        gain = one.gain
        if one.state is AdaptationState.PROBING:
            if one.num_left <= 0:
                self._judge(one, gain is None or gain >= 1 + COMEBACK)
        elif len(one.round_s) == _NUM_KEPT and gain is not None and gain < 1 - MARGIN:
            if one.is_doubted:
                self._judge(one, pays=False)
            else:
                one.num_plain_due, one.is_doubted = _NUM_PLAIN_FIRST, True
                one.plain_s.clear()
                one.round_s.clear()
        else:
            one.is_doubted = one.is_doubted and len(one.round_s) < _NUM_KEPT
            if one.num_left <= 0:
                one.num_left, one.num_plain_due, one.off_for = _PLAIN_EVERY, _NUM_PLAIN_FIRST, LEAST_OFF_STEPS

    def _get_size(self, size: int) -> _Size:
        return self._sizes.setdefault(size, _Size())

    def _judge(self, one: _Size, pays: bool) -> None:
        one.is_doubted = False
        if pays:
            one.state, one.num_left = AdaptationState.ON, _PLAIN_EVERY
        else:
            one.state, one.num_left = AdaptationState.OFF, one.off_for
            one.off_for = min(2 * one.off_for, MOST_OFF_STEPS)


class DraftKVState:
    """Tracker of the blocks that a draft model shares. Called only by the engine thread."""

    def __init__(self, geometry: Geometry) -> None:
        self._block_size = geometry.block_size
        self._group = geometry.windows.index(None)
        self._are_seen = np.zeros(geometry.num_blocks + 1, np.bool_)

    def move(self, moves: BlockMoves) -> None:
        """Record block moves: copies happen in the draft's pool too; swapped-in blocks have no draft KV."""
        if moves.move is Move.COPY:
            self._are_seen[moves.destinations] = self._are_seen[moves.sources]
        elif moves.move is Move.SWAP_IN:
            self._are_seen[moves.destinations] = False

    def write(self, inputs: StepInputs, num_steps: int) -> None:
        """Record that the model writes keys without the draft model, in num_steps steps."""
        if num_steps == 1:
            self._are_seen[inputs.slots_gt[self._group, : inputs.num_tokens] // self._block_size] = False
            return
        starts = inputs.positions_t[: inputs.num_rows]
        for ids_m, begin, end in zip(*self._written(inputs, starts + num_steps), strict=True):
            self._are_seen[ids_m[begin:end]] = False

    def see(self, inputs: StepInputs, num_left_r: I32) -> I32:
        """Record that rounds begin, in which row r writes up to num_left_r[r] keys after the missing ones are computed.

        Returns:
            [R] the first token of each row without draft KV, from which it must be computed; the row's next token if
            all KV is there.
        """
        num_rows, block_size = inputs.num_rows, self._block_size
        starts = inputs.positions_t[:num_rows]
        firsts = starts.copy()
        rows = zip(*self._written(inputs, starts + num_left_r[:num_rows]), strict=True)
        for row, (ids_m, _, end) in enumerate(rows):
            num_blocks = -(-int(starts[row]) // block_size)
            unseen = np.flatnonzero(~self._are_seen[ids_m[:num_blocks]])
            if len(unseen):
                firsts[row] = unseen[0] * block_size
            self._are_seen[ids_m[:end]] = True
        return firsts

    def _written(self, inputs: StepInputs, ends: I32) -> tuple[I32, list[int], list[int]]:
        """Return the block tables of rows, and the table range written from each row's token to its end."""
        begins = inputs.positions_t[: inputs.num_rows] // self._block_size
        lasts = (ends - 1) // self._block_size
        return inputs.block_tables_gsm[self._group, : inputs.num_rows], begins.tolist(), (lasts + 1).tolist()


class DraftModelSpeculation:
    """Controller of rounds, which run if all rows decode. Called only by the engine thread.

    The draft model lacks KV of tokens that only the model ran, and computes it before the next rounds.

    Args:
        num_speculative_tokens: draft tokens per row and round.
        follows: the draft model runs after each step of the model, so its KV is always complete: a head.
    """

    def __init__(
        self, rule: SpecRoundPolicy, geometry: Geometry, num_speculative_tokens: int, *, follows: bool = False
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._follows = follows
        self._rule = rule
        self._geometry = geometry
        self._seen = DraftKVState(geometry)

    @classmethod
    def of(cls, options: SpeculativeOptions, geometry: Geometry) -> DraftModelSpeculation:
        """Create the rounds that the options select."""
        rule, follows = SpecRoundPolicy(options.disable_by_batch_size), options.has_head
        return cls(rule, geometry, geometry.num_speculative_tokens, follows=follows)

    def observe(self, observers: StepObservers) -> None:
        """Add the callbacks of this controller."""
        observers.on_scheduled.append(self.on_scheduled)
        observers.on_dispatched.append(self.on_dispatched)
        observers.on_results.append(self.on_results)

    def limit(self, scheduler: Scheduler, geometry: Geometry) -> int:
        """Return the number of rounds of the next dispatch, possibly 0.

        Args:
            geometry: with the bucket sizes compiled so far.
        """
        self._geometry = geometry
        has_room, num_rows = scheduler.queues.num_rows < scheduler.max_num_seqs, len(scheduler.rows)
        size = geometry.buckets.num_speculate_rows(num_rows) if num_rows else None
        if size is None or not scheduler.rounds.may_run(scheduler.queues, has_room=has_room):
            return 0
        longest_s = scheduler.multi_step_policy.longest_s(
            num_rows, may_end=scheduler.rows.multi_step_limits.may_end, has_room=has_room
        )
        return self._rule.num_rounds(num_rows, size, longest_s)

    def propose(self, scheduler: Scheduler, limit: int) -> tuple[None, int]:
        """Return no draft tokens of the host, and the number of rounds."""
        return None, limit

    def on_scheduled(self, schedule: SchedulerOutput) -> None:
        """Record the block moves of a step."""
        for moves in schedule.ops.batches():
            self._seen.move(moves)

    def on_dispatched(self, schedule: SchedulerOutput, inputs: StepInputs) -> None:
        """Record the keys that the model writes without the draft model."""
        if not schedule.decodes.num_rounds:
            self._seen.write(inputs, schedule.num_steps)

    def begin(self, schedule: SchedulerOutput, inputs: StepInputs, num_left_r: I32) -> Iterator[StepInputs]:
        """Yield the prefill steps that the draft model must run before rounds, to complete its KV."""
        if self._follows:
            return
        step, room = SchedulerOutput(), self._geometry.max_num_batched_tokens
        decodes, ends = schedule.decodes, inputs.positions_t.tolist()
        begins = self._seen.see(inputs, num_left_r).tolist()
        for sequence, group, begin, end in zip(decodes.sequences, decodes.groups, begins, ends, strict=False):
            first = begin
            while first < end:
                count = min(room, end - first)
                step.rerun(group, sequence, first, count)
                first, room = first + count, room - count
                if not room:
                    step.close()
                    yield build_step_inputs(step, self._geometry)
                    step, room = SchedulerOutput(), self._geometry.max_num_batched_tokens
        if step.rows:
            step.close()
            yield build_step_inputs(step, self._geometry)

    def on_results(self, schedule: SchedulerOutput, outputs: StepOutputs, timing: StepTiming) -> None:
        """Record the accepted tokens of a dispatch, and its duration."""
        decodes, speculated, seconds = schedule.decodes, outputs.speculated, timing.seconds
        size = self._geometry.buckets.num_speculate_rows(len(decodes)) if decodes and not schedule.rows else None
        if size is None:
            return
        if speculated is None:
            if decodes.detail is Detail.TOKENS and not decodes.has_grammar_s.any():  # rows that are eligible for rounds
                self._rule.took_plain(size, seconds / decodes.num_steps)
            return
        num_rounds = max(1, speculated.num_rounds)
        tokens = float(speculated.num_tokens_r[: len(decodes)].sum()) / (len(decodes) * num_rounds)
        self._rule.took(size, tokens, seconds / num_rounds)
