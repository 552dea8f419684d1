"""Runners of dispatches: one for each kind of schedule. Each starts a batch, whose results are processed later.

kind                 programs                     masks of grammars
single step          f s                          between f and s, from the tokens of the previous batch
several steps        one, which an arrival ends   none
masked steps         one, with a mask channel     m0 ── m1 ── m2      masks alone
alternating steps    f s | f s | f s              m0 ─ process, start, m1 ─ ...
draft-model rounds   one                          none

f is the model's forward pass, s the sampling of its tokens. A masked multi-step dispatch is processed like any dispatch
of several steps: when all its tokens have arrived and the next dispatch is in flight. Until then the grammars are ahead
of the tokens of their sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from jpaged.engine.executor import (
    I32,
    Bool,
    DecodeInterrupt,
    Executor,
    Geometry,
    MaskChannel,
    SamplingInputs,
    StepDirective,
    StepInputs,
    StepOutputs,
)
from jpaged.engine.executor.aux_io import AuxOutputs
from jpaged.engine.results import ResultProcessor
from jpaged.engine.scheduler.decode_batch import StepKind
from jpaged.engine.scheduler.output import (
    SchedulerOutput,
    StepAux,
    build_aux_inputs,
    build_ending_ids,
    build_num_left,
    build_sampling_inputs,
    build_step_inputs,
)
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.speculative.draft_model import DraftModelSpeculation
from jpaged.engine.stats import StepTimer
from jpaged.engine.structured_output import ConstrainedRow, bound_rows
from jpaged.errors import InternalError


class ArrivalSignal:
    """Ends an interruptible dispatch when a request arrives.

    engine thread   reset ─ read the inbox ─ schedule ─ dispatch ─ arm ─ wait ─────── disarm
    other threads                  request: in the inbox, then `notify` ^      ^ or here: the dispatch ends

    `notify` sets the flag before it reads the armed dispatch, and `arm` sets the dispatch before it reads the flag, so
    one of the two interrupts it.
    """

    def __init__(self) -> None:
        self._interrupt: Callable[[], None] | None = None
        self._has_arrival = False

    def notify(self) -> None:
        """Interrupt the current dispatch, or the next one if none is armed. Called by any thread."""
        self._has_arrival = True
        if (interrupt := self._interrupt) is not None:
            interrupt()

    def reset(self) -> None:
        """Forget the arrivals so far, which the engine thread reads next."""
        self._has_arrival = False

    def arm(self, interrupt: Callable[[], None]) -> None:
        """Set the function that ends the current dispatch."""
        self._interrupt = interrupt
        if self._has_arrival:
            interrupt()

    def disarm(self) -> None:
        """Interrupt nothing from now on."""
        self._interrupt = None


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """A dispatch whose results have not been processed.

    Attributes:
        inputs: inputs of the first step.
        begin_s: when the host started to prepare it.
        handle: the executor's handle of the last program.
        wait: waits for the results and returns them; called once.
        process: processes the results, which arrived at this time.
        must_wait: the next step cannot be scheduled before the results are processed.
    """

    schedule: SchedulerOutput
    inputs: StepInputs
    begin_s: float
    handle: Any
    wait: Callable[[], StepOutputs]
    process: Callable[[SchedulerOutput, StepOutputs, float], None]
    must_wait: bool = False


class BatchRunner(Protocol):
    """Starter of the batches of one kind of schedule."""

    def start(self, schedule: SchedulerOutput, begin_s: float) -> InFlightBatch:
        """Dispatch the rows of a schedule; its block moves are dispatched.

        Args:
            begin_s: when the host started to prepare the batch.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """Parts of the engine that the runners share.

    Attributes:
        results: processes sampled tokens.
        finish_in_flight: waits for the batch in flight, if any, and processes it.
        arrivals: ends an interruptible dispatch when a request arrives.
    """

    executor: Executor[Any, Any]
    scheduler: Scheduler
    results: ResultProcessor
    timer: StepTimer
    clock: Callable[[], float]
    eos_token_ids: frozenset[int]
    finish_in_flight: Callable[[], None]
    arrivals: ArrivalSignal

    def build_inputs(self, schedule: SchedulerOutput) -> tuple[StepInputs, SamplingInputs]:
        """Return the inputs of a schedule that runs as one program.

        Both are padded to the same size, although the executor may add programs at any time.
        """
        geometry = self.executor.geometry
        return build_step_inputs(schedule, geometry), self.build_sampling(schedule, geometry)

    def build_sampling(self, schedule: SchedulerOutput, geometry: Geometry) -> SamplingInputs:
        """Return the sampling parameters of the rows of a schedule."""
        logits_processors = self.scheduler.rows.logits_processors
        return build_sampling_inputs(schedule, geometry, self.eos_token_ids, logits_processors)

    def start_forward(self, inputs: StepInputs) -> Any:
        """Dispatch the forward pass of a step. Return its output, for the sample."""
        self.timer.end_idle()
        hidden = self.executor.forward(inputs)
        self.timer.set_newest(None)  # the newest program cannot be polled
        return hidden

    def apply_masks(self, schedule: SchedulerOutput, sampling: SamplingInputs) -> list[ConstrainedRow]:
        """Process the batch in flight and apply the masks that depend on its tokens. Return the rows with grammars."""
        bound = bound_rows(schedule)
        if bound:
            self.finish_in_flight()
            self.results.apply_grammar_masks(schedule, bound, sampling)
        return bound

    def start_sample(self, hidden: Any, sampling: SamplingInputs) -> Any:
        """Dispatch the sample of a step. Return its handle."""
        handle = self.executor.sample(hidden, sampling)
        self.timer.set_newest(handle)
        return handle


