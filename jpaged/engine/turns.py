"""Several steps of one schedule with grammar masks between them.

with a mask channel to the device                  without
device   f0 s0 f1 s1 f2 s2     one program         device   f0 s0 | f1 s1 | f2 s2     two programs a step
host       m0 ── m1 ── m2      masks alone         host       m0 ─ process, start, m1 ─ ...

A fed dispatch is processed like any dispatch of several steps: when all its tokens have arrived and the next dispatch
is in flight. Until then the grammars are ahead of the tokens of their sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jpaged.engine.dispatches import Dispatched, Fed, Started
from jpaged.engine.executor import I32, Bool, Executor, StepOutputs, Verdict
from jpaged.engine.intake import Intake
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.errors import InternalError


@dataclass(slots=True)
class Turns:
    """Runs multi-step dispatches with masks for one engine. Called by the engine thread alone."""

    executor: Executor[Any, Any]
    intake: Intake
    scheduler: Scheduler
    clock: Callable[[], float]
    _waited_s: float = 0.0
    _before: FedSteps | None = None
    _unread: Any = None  # the last fed dispatch, whose tokens are known

    def take_waited_s(self) -> float:
        """Return the seconds of waiting for the device since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def go_on(self, started: Started, newest: Any) -> Any:
        """Dispatch the further steps of an alternating schedule. The caller collects the last one.

        forward 1 ──> device      sample 0 is in flight
        collect 0 <── tokens, which are processed
        sample 1  ──> device      with masks after those tokens

        It stops early if a row has ended, so that a waiting request can be admitted.

        Args:
            newest: handle of the first step, whose sample is in flight.

        Returns:
            the handle of the last step.
        """
        schedule, sampling = started.schedule, started.sampling
        further = started.inputs.further(schedule.num_steps, self.executor.geometry.block_size)
        step = 0
        for step, inputs in enumerate(further, start=1):
            sampling = sampling.of_next_step()
            hidden = self.executor.forward(inputs)
            waiting_since_s = self.clock()
            outputs = self.executor.collect(newest)
            now_s = self.clock()
            self._waited_s += now_s - waiting_since_s
            self.intake.take_first(schedule, step - 1, outputs, now_s)
            self.intake.narrow(schedule, started.bound, sampling)
            newest = self.executor.sample(hidden, sampling)
            if len(self.scheduler.rows) < schedule.num_rows:
                break
        self.scheduler.has_made(schedule, step + 1)
        return newest

    def begin(self, fed: Fed) -> FedSteps:
        """Begin a fed dispatch: send its first masks if all rows of the previous one continue.

        Then the device need not wait until the previous dispatch is processed.
        """
        steps, before, waiting_since_s = FedSteps(fed, self.intake, self.clock), self._before, self.clock()
        if before is not None and not before.are_over and before.finish() and before.all_go_on:
            self._waited_s += self.clock() - waiting_since_s
            steps.give_first()
        self._before = steps
        return steps

    def feed(self, steps: FedSteps) -> tuple[Dispatched, bool]:
        """Send each step of a dispatch its masks; all earlier dispatches must have been processed.

        The dispatch stops early if a row has ended, so that a waiting request can be admitted.

        Returns:
            the dispatch, whose last step may still be in flight; and True if no row is known to have ended in it. If
            False, the caller must process it before it decides anything else.
        """
        fed, num_steps = steps.fed, steps.serve()
        self.scheduler.has_made(fed.schedule, num_steps)
        self._waited_s += steps.waited_s
        if self._unread is not None:  # only now, because a program that waits for masks may block others
            self.executor.collect(self._unread)
        self._unread = fed.handle
        return Dispatched(fed.schedule, fed.begin_s, fed.handle, results=self._results_of(steps)), not steps.are_over

    def _results_of(self, steps: FedSteps) -> Callable[[], StepOutputs]:
        def results() -> StepOutputs:
            if self._before is steps:
                self._before = None
            if steps.finish():
                return steps.outputs
            self._unread = None
            return self.executor.collect(steps.fed.handle)  # which raises the error

        return results


