"""Several steps of a fake in one dispatch, speculative rounds, and a clock that only moves by calls.

Each step runs when its masks arrive, or at once without masks. Rounds have the tokens of single steps, grouped as if
some had been proposed. The number of accepted proposals of a round is a function of the position, so that rows progress
at different rates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import (
    I32,
    MAX_NUM_ROUNDS,
    BlockMoves,
    Bool,
    Geometry,
    Move,
    SamplingInputs,
    Speculated,
    StepDirective,
    StepInputs,
    StepOutputs,
)
from jpaged.engine.executor.io import LogitsProcessorInputs
from jpaged.errors import InternalError
from jpaged.testing.fake_model import SeenTokens


def step_at(
    place: int, step: StepInputs, sampling: SamplingInputs, block_size: int
) -> tuple[StepInputs, SamplingInputs]:
    """Return one of the steps of a decode; each except the first takes its inputs from the last tokens.

    Args:
        place: index of the step, from 0.
        step: the first. Row i has token i and no other.
        sampling: of the first.
        block_size: token slots in a block.
    """
    if place == 0:
        return step, sampling
    rows = np.arange(step.num_rows)
    is_used_t = np.arange(len(step.token_ids_t)) < step.num_rows
    positions_t = step.positions_t + place * is_used_t.astype(np.int32)
    positions = positions_t[rows]
    slots_gt, prev_rows_t = np.zeros_like(step.slots_gt), np.zeros_like(step.prev_sampled_rows_t)
    blocks_gr = step.block_tables_gsm[:, rows, positions // block_size]
    slots_gt[:, rows] = blocks_gr * block_size + positions % block_size
    prev_rows_t[rows] = rows
    kv_lens_s, rows_r = step.kv_lens_s.copy(), sampling.rows_r.copy()
    kv_lens_s[rows] += place
    rows_r["positions_r"] += place
    later = dataclasses.replace(
        step,
        is_prev_sampled_t=is_used_t,
        prev_sampled_rows_t=prev_rows_t,
        positions_t=positions_t,
        rope_lens_t=np.maximum(step.rope_lens_t, positions_t + 1),
        slots_gt=slots_gt,
        kv_lens_s=kv_lens_s,
        state_sources_s=step.state_slots_s,
    )
    return later, dataclasses.replace(sampling, rows_r=rows_r)


class RunsSteps(Protocol):
    """Interface of a fake that runs single steps.

    Attributes:
        last_tokens: of each row.
        have_ended: rows that ended in the last multi-step dispatch, which may read slots that were never written.
    """

    last_tokens: NDArray[np.int64]
    have_ended: NDArray[np.bool_]

    @property
    def geometry(self) -> Geometry: ...

    def forward(self, inputs: StepInputs) -> list[SeenTokens]: ...

    def sample(self, hidden: list[SeenTokens], inputs: SamplingInputs) -> StepOutputs: ...


class FakeFeed:
    """A dispatch of several steps, as `Executor.decode` and `decode_with_masks` describe it."""

    def __init__(
        self, runs: RunsSteps, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> None:
        shape, used = (len(sampling.rows_r), num_steps), slice(0, inputs.num_rows)
        self._runs, self._inputs, self._used = runs, inputs, used
        self._sampling = dataclasses.replace(sampling, edits=None)
        self._ending_ids_rx = ending_token_ids_rx[used]
        self._token_ids_rn, self._is_sound_rn = np.full(shape, -1, np.int32), np.ones(shape, np.bool_)
        self._kept = runs.last_tokens[inputs.prev_sampled_rows_t[used]]
        self._ended = inputs.is_prev_sampled_t[used] & self._end(self._kept)
        self._drawn: tuple[I32, Bool] | None = None
        self._place, self._num_steps = 0, num_steps
        self._is_interruptible = self._is_interrupted = False

    @property
    def num_steps(self) -> int:
        """Number of executed steps."""
        return self._place

    @property
    def is_over(self) -> bool:
        """True if no further step is run."""
        return self._place >= self._num_steps

    @property
    def outputs(self) -> StepOutputs:
        """Outputs of the steps; those of an interruptible dispatch are run first."""
        while self._is_interruptible and not self.is_over:
            self._step(None, StepDirective.CONTINUE)
            if self._is_interrupted:
                self.close()
        if not self.is_over:
            raise InternalError(f"{self._num_steps} steps are collected, but only {self._place} were given masks")
        return StepOutputs(self._token_ids_rn, self._is_sound_rn)

    def run(self) -> StepOutputs:
        """Run all steps without masks."""
        while not self.is_over:
            self._step(None, StepDirective.CONTINUE)
        return self.outputs

    def set_interruptible(self) -> None:
        """Run the steps when the outputs are read, until `interrupt` is called."""
        self._is_interruptible = True

    def interrupt(self) -> None:
        """Let the current step be the last."""
        self._is_interrupted = True

    def give(self, mask_rw: I32, verdict: StepDirective) -> None:
        if self.is_over:
            raise InternalError("masks are given to a step after the last")
        self._step(mask_rw, verdict)

    def wait(self) -> tuple[I32, Bool] | None:
        drawn, self._drawn = self._drawn, None
        return drawn

    def close(self) -> None:
        self._num_steps = self._place

    def _step(self, mask_rw: I32 | None, verdict: StepDirective) -> None:
        if self._ended.all():
            self._runs.last_tokens[self._used] = self._kept
            self._runs.have_ended[self._used] = True
            self.close()
            return
        place, used = self._place, self._used
        step, rows = step_at(place, self._inputs, self._sampling, self._runs.geometry.block_size)
        hidden = self._runs.forward(step)
        if verdict == StepDirective.VOID:
            self.close()
            return
        if mask_rw is not None:
            neutral = LogitsProcessorInputs.neutral(len(rows.rows_r))
            rows = dataclasses.replace(rows, edits=dataclasses.replace(neutral, mask_rw=mask_rw))
        outputs = self._runs.sample(hidden, rows)
        self._token_ids_rn[:, place] = outputs.token_ids_rn[:, 0]
        self._is_sound_rn[used, place] = outputs.is_finite_rn[used, 0] | self._ended
        self._drawn = outputs.token_ids_rn[:, 0], self._is_sound_rn[:, place]
        self._kept = np.where(self._ended, self._kept, self._runs.last_tokens[used])
        self._runs.last_tokens[used] = self._kept
        self._ended |= self._end(self._kept)
        self._runs.have_ended[used] = self._ended
        self._place += 1
        if verdict == StepDirective.LAST:
            self.close()

    def _end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        is_ending: NDArray[np.bool_] = (tokens[:, None] == self._ending_ids_rx).any(axis=1)
        return is_ending


@dataclass(frozen=True, slots=True)
class FakeInterrupt:
    """A `jpaged.engine.executor.DecodeInterrupt`."""

    feed: FakeFeed

    def interrupt(self) -> None:
        self.feed.interrupt()

    def close(self) -> int:
        return self.feed.num_steps


RunStep = Callable[[StepInputs, SamplingInputs], StepOutputs]
"""A forward and a sample."""


@dataclass(slots=True)
class _RowStates:
    """Slots of a row's recurrent state in rounds.

    Attributes:
        source: slot that the next round reads.
        slots: those that it writes, for each token.
    """

    source: int
    slots: list[int]

    def at(self, place: int) -> tuple[int, int]:
        """Return the slots that a token of a round reads and writes."""
        return (self.slots[place - 1] if place else self.source), self.slots[place]

    def accept(self, num_tokens: int) -> None:
        """Continue after the first tokens of a round."""
        if num_tokens:
            last = num_tokens - 1
            self.slots[0], self.slots[last] = self.slots[last], self.slots[0]
            self.source = self.slots[0]


@dataclass(frozen=True, slots=True)
class FakeRounds:
    """A dispatch of rounds.

    Attributes:
        inputs: of the first round; row i has token i.
        first_ids: last token of each row, whose keys are not in the pool.
        ending_token_ids_rx: ids that end each row.
        num_left_r: tokens that each row may still sample.
        num_proposed: proposals per round.
    """

    inputs: StepInputs
    sampling: SamplingInputs
    first_ids: list[int]
    ending_token_ids_rx: I32
    num_left_r: I32
    num_proposed: int
    block_size: int

    def run(self, run_step: RunStep, has_ended: list[bool], num_rounds: int) -> StepOutputs:
        """Run every row to its end, or to the end of the rounds."""
        num_rows = len(self.sampling.rows_r)
        counts, proposed, accepted = (np.zeros((MAX_NUM_ROUNDS, num_rows), np.int32) for _ in range(3))
        tokens: list[list[tuple[int, bool]]] = [[] for _ in range(num_rows)]
        states = [self._states(row) for row in range(num_rows)]
        for row in range(self.inputs.num_rows):
            left = 0 if has_ended[row] else int(self.num_left_r[row])
            for number in range(num_rounds):
                if left <= 0:
                    break
                proposed[number, row] = min(self.num_proposed, left - 1)
                position = int(self.inputs.positions_t[row]) + len(tokens[row])
                accepted[number, row] = min(accepted_behind(position, self.num_proposed), left - 1)
                for place in range(accepted[number, row] + 1):
                    before = [token_id for token_id, _ in tokens[row]]
                    tokens[row].append(self._token(run_step, row, before, states[row].at(place)))
                    counts[number, row] += 1
                    left -= 1
                    if tokens[row][-1][0] in self.ending_token_ids_rx[row]:
                        left = 0
                        break
                states[row].accept(int(counts[number, row]))
        width = max(1, *map(len, tokens))
        token_ids_rn, is_sound_rn = np.zeros((num_rows, width), np.int32), np.ones((num_rows, width), np.bool_)
        for row, found in enumerate(tokens):
            for place, (token_id, is_sound) in enumerate(found):
                token_ids_rn[row, place], is_sound_rn[row, place] = token_id, is_sound
        was_run = counts.any(axis=1)
        state_slots_r = np.array([one.slots[0] for one in states], np.int32)
        num_rounds = int(was_run.sum())
        speculated = Speculated(counts.sum(axis=0, dtype=np.int32), proposed, accepted, num_rounds, state_slots_r)
        return StepOutputs(token_ids_rn, is_sound_rn, speculated=speculated)

    def _states(self, row: int) -> _RowStates:
        """Return the slots of a row's recurrent state."""
        slots_sk = self.inputs.draft_slots_sk
        if slots_sk is None or row >= self.inputs.num_rows:
            return _RowStates(0, [0] * (self.num_proposed + 1))
        slots = [int(self.inputs.state_slots_s[row]), *slots_sk[row].tolist()]
        return _RowStates(int(self.inputs.state_sources_s[row]), slots)

    def _token(self, run_step: RunStep, row: int, before: list[int], states: tuple[int, int]) -> tuple[int, bool]:
        """Return the token that a row samples after tokens of this dispatch, and whether its logits are finite.

        Args:
            states: slots that the row's recurrent state is read from and written to.
        """
        inputs, place = self.inputs, len(before)
        position = int(inputs.positions_t[row]) + place
        num_padded, num_rows = len(inputs.token_ids_t), len(inputs.kv_lens_s)

        def only(value: int, length: int) -> I32:
            return np.array([value, *[0] * (length - 1)], np.int32)

        blocks_g = inputs.block_tables_gsm[:, row, position // self.block_size]
        slots_gt = np.zeros_like(inputs.slots_gt)
        slots_gt[:, 0] = blocks_g * self.block_size + position % self.block_size
        tables_gsm = np.zeros_like(inputs.block_tables_gsm)
        tables_gsm[:, 0] = inputs.block_tables_gsm[:, row]
        starts_s1 = np.ones(num_rows + 1, np.int32)
        starts_s1[0] = 0
        step = dataclasses.replace(
            inputs,
            token_ids_t=only([self.first_ids[row], *before][-1], num_padded),
            is_prev_sampled_t=np.zeros(num_padded, np.bool_),
            prev_sampled_rows_t=np.zeros(num_padded, np.int32),
            positions_t=only(position, num_padded),
            rope_lens_t=only(max(position + 1, int(inputs.rope_lens_t[row])), num_padded),
            slots_gt=slots_gt,
            adapters_t=only(int(inputs.adapters_t[row]), num_padded),
            sample_tokens_s=np.zeros(num_rows, np.int32),
            query_starts_s1=starts_s1,
            kv_lens_s=only(position + 1, num_rows),
            block_tables_gsm=tables_gsm,
            num_rows=1,
            kv_begins_s=np.zeros(num_rows, np.int32),
            num_runs=0,
            num_tokens=1,
            state_sources_s=only(states[0], num_rows),
            state_slots_s=only(states[1], num_rows),
        )
        rows_r = self.sampling.rows_r[[row]]
        rows_r["positions_r"] += place
        outputs = run_step(step, SamplingInputs(rows_r))
        return outputs.token(0), bool(outputs.is_finite_rn[0, 0])


class FakeDraft:
    """State of a draft model: for each slot, the model's contents at the time when the draft ran the token.

    Raises if it runs other tokens than the model, or proposes after tokens that it has not run.

    Attributes:
        num_tokens: tokens that it has run outside rounds.
    """

    def __init__(self, geometry: Geometry, unwritten: int) -> None:
        self.num_tokens = 0
        self._geometry = geometry
        self._pool: NDArray[np.int64] = np.full(
            ((geometry.num_blocks + 1) * geometry.block_size, 2), unwritten, np.int64
        )

    def move(self, moves: BlockMoves) -> None:
        """Copy blocks; swaps do not move the draft's contents."""
        if moves.move is Move.COPY:
            blocks = self._pool.reshape(-1, self._geometry.block_size, 2)
            blocks[moves.destinations] = blocks[moves.sources]

    def show(self, inputs: StepInputs, pool: NDArray[np.int64]) -> None:
        """Run tokens that the model has in its pool."""
        if len(inputs.token_ids_t) not in self._geometry.buckets.tokens or inputs.is_prev_sampled_t.any():
            raise InternalError(f"no program draft[{len(inputs.token_ids_t)}] of known tokens")
        used = slice(0, inputs.num_tokens)
        slots_t = inputs.slots_gt[self._geometry.windows.index(None), used]
        if not np.array_equal(pool[slots_t, 0], inputs.token_ids_t[used]):
            shown = inputs.token_ids_t[used]
            raise InternalError(f"the draft is shown {shown}; the model has computed {pool[slots_t, 0]}")
        self._pool[slots_t] = pool[slots_t]
        self.num_tokens += inputs.num_tokens

    def begin(self, inputs: StepInputs, pool: NDArray[np.int64]) -> None:
        """Check that the draft has run all tokens before each row's."""
        for row in range(inputs.num_rows):
            slots = self._slots(inputs, row, 0, int(inputs.positions_t[row]))
            if not np.array_equal(self._pool[slots], pool[slots]):
                raise InternalError(f"the draft has not seen all tokens before row {row}: {pool[slots, 0]}")

    def end(self, inputs: StepInputs, num_tokens_r: I32, pool: NDArray[np.int64]) -> None:
        """Record that the draft has run each row's new tokens."""
        for row, start in enumerate(inputs.positions_t[: inputs.num_rows].tolist()):
            slots = self._slots(inputs, row, start, start + int(num_tokens_r[row]))
            self._pool[slots] = pool[slots]

    def _slots(self, inputs: StepInputs, row: int, begin: int, end: int) -> NDArray[np.int64]:
        positions = np.arange(begin, end)
        ids_m, block_size = inputs.block_tables_gsm[self._geometry.windows.index(None), row], self._geometry.block_size
        return np.asarray(ids_m[positions // block_size] * block_size + positions % block_size, np.int64)


def accepted_behind(position: int, num_proposed: int) -> int:
    """Return how many proposals after a token at a position are accepted."""
    return (position * 7 + position // 3) % (num_proposed + 1)


class VirtualClock:
    """Returns the time in seconds when called; only `advance` moves it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time runs forward: {seconds} s is below 0")
        self._now_s += seconds