@dataclass(frozen=True, slots=True)
class SingleStepRunner:
    """Runner of single steps: a forward and a sample, with masks and aux outputs if rows need them."""

    context: RunnerContext

    def start(self, schedule: SchedulerOutput, begin_s: float) -> InFlightBatch:
        context, geometry = self.context, self.context.executor.geometry
        inputs = build_step_inputs(schedule, geometry)
        hidden = context.start_forward(inputs)
        sampling = context.build_sampling(schedule, geometry)
        aux_inputs = build_aux_inputs(schedule, geometry) if schedule.has_aux_outputs else ()
        pending = [(aux, context.executor.compute_aux(hidden, aux.inputs)) for aux in aux_inputs]
        if schedule.has_grammars:
            context.apply_masks(schedule, sampling)
        handle = context.start_sample(hidden, sampling)
        wait = partial(context.executor.collect, handle)
        process = context.results.process_drafts if schedule.drafts else context.results.process_step
        if pending:
            wait = partial(self._wait, pending, wait)
        return InFlightBatch(schedule, inputs, begin_s, handle, wait, process, must_wait=bool(schedule.drafts))

    def _wait(
        self, pending: list[tuple[StepAux, Callable[[], AuxOutputs]]], wait: Callable[[], StepOutputs]
    ) -> StepOutputs:
        """Wait for the aux outputs as well, and pass them to the output processor."""
        aux_outputs = [(aux, collect()) for aux, collect in pending]
        outputs = wait()
        self.context.results.output.aux_outputs.take(aux_outputs)
        return outputs