class FedSteps:
    """Fed steps of one dispatch in flight.

    Attributes:
        are_over: no further step is executed, and the tokens of all executed steps have arrived.
        all_go_on: no row is known to have ended, and no grammar has failed.
        waited_s: seconds of waiting for their tokens.
    """

    def __init__(self, fed: Fed, intake: Intake, clock: Callable[[], float]) -> None:
        self.fed, self.are_over, self.all_go_on, self.waited_s = fed, False, True, 0.0
        self._has_first = False
        self._intake, self._grammars, self._clock = intake, intake.grammars, clock
        self._bound, self._batch = fed.bound, intake.grammars.batch(fed.bound)
        self._has_ended_r = np.zeros(fed.schedule.num_rows, np.bool_)
        self._columns = list[tuple[I32, Bool]]()

    @property
    def outputs(self) -> StepOutputs:
        """The sampled tokens of all steps."""
        token_ids, is_sound = zip(*self._columns, strict=True)
        return StepOutputs(np.stack(token_ids, axis=1), np.stack(is_sound, axis=1))

    @property
    def _mask_rw(self) -> I32:
        edits = self.fed.sampling.edits
        if edits is None or edits.mask_rw is None:
            raise InternalError("the steps wait for masks, but there are none")
        return edits.mask_rw

    def give_first(self) -> None:
        """Send the first step its masks before the previous dispatch is processed, if every mask is valid."""
        if self._fill(self._mask_rw):
            self.fed.feed.give(self._mask_rw, Verdict.GOES_ON)
            self._has_first = True

    def serve(self) -> int:
        """Send masks until no further step is executed. Return the number of executed steps.

        If every step of the schedule is executed, the tokens of the last one may not have arrived yet.
        """
        schedule, feed, mask_rw = self.fed.schedule, self.fed.feed, self._mask_rw
        are_live = all(one.is_live for one in schedule.sequences)
        verdict = Verdict.GOES_ON
        if not self._has_first:
            self._intake.narrow(schedule, self._bound, self.fed.sampling)
            verdict = Verdict.GOES_ON if are_live else Verdict.LAST
            feed.give(mask_rw, verdict)
        for num_made in range(1, schedule.num_steps + 1):
            if num_made > 1:
                feed.give(mask_rw, verdict)
            if num_made == schedule.num_steps and verdict == Verdict.GOES_ON:
                return num_made
            may_go_on = self._take()
            if verdict == Verdict.LAST or not may_go_on or not self._fill(mask_rw):
                self.are_over = True  # the error of a grammar is raised at the next step
                feed.close()
                return num_made
            verdict = Verdict.GOES_ON if are_live and self.all_go_on else Verdict.LAST
        raise InternalError("the dispatch has no steps")

    def finish(self) -> bool:
        """Wait for the last step. Return False if its tokens do not arrive."""
        if not self.are_over:
            self._take()
            self.are_over = True
            self.fed.feed.close()
        return len(self._columns) == self.fed.schedule.num_steps

    def _take(self) -> bool:
        """Wait for the tokens of the current step and advance the grammars. Return False if no row can continue."""
        waiting_since_s = self._clock()
        drawn = self.fed.feed.wait()
        self.waited_s += self._clock() - waiting_since_s
        if drawn is None:
            return False
        self._columns.append(drawn)
        used = slice(0, len(self._has_ended_r))
        token_ids_r, is_sound_r = drawn[0][used], drawn[1][used]
        self._has_ended_r |= (token_ids_r[:, None] == self.fed.ending_ids_rx[used]).any(axis=1) | ~is_sound_r
        may_go_on = self._go_on(token_ids_r)
        self.all_go_on = may_go_on and not self._has_ended_r.any()
        return may_go_on and not self._has_ended_r.all()

    def _go_on(self, token_ids_r: I32) -> bool:
        """Advance the grammars of rows that have not ended."""
        bound = [row for row in self._bound if row.sequence.is_live and not self._has_ended_r[row.place]]
        if len(bound) < len(self._bound):
            self._bound, self._batch = bound, self._grammars.batch(bound)
        return not bound or self._grammars.went_on(bound, self._batch, token_ids_r)

    def _fill(self, mask_rw: I32) -> bool:
        return not self._bound or self._grammars.fill(self._bound, self._batch, mask_rw)
