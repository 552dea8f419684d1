"""Several steps of one schedule between which masks are made.

where the device can be fed                        elsewhere
device   f0 s0 f1 s1 f2 s2     one program         device   f0 s0 | f1 s1 | f2 s2     two programs a step
host       m0 ── m1 ── m2      masks alone         host       m0 ─ take in, start, m1 ─ ...

What is fed is taken in as any dispatch of several steps is: when all of it is there, and the next is under way.
Meanwhile grammars are ahead of the tokens that sequences have.
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
    """Serves the steps of one engine. Called by its thread alone."""

    executor: Executor[Any, Any]
    intake: Intake
    scheduler: Scheduler
    clock: Callable[[], float]
    _waited_s: float = 0.0
    _before: FedSteps | None = None
    _unread: Any = None  # the last dispatch that was fed, whose tokens are known

    def take_waited_s(self) -> float:
        """Seconds of waiting for the device since this was asked last."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def go_on(self, started: Started, newest: Any) -> Any:
        """Starts the further steps of a schedule whose steps go in turn; the last one's results are left to collect.

        forward 1 ──> device      sample 0 is under way
        collect 0 <── tokens, which are taken in
        sample 1  ──> device      with masks behind those tokens

        It is over where a row has ended, so that whoever waits may come in.

        Args:
            newest: the first step, whose sample is under way.

        Returns:
            the last one.
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
        """Begins with a dispatch: with its first masks, where all rows go on from the one before.

        So the device need not wait until that one is taken in.
        """
        steps, before, waiting_since_s = FedSteps(fed, self.intake, self.clock), self._before, self.clock()
        if before is not None and not before.are_over and before.finish() and before.all_go_on:
            self._waited_s += self.clock() - waiting_since_s
            steps.give_first()
        self._before = steps
        return steps

    def feed(self, steps: FedSteps) -> tuple[Dispatched, bool]:
        """Gives each step of a dispatch its masks; all that came before must be taken in.

        The dispatch is over where a row has ended, so that whoever waits may come in.

        Returns:
            the dispatch, whose last step may still be under way; and whether no row is known to have ended in it: else
            it is to be taken in before anything else is decided.
        """
        fed, num_steps = steps.fed, steps.serve()
        self.scheduler.has_made(fed.schedule, num_steps)
        self._waited_s += steps.waited_s
        if self._unread is not None:  # only now, for a program that waits for masks may keep others waiting
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
            return self.executor.collect(steps.fed.handle)  # which says what went wrong

        return results


class FedSteps:
    """The steps of one dispatch on their way.

    Attributes:
        are_over: no further step is made, and all that were made are here.
        all_go_on: no row is known to have ended, nor any grammar to have failed.
        waited_s: for their tokens.
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
        """What was drawn."""
        token_ids, is_sound = zip(*self._columns, strict=True)
        return StepOutputs(np.stack(token_ids, axis=1), np.stack(is_sound, axis=1))

    @property
    def _mask_rw(self) -> I32:
        edits = self.fed.sampling.edits
        if edits is None or edits.mask_rw is None:
            raise InternalError("steps wait for masks, and there are none")
        return edits.mask_rw

    def give_first(self) -> None:
        """Gives the first step its masks before what came before is taken in, if nothing is wrong with any."""
        if self._fill(self._mask_rw):
            self.fed.feed.give(self._mask_rw, Verdict.GOES_ON)
            self._has_first = True

    def serve(self) -> int:
        """Gives masks until no further step is to be made; how many are made.

        Where that is all of them, the tokens of the last are still to come.
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
                self.are_over = True  # what is wrong with a grammar shows where the next step begins
                feed.close()
                return num_made
            verdict = Verdict.GOES_ON if are_live and self.all_go_on else Verdict.LAST
        raise InternalError("a dispatch has no steps")

    def finish(self) -> bool:
        """Waits for the last step; False where its tokens do not come."""
        if not self.are_over:
            self._take()
            self.are_over = True
            self.fed.feed.close()
        return len(self._columns) == self.fed.schedule.num_steps

    def _take(self) -> bool:
        """Waits for the step that has its masks, and moves the grammars over its tokens; False where none can go on."""
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
        """Moves the grammars of those that have not ended."""
        bound = [row for row in self._bound if row.sequence.is_live and not self._has_ended_r[row.place]]
        if len(bound) < len(self._bound):
            self._bound, self._batch = bound, self._grammars.batch(bound)
        return not bound or self._grammars.went_on(bound, self._batch, token_ids_r)

    def _fill(self, mask_rw: I32) -> bool:
        return not self._bound or self._grammars.fill(self._bound, self._batch, mask_rw)