@dataclass(frozen=True, slots=True)
class MultiStepRunner:
    """Runner of several decode steps as one program."""

    context: RunnerContext

    def start(self, schedule: SchedulerOutput, begin_s: float) -> InFlightBatch:
        context, executor = self.context, self.context.executor
        inputs, sampling = context.build_inputs(schedule)
        ending_ids_rx = build_ending_ids(schedule, len(sampling.rows_r))
        context.timer.end_idle()
        is_interruptible = schedule.decodes.is_interruptible
        if is_interruptible:
            handle, interrupt = executor.decode_interruptibly(inputs, sampling, ending_ids_rx, schedule.num_steps)
            context.arrivals.arm(interrupt.interrupt)
            wait = partial(self._wait, schedule, handle, interrupt)
        else:
            handle = executor.decode(inputs, sampling, ending_ids_rx, schedule.num_steps)
            wait = partial(executor.collect, handle)
        context.timer.set_newest(handle)
        process = context.results.process_steps
        return InFlightBatch(schedule, inputs, begin_s, handle, wait, process, must_wait=is_interruptible)

    def _wait(self, schedule: SchedulerOutput, handle: Any, interrupt: DecodeInterrupt) -> StepOutputs:
        """Wait for an interruptible dispatch, and drop the steps that were not executed."""
        context, num_planned = self.context, schedule.num_steps
        try:
            outputs = context.executor.collect(handle)
        finally:
            context.arrivals.disarm()
            num_executed = interrupt.close()
        # None is executed if the previous dispatch, whose results are known only now, ended all rows.
        context.scheduler.truncate_steps(schedule, max(1, num_executed))
        context.results.stats.discard_steps(schedule, num_planned - schedule.num_steps)
        return outputs


@dataclass(frozen=True, slots=True)
class AlternatingRunner:
    """Runner of several decode steps with masks between them, two programs each.

    forward 1 ──> device      sample 0 is in flight
    collect 0 <── tokens, which are processed
    sample 1  ──> device      with masks after those tokens

    It stops early if a row has ended, so that a waiting request can be admitted.
    """

    context: RunnerContext

    def start(self, schedule: SchedulerOutput, begin_s: float) -> InFlightBatch:
        context, executor, results = self.context, self.context.executor, self.context.results
        geometry = executor.geometry
        first = inputs = build_step_inputs(schedule, geometry)
        hidden = context.start_forward(first)
        sampling = context.build_sampling(schedule, geometry)
        bound = context.apply_masks(schedule, sampling)
        handle = context.start_sample(hidden, sampling)
        num_dispatched = 1
        for inputs in first.further(schedule.num_steps, geometry.block_size):
            sampling = sampling.of_next_step()
            hidden = context.start_forward(inputs)
            waiting_since_s = context.clock()
            outputs = executor.collect(handle)
            now_s = context.clock()
            context.timer.add_wait(now_s - waiting_since_s)
            results.process_step(schedule, outputs, now_s, num_dispatched - 1)
            results.apply_grammar_masks(schedule, bound, sampling)
            handle = context.start_sample(hidden, sampling)
            num_dispatched += 1
            if len(context.scheduler.rows) < schedule.num_rows:
                break
        context.scheduler.truncate_steps(schedule, num_dispatched)
        return InFlightBatch(schedule, first, begin_s, handle, partial(executor.collect, handle), self._process_last)

    def _process_last(self, schedule: SchedulerOutput, outputs: StepOutputs, now_s: float) -> None:
        self.context.results.process_step(schedule, outputs, now_s, schedule.num_steps - 1)


