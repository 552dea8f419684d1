"""Rounds of a draft model on the device, in place of several decode steps: whether, how many, and what they lack.

    wanted(rows) ──> the scheduler finds blocks ──> speculate[R], n rounds ──> observe(what came of it)
         │ 0
         └──────────> plain steps, which the draft has not seen: it runs their tokens before it is asked again

    ON ──── tokens a round / what a round takes in plain steps was below 1 - MARGIN ───> OFF: plain steps
     ^                                                                                  │  for a number of dispatches,
     └─ 1 + COMEBACK, in PROBE_DISPATCHES ── PROBING: a few rounds each <───────────────┘  doubled each time

Both times are measured, for each number of rows that a program is for. They are known before anything is decided: the
first dispatches of a size are plain ones, and some between the rounds are, so that what a plain step takes stays known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from jpaged.config import SpeculativeOptions
from jpaged.engine.executor import I32, MAX_NUM_ROUNDS, BlockMoves, Geometry, Speculated, StepInputs
from jpaged.engine.kv.interface import KVMemory, settle
from jpaged.engine.scheduling.policies import SchedulingPolicy
from jpaged.engine.scheduling.queues import Queues
from jpaged.engine.scheduling.rows import DecodingRows
from jpaged.engine.scheduling.schedule import Schedule, build_step_inputs
from jpaged.engine.speculation.adaptation import COMEBACK, LEAST_OFF_STEPS, MARGIN, MOST_OFF_STEPS, State
from jpaged.engine.speculation.seen_blocks import SeenBlocks

PROBE_DISPATCHES = 3
"""Dispatches by which a probe has to convince."""
FEW_ROUNDS = 4
"""Rounds of a dispatch of which it is not known what they take, or whether they pay."""
_NUM_PLAIN_FIRST = 2
"""Plain dispatches before the first rounds."""
_PLAIN_EVERY = 512
"""Dispatches of rounds after which as many plain ones come again."""
_NUM_KEPT = 5
_NEW = 1 / 8
"""Weight of a dispatch in the mean number of tokens of a round."""


@dataclass(slots=True)
class _Size:
    """What is known of one number of rows, padded.

    Attributes:
        plain_s, round_s: seconds of the last plain steps and rounds.
        tokens: of a row in a round, on average.
        num_plain_due: plain dispatches that are to be timed.
        num_left: dispatches until the state may change.
        off_for: dispatches of the next time off.
    """

    state: State = State.ON
    plain_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    round_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    tokens: float = 0.0
    num_plain_due: int = _NUM_PLAIN_FIRST
    num_left: int = _PLAIN_EVERY
    off_for: int = LEAST_OFF_STEPS

    @property
    def gain(self) -> float | None:
        """Tokens in the time of a round, of those that plain steps make in it; None is not known."""
        if not self.plain_s or not self.round_s:
            return None
        return self.tokens * median(self.plain_s) / median(self.round_s)


class RoundRule:
    """Decides how many rounds the next dispatch has, by what was measured. It has no clock, and counts dispatches.

    Args:
        disable_by_batch_size: rows above which there are none; None leaves it to time.
    """

    def __init__(self, disable_by_batch_size: int | None = None) -> None:
        self._most_rows = disable_by_batch_size
        self._sizes: dict[int, _Size] = {}

    def state(self, size: int) -> State:
        """Whether there are rounds of so many rows, padded."""
        return self._of(size).state

    def num_rounds(self, num_rows: int, size: int, longest_s: float) -> int:
        """Rounds of the next dispatch of so many rows; 0 is none, and a plain dispatch is told of by `took_plain`.

        Args:
            size: what the rows are padded to.
            longest_s: seconds that a dispatch may take.
        """
        if self._most_rows is not None and num_rows > self._most_rows:
            return 0
        one = self._of(size)
        if one.num_plain_due > 0:
            return 0
        if one.state is State.OFF:
            if one.num_left > 0:
                return 0
            one.state, one.num_left, one.tokens = State.PROBING, PROBE_DISPATCHES, 0.0
            one.round_s.clear()
        if one.state is State.PROBING or not one.round_s:
            return FEW_ROUNDS
        return min(MAX_NUM_ROUNDS, max(1, int(longest_s / median(one.round_s))))

    def took_plain(self, size: int, seconds: float) -> None:
        """Notes what a plain step of a dispatch took; 0 is not known."""
        one = self._of(size)
        if seconds > 0:
            one.plain_s.append(seconds)
        one.num_plain_due = max(0, one.num_plain_due - 1)
        if one.state is State.OFF and one.num_left > 0:
            one.num_left -= 1

    def took(self, size: int, tokens: float, seconds: float) -> None:
        """Notes what a round of a dispatch took, and the tokens that a row had of it; 0 seconds are not known."""
        one = self._of(size)
        one.tokens = tokens if not one.tokens else one.tokens + _NEW * (tokens - one.tokens)
        if seconds > 0:
            one.round_s.append(seconds)
        one.num_left -= 1
        gain = one.gain
        if one.state is State.PROBING:
            if one.num_left <= 0:
                self._judge(one, gain is None or gain >= 1 + COMEBACK)
        elif gain is not None and gain < 1 - MARGIN and len(one.round_s) == _NUM_KEPT:
            self._judge(one, pays=False)
        elif one.num_left <= 0:
            one.num_left, one.num_plain_due, one.off_for = _PLAIN_EVERY, _NUM_PLAIN_FIRST, LEAST_OFF_STEPS

    def _of(self, size: int) -> _Size:
        return self._sizes.setdefault(size, _Size())

    def _judge(self, one: _Size, pays: bool) -> None:
        if pays:
            one.state, one.num_left = State.ON, _PLAIN_EVERY
        else:
            one.state, one.num_left = State.OFF, one.off_for
            one.off_for = min(2 * one.off_for, MOST_OFF_STEPS)


@dataclass(frozen=True, slots=True)
class RoundRows:
    """Enters rows for rounds, for one scheduler. What they take in vain `DraftRows.ran` gives back."""

    memory: KVMemory
    rows: DecodingRows
    geometry: Geometry
    policy: SchedulingPolicy

    def may_run(self, queues: Queues, *, has_room: bool) -> bool:
        """Whether every running group decodes, and nobody waits who finds a row.

        Args:
            has_room: there are rows for others.
        """
        rows = self.rows
        if not rows or rows.go_singly or (has_room and queues.num_waiting):
            return False
        return rows.settled.issuperset(queues.running)

    def enter(self, schedule: Schedule, num_rounds: int) -> bool:
        """Enters every row for rounds, as many as find blocks for all that may be accepted.

        Nobody leaves for them. False, and nothing is entered, where not even one round finds them.
        """
        num_in_round = self.geometry.num_speculative_tokens + 1
        while self.rows and num_rounds and not self.memory.can_grow(self.rows.left(num_rounds * num_in_round)):
            num_rounds //= 2
        if not self.rows or not num_rounds:
            return False
        shares = self.rows.left(num_rounds * num_in_round)
        for sequence, num_tokens in shares:
            settle(sequence, self.memory)
            self.memory.grow(sequence, num_tokens)
            self.rows.grown(sequence)
        schedule.decode(self.rows.take(rounds=(num_rounds, [num_tokens for _, num_tokens in shares])))
        self.policy.decoded(schedule.decodes.groups)
        return True


class Rounds:
    """Asks for rounds where all rows decode, and shows the draft what it lacks. Called by the engine thread alone.

    What the model alone runs the draft has not seen, until it is to propose behind it.

    Args:
        num_speculative_tokens: that it proposes to a row in a round.
    """

    def __init__(self, rule: RoundRule, geometry: Geometry, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._rule = rule
        self._geometry = geometry
        self._seen = SeenBlocks(geometry)

    @classmethod
    def of(cls, options: SpeculativeOptions, geometry: Geometry) -> Rounds:
        """The rounds that the options ask for."""
        return cls(RoundRule(options.disable_by_batch_size), geometry, geometry.num_speculative_tokens)

    def wanted(self, geometry: Geometry, num_rows: int, longest_s: float) -> int:
        """Rounds of the next dispatch, if so many rows decode and nobody else runs; 0 is none.

        Args:
            geometry: with the sizes that there are by now.
        """
        self._geometry = geometry
        size = geometry.buckets.num_speculate_rows(num_rows) if num_rows else None
        return 0 if size is None else self._rule.num_rounds(num_rows, size, longest_s)

    def move(self, moves: BlockMoves) -> None:
        """Blocks are moved."""
        self._seen.move(moves)

    def begin_plain(self, inputs: StepInputs, num_steps: int) -> None:
        """The model alone runs a step, or several."""
        self._seen.write(inputs, num_steps)

    def begin(self, schedule: Schedule, inputs: StepInputs, num_left_r: I32) -> Iterator[StepInputs]:
        """Rounds begin: steps that the draft is to run alone before, of all in front of them that it has not seen."""
        step, room = Schedule(), self._geometry.max_num_batched_tokens
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
                    step, room = Schedule(), self._geometry.max_num_batched_tokens
        if step.rows:
            step.close()
            yield build_step_inputs(step, self._geometry)

    def observe(self, schedule: Schedule, speculated: Speculated | None, seconds: float) -> None:
        """Notes what came of a dispatch, and what it took.

        Args:
            speculated: of one with rounds.
        """
        decodes = schedule.decodes
        size = self._geometry.buckets.num_speculate_rows(len(decodes)) if decodes and not schedule.rows else None
        if size is None:
            return
        if speculated is None:
            self._rule.took_plain(size, seconds / decodes.num_steps)
            return
        num_rounds = max(1, speculated.num_rounds)
        tokens = float(speculated.num_tokens_r[: len(decodes)].sum()) / (len(decodes) * num_rounds)
        self._rule.took(size, tokens, seconds / num_rounds)
