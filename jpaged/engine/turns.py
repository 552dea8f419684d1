"""Several steps of one schedule between which masks are made.

where the device can be fed                        elsewhere
device   f0 s0 f1 s1 f2 s2     one program         device   f0 s0 | f1 s1 | f2 s2     two programs a step
host       m0 ── m1 ── m2      masks alone         host       m0 ─ take in, start, m1 ─ ...

What is fed is taken in as any dispatch of several steps is: when all of it is there. Grammars are ahead of the tokens
that sequences have, meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jpaged.engine.dispatches import Dispatched, Fed, Started
from jpaged.engine.executor import Executor, Verdict
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

    def feed(self, fed: Fed) -> tuple[Dispatched, bool]:
        """Gives each step of a dispatch its masks, and waits for the last; all that came before must be taken in.

        The dispatch is over where a row has ended, so that whoever waits may come in.

        Returns:
            the dispatch with its results, and whether all rows go on behind it: else it is to be taken in at once.
        """
        num_steps, go_on = self._serve(fed)
        fed.feed.close()  # or the program would wait for more
        waiting_since_s = self.clock()
        outputs = self.executor.collect(fed.handle)
        now_s = self.clock()
        self._waited_s += now_s - waiting_since_s
        self.scheduler.has_made(fed.schedule, num_steps)
        return Dispatched(fed.schedule, fed.begin_s, fed.handle, outputs=(outputs, now_s)), go_on

    def _serve(self, fed: Fed) -> tuple[int, bool]:
        """Gives masks until no further step is to be made; how many were made, and whether all rows go on."""
        schedule, edits = fed.schedule, fed.sampling.edits
        if edits is None or edits.mask_rw is None:
            raise InternalError("steps wait for masks, and there are none")
        self.intake.narrow(schedule, fed.bound, fed.sampling)
        mask_rw, used, bound = edits.mask_rw, slice(0, schedule.num_rows), fed.bound
        has_ended_r = np.zeros(schedule.num_rows, np.bool_)
        verdict = Verdict.GOES_ON
        for num_made in range(1, schedule.num_steps + 1):
            fed.feed.give(mask_rw, verdict)
            waiting_since_s = self.clock()
            drawn = fed.feed.wait()
            self._waited_s += self.clock() - waiting_since_s
            if drawn is None:
                return num_made, False
            token_ids_r, is_sound_r = drawn[0][used], drawn[1][used]
            has_ended_r |= (token_ids_r[:, None] == fed.ending_ids_rx[used]).any(axis=1) | ~is_sound_r
            bound = [row for row in bound if row.sequence.is_live and not has_ended_r[row.place]]
            may_go_on = self.intake.grammars.went_on(bound, token_ids_r)
            go_on = may_go_on and not has_ended_r.any()
            if verdict == Verdict.LAST or num_made == schedule.num_steps or has_ended_r.all():
                return num_made, go_on
            if not may_go_on or not self.intake.grammars.fill(bound, mask_rw):
                return num_made, False  # what is wrong shows where the next step begins
            verdict = Verdict.GOES_ON if go_on else Verdict.LAST
        raise InternalError("a dispatch has no steps")