class MaskedMultiStepRunner:
    """Runner of several decode steps as one program, which waits for masks before each sample.

    It stops early if a row has ended, so that a waiting request can be admitted.
    """

    def __init__(self, context: RunnerContext) -> None:
        self._context = context
        self._previous: MaskedDispatch | None = None
        self._uncollected: Any = None  # handle of the last masked dispatch, whose tokens are known

    def start(self, schedule: SchedulerOutput, begin_s: float) -> InFlightBatch:
        context, executor = self._context, self._context.executor
        inputs, sampling = context.build_inputs(schedule)
        ending_ids_rx = build_ending_ids(schedule, len(sampling.rows_r))
        context.timer.end_idle()
        handle, feed = executor.decode_with_masks(inputs, sampling, ending_ids_rx, schedule.num_steps)
        context.timer.set_newest(handle)
        try:
            steps = MaskedDispatch(schedule, feed, sampling, ending_ids_rx, context.results, context.clock)
            self._send_first_masks(steps)
            context.finish_in_flight()
            context.scheduler.truncate_steps(schedule, steps.serve())
            context.timer.add_wait(steps.waited_s)
            if self._uncollected is not None:  # only now, because a program that waits for masks may block others
                executor.collect(self._uncollected)
            self._uncollected = handle
        except BaseException:
            feed.close()  # otherwise the program would wait forever
            raise
        wait, process = partial(self._wait, steps, handle), context.results.process_steps
        # A row that is known to have ended must not be scheduled again.
        return InFlightBatch(schedule, inputs, begin_s, handle, wait, process, must_wait=steps.is_done)

    def _send_first_masks(self, steps: MaskedDispatch) -> None:
        """Send the first masks if all rows of the previous dispatch continue.

        Then the device need not wait until the previous dispatch is processed.
        """
        previous, waiting_since_s = self._previous, self._context.clock()
        if previous is not None and not previous.is_done and previous.finish() and previous.all_continue:
            self._context.timer.add_wait(self._context.clock() - waiting_since_s)
            steps.send_first_masks()
        self._previous = steps

    def _wait(self, steps: MaskedDispatch, handle: Any) -> StepOutputs:
        if self._previous is steps:
            self._previous = None
        if steps.finish():
            return steps.outputs
        self._uncollected = None
        return self._context.executor.collect(handle)  # which raises the error


@dataclass(frozen=True, slots=True)
class DraftModelRunner:
    """Runner of draft-model rounds, after the tokens that the draft model has not seen."""

    context: RunnerContext
    rounds: DraftModelSpeculation

    def start(self, schedule: SchedulerOutput, begin_s: float) -> InFlightBatch:
        context, executor = self.context, self.context.executor
        inputs, sampling = context.build_inputs(schedule)
        num_padded, num_rounds = len(sampling.rows_r), schedule.decodes.num_rounds
        ending_ids_rx, num_left_r = build_ending_ids(schedule, num_padded), build_num_left(schedule, num_padded)
        unseen = [*self.rounds.begin(schedule, inputs, num_left_r)]
        context.timer.end_idle()
        handle = executor.speculate(inputs, sampling, ending_ids_rx, num_left_r, num_rounds, unseen)
        context.timer.set_newest(handle)
        wait = partial(executor.collect, handle)
        return InFlightBatch(schedule, inputs, begin_s, handle, wait, context.results.process_rounds, must_wait=True)


def make_runners(context: RunnerContext, rounds: DraftModelSpeculation | None) -> dict[StepKind, BatchRunner]:
    """Return the runner of each kind of schedule.

    Args:
        rounds: controller of draft-model rounds; None without a draft model.
    """
    runners: dict[StepKind, BatchRunner] = {
        StepKind.SINGLE_STEP: SingleStepRunner(context),
        StepKind.MULTI_STEP: MultiStepRunner(context),
        StepKind.MASKED_MULTI_STEP: MaskedMultiStepRunner(context),
        StepKind.ALTERNATING: AlternatingRunner(context),
    }
    if rounds is not None:
        runners[StepKind.DRAFT_MODEL] = DraftModelRunner(context, rounds)
    return runners


class MaskedDispatch:
    """Steps of one dispatch in flight that wait for masks.

    Attributes:
        is_done: no further step is executed, and the tokens of all executed steps have arrived.
        all_continue: no row is known to have ended, and no grammar has failed.
        waited_s: seconds of waiting for their tokens.
    """

    def __init__(
        self,
        schedule: SchedulerOutput,
        feed: MaskChannel,
        sampling: SamplingInputs,
        ending_ids_rx: I32,
        results: ResultProcessor,
        clock: Callable[[], float],
    ) -> None:
        self.is_done, self.all_continue, self.waited_s = False, True, 0.0
        self._schedule, self._feed, self._sampling, self._ending_ids_rx = schedule, feed, sampling, ending_ids_rx
        self._has_sent_first_masks = False
        self._results, self._grammars, self._clock = results, results.grammars, clock
        self._bound = bound_rows(schedule)
        self._batch = self._grammars.batch(self._bound)
        self._has_ended_r = np.zeros(schedule.num_rows, np.bool_)
        self._columns = list[tuple[I32, Bool]]()

    @property
    def outputs(self) -> StepOutputs:
        """The sampled tokens of all steps."""
        token_ids, is_sound = zip(*self._columns, strict=True)
        return StepOutputs(np.stack(token_ids, axis=1), np.stack(is_sound, axis=1))

    @property
    def _mask_rw(self) -> I32:
        edits = self._sampling.edits
        if edits is None or edits.mask_rw is None:
            raise InternalError("the steps wait for masks, but there are none")
        return edits.mask_rw

    def send_first_masks(self) -> None:
        """Send the first step its masks before the previous dispatch is processed, if every mask is valid."""
        if self._fill(self._mask_rw):
            self._feed.give(self._mask_rw, StepDirective.CONTINUE)
            self._has_sent_first_masks = True

    def serve(self) -> int:
        """Send masks until no further step is executed. Return the number of executed steps.

        If every step of the schedule is executed, the tokens of the last one may not have arrived yet.
        """
        schedule, feed, mask_rw = self._schedule, self._feed, self._mask_rw
        are_live = all(one.is_live for one in schedule.sequences)
        directive = StepDirective.CONTINUE
        if not self._has_sent_first_masks:
            self._results.apply_grammar_masks(schedule, self._bound, self._sampling)
            directive = StepDirective.CONTINUE if are_live else StepDirective.LAST
            feed.give(mask_rw, directive)
        for num_made in range(1, schedule.num_steps + 1):
            if num_made > 1:
                feed.give(mask_rw, directive)
            if num_made == schedule.num_steps and directive == StepDirective.CONTINUE:
                return num_made
            may_continue = self._take()
            if directive == StepDirective.LAST or not may_continue or not self._fill(mask_rw):
                self.is_done = True  # the error of a grammar is raised at the next step
                feed.close()
                return num_made
            directive = StepDirective.CONTINUE if are_live and self.all_continue else StepDirective.LAST
        raise InternalError("the dispatch has no steps")

    def finish(self) -> bool:
        """Wait for the last step. Return False if its tokens do not arrive."""
        if not self.is_done:
            self._take()
            self.is_done = True
            self._feed.close()
        return len(self._columns) == self._schedule.num_steps

    def _take(self) -> bool:
        """Wait for the tokens of the current step and advance the grammars. Return False if no row can continue."""
        waiting_since_s = self._clock()
        sampled = self._feed.wait()
        self.waited_s += self._clock() - waiting_since_s
        if sampled is None:
            return False
        self._columns.append(sampled)
        used = slice(0, len(self._has_ended_r))
        token_ids_r, is_sound_r = sampled[0][used], sampled[1][used]
        self._has_ended_r |= (token_ids_r[:, None] == self._ending_ids_rx[used]).any(axis=1) | ~is_sound_r
        may_continue = self._advance_grammars(token_ids_r)
        self.all_continue = may_continue and not self._has_ended_r.any()
        return may_continue and not self._has_ended_r.all()

    def _advance_grammars(self, token_ids_r: I32) -> bool:
        """Advance the grammars of rows that have not ended."""
        bound = [row for row in self._bound if row.sequence.is_live and not self._has_ended_r[row.device_row]]
        if len(bound) < len(self._bound):
            self._bound, self._batch = bound, self._grammars.batch(bound)
        return not bound or self._grammars.accept_masked(bound, self._batch, token_ids_r)

    def _fill(self, mask_rw: I32) -> bool:
        return not self._bound or self._grammars.fill(self._bound, self._batch, mask_rw)
