"""Several steps of one schedule with grammar masks between them.

with a mask channel to the device                  without
device   f0 s0 f1 s1 f2 s2     one program         device   f0 s0 | f1 s1 | f2 s2     two programs a step
host       m0 ── m1 ── m2      masks alone         host       m0 ─ process, start, m1 ─ ...

A fed dispatch is processed like any dispatch of several steps: when all its tokens have arrived and the next dispatch
is in flight. Until then the grammars are ahead of the tokens of their sequences.

Records of in-flight work: started steps, and dispatches whose results are pending.

Guard against logits that are not finite: fails the requests and drops their cached blocks.

Processes the results of a step: checks, counts and publishes tokens; ends finished sequences and requests.

one step     several steps     drafts                 r0 r1 are rows of the step, d their sampled tokens
r0 -> d      step 0: r0 r1     the sequence's own row: d
r1 -> d      step 1: r0 r1     then its draft rows: d d, while drafts are accepted; draft-model rounds yield a count

Steps that alternate with masks arrive one by one: `take_first` processes them, except the last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jpaged.engine.executor import (
    I32,
    Bool,
    Executor,
    MaskFeed,
    SamplingInputs,
    Speculated,
    StepInputs,
    StepOutputs,
    Verdict,
)
from jpaged.engine.executor.steps import ToldOutputs
from jpaged.engine.grammars import BoundRow, Grammars
from jpaged.engine.kv.interface import KVMemory
from jpaged.engine.output.beam import advance_beams
from jpaged.engine.output.processor import OutputProcessor
from jpaged.engine.scheduling.editing import nothing_left
from jpaged.engine.scheduling.schedule import Sampled, Schedule, ScheduledRow
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.scheduling.tells import StepTell
from jpaged.engine.sequence import Group, Sequence
from jpaged.engine.speculation.drafts import Accepted
from jpaged.engine.stats import StepStats
from jpaged.errors import InternalError, JpagedError


class Dispatched(NamedTuple):
    """A dispatch whose results have not been processed: its schedule and the executor's handles.

    Attributes:
        results: waits for the results and returns them, if they do not come from `Executor.collect`.
    """

    schedule: Schedule
    inputs: StepInputs
    begin_s: float
    handle: Any
    tells: Iterable[tuple[StepTell, Callable[[], ToldOutputs]]] = ()
    results: Callable[[], StepOutputs] | None = None


class Started(NamedTuple):
    """A step whose forward pass is dispatched and whose sample is not.

    Attributes:
        bound: rows whose grammar masks depend on the tokens that the previous step sampled.
    """

    schedule: Schedule
    inputs: StepInputs
    begin_s: float
    hidden: Any
    sampling: SamplingInputs
    tells: Iterable[tuple[StepTell, Callable[[], ToldOutputs]]]
    bound: list[BoundRow]


class Fed(NamedTuple):
    """A dispatch of several steps that wait for masks."""

    schedule: Schedule
    inputs: StepInputs
    begin_s: float
    handle: Any
    feed: MaskFeed
    sampling: SamplingInputs
    ending_ids_rx: I32
    bound: list[BoundRow]

    @contextmanager
    def closed_where_it_fails(self) -> Iterator[None]:
        """Close the feed if the body raises; otherwise the program would wait forever."""
        try:
            yield
        except BaseException:
            self.feed.close()
            raise


logger = logging.getLogger(__name__)


class Soundness:
    """Checks the rows of each step. Creates last events and drops cached prefixes; the caller releases the groups.

        row   finite        its token is processed as usual, independent of the other rows
              not finite    of a live sequence that samples: its request fails, with all its sequences, and no other
                            of a finished sequence: its prefix is dropped, which was cached before this was known

    A row that computes a part of a prompt samples nothing and fails nothing: whether a request fails does not depend on
    its chunks. NaN in its keys or values makes the last token's logits NaN.

    All blocks that such a sequence has read are dropped together with those that it wrote: any of them may be the
    cause. Requests that share those blocks continue and are checked by their own logits. Pinned prefixes stay: their
    logits were finite when they were pinned. NaN in a free block is harmless, because slots are written before they are
    read.

    If the request's own fields ban every token, the error is the caller's: its prefix stays cached, and the request
    does not count as one with non-finite logits.

    Args:
        eos_token_ids: EOS tokens of the model.
        vocab_size: V, the width of the logits.
    """

    def __init__(
        self,
        memory: KVMemory,
        output: OutputProcessor,
        stats: StepStats,
        eos_token_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self._eos_token_ids, self._vocab_size = eos_token_ids, vocab_size
        self._memory = memory
        self._output = output
        self._stats = stats
        self._has_told = False

    def fail_unsound(self, schedule: Schedule, outputs: StepOutputs, step: int = 0) -> list[Group]:
        """Fail the requests whose rows are not finite. Return their groups, which still hold their blocks.

        Rows of draft tokens fail no request: `fail_rows` checks those whose tokens are accepted.

        Args:
            outputs: of one step of the dispatch.
            step: index of that step.
        """
        failed: dict[Group, None] = {}
        for row in np.flatnonzero(~outputs.is_sound_rn[: schedule.num_rows, 0]).tolist():
            scheduled = schedule.row_at(row, step)
            if not scheduled.sequence.is_live:
                self._forget(scheduled.sequence)
            elif scheduled.samples_token and scheduled.proposed is None and scheduled.group not in failed:
                failed[scheduled.group] = None
                self._fail(scheduled)
        return list(failed)

    def fail_rows(self, rows: Mapping[int, ScheduledRow], outputs: StepOutputs) -> list[Group]:
        """Like `fail_unsound` for the given rows, keyed by their index on the device."""
        failed: dict[Group, None] = {}
        for place, row in rows.items():
            if not outputs.is_sound_rn[place, 0] and row.group not in failed:
                failed[row.group] = None
                self._fail(row)
        return list(failed)

    def _fail(self, row: ScheduledRow) -> None:
        group = row.group
        token_ids = row.sequence.token_ids
        caused = nothing_left(group.request, token_ids, self._eos_token_ids, self._vocab_size)
        if caused is not None:
            self._output.fail(group, caused)
            return
        error = InternalError(
            f"the model's logits are not finite: no token {row.output_index + 1} can be sampled for sequence "
            f"{row.sequence.index}, after {row.start + row.num_tokens} tokens of context"
        )
        if not self._has_told:
            self._has_told = True
            logger.error("request %r: %s; later ones are counted but not logged", group.request.request_id, error)
        for sequence in group.sequences:
            self._forget(sequence)
        self._stats.count_not_finite()
        self._output.fail(group, error)

    def _forget(self, sequence: Sequence) -> None:
        if self._memory.prefixes is not None:
            self._memory.prefixes.forget(sequence)


@dataclass(slots=True)
class Intake:
    """Processes sampled tokens for one engine.

    Args:
        release: ends a request whose last event is known.
    """

    scheduler: Scheduler
    output: OutputProcessor
    soundness: Soundness
    grammars: Grammars
    stats: StepStats
    release: Callable[[Group], None]

    def take(self, schedule: Schedule, outputs: StepOutputs, now_s: float) -> None:
        """Process all tokens that a dispatch sampled."""
        if outputs.speculated is not None:
            self._take_rounds(schedule, outputs, outputs.speculated, now_s)
            return
        if schedule.decodes.is_in_turn:
            self._take_step(schedule, outputs, now_s, schedule.num_steps - 1)
            return
        if schedule.num_steps > 1:  # a fed dispatch has already advanced its grammars
            for step in range(schedule.num_steps):
                self._take_step(schedule, outputs.at(step), now_s, step)
            return
        if not schedule.drafts:
            self._take_step(schedule, outputs, now_s)
            return
        accepted = Accepted.of(schedule, outputs)
        self._take_step(schedule, outputs, now_s, going_on=accepted.beyond(0))
        for depth in range(1, accepted.depth + 1):
            self._take_behind(accepted.at(depth), outputs, now_s, accepted.beyond(depth))
        for draft, count in zip(schedule.drafts, accepted.num_accepted, strict=True):
            draft.set_num_accepted(count)
            self.scheduler.drafts.ran(draft.group, draft.sequence, count)
        self.stats.count_drafts([len(draft.token_ids) for draft in schedule.drafts], accepted.num_accepted)

    def take_first(self, schedule: Schedule, step: int, outputs: StepOutputs, now_s: float) -> None:
        """Process one of several alternating steps, before the last of them."""
        self._take_step(schedule, outputs, now_s, step)

    def narrow(self, schedule: Schedule, rows: list[BoundRow], sampling: SamplingInputs) -> None:
        """Apply grammar masks to rows of a step in flight. End sequences and requests that end there."""
        self._follow(self.grammars.narrow(schedule, rows, sampling, self.output))

    def _take_rounds(self, schedule: Schedule, outputs: StepOutputs, rounds: Speculated, now_s: float) -> None:
        """Process the tokens of draft-model rounds: each row has at least one, and up to `num_tokens_r`."""
        decodes, counts = schedule.decodes, rounds.num_tokens_r[: schedule.num_rows].tolist()
        first = outputs.at(0)
        for group in self.soundness.fail_unsound(schedule, first):
            self.release(group)
        tokens, _ = schedule.live_tokens()
        for row, group in zip(tokens.rows, tokens.groups, strict=True):
            self.stats.count_tokens([group], now_s, counts[row])
        self._publish(tokens, first, 1, ())
        for place in range(1, max(counts)):
            going_on = [row for row, one in enumerate(decodes.sequences) if counts[row] > place and one.is_live]
            if not going_on:
                break
            self._take_behind({row: schedule.row_at(row, place) for row in going_on}, outputs.at(place), now_s, ())
        for row, count in enumerate(counts):
            self.scheduler.drafts.ran(decodes.groups[row], decodes.sequences[row], count - 1)
        proposed, accepted = (
            counted[: rounds.num_rounds, : len(counts)].ravel().tolist()
            for counted in (rounds.num_proposed_nr, rounds.num_accepted_nr)
        )
        self.stats.count_drafts(proposed, accepted)

    def _take_step(
        self,
        schedule: Schedule,
        outputs: StepOutputs,
        now_s: float,
        step: int = 0,
        going_on: Collection[Sequence] = (),
    ) -> None:
        """Process the tokens of one step of a dispatch.

        Args:
            going_on: sequences that have more tokens sampled in the same step.
        """
        for group in self.soundness.fail_unsound(schedule, outputs, step):
            self.release(group)
        tokens, beams = schedule.live_tokens(step)
        num_at_once = 1 if schedule.decodes.is_in_turn else schedule.num_steps
        self.stats.count_tokens([*tokens.groups, *beams.groups], now_s, num_at_once)
        self._publish(tokens, outputs, schedule.num_steps, None if schedule.decodes.is_fed else going_on)
        for group, rows in beams.by_group().items():
            self._advance_beams(group, rows, outputs)

    def _take_behind(
        self, rows: dict[int, ScheduledRow], outputs: StepOutputs, now_s: float, going_on: Collection[Sequence]
    ) -> None:
        """Process the tokens sampled after accepted draft tokens, keyed by device row."""
        for group in self.soundness.fail_rows(rows, outputs):
            self.release(group)
        tokens = Sampled()
        for place, row in rows.items():
            if row.sequence.is_live:
                row.sequence.went_on()
                tokens.add(place, row)
        self.stats.count_tokens(tokens.groups, now_s)
        self._publish(tokens, outputs, 1, going_on)

    def _publish(
        self, tokens: Sampled, outputs: StepOutputs, num_steps: int, going_on: Collection[Sequence] | None
    ) -> None:
        for group, sequence in self.output.publish(tokens, outputs):
            if max(num_steps, sequence.num_in_flight_tokens) > 1:
                sequence.ended_on_the_way()
            self._end_sequence(group, sequence)
        if going_on is not None:
            self._follow(self.grammars.follow(tokens, self.output, going_on))

    def _follow(self, ended: Iterator[tuple[Group, Sequence, JpagedError | None]]) -> None:
        for group, sequence, error in ended:
            if error is None:
                self._end_sequence(group, sequence)
            else:
                self._give_up(group, error)
        self.stats.count_forced(self.grammars.take_num_forced())

    def _give_up(self, group: Group, error: JpagedError) -> None:
        """Fail a running request with its own error."""
        self.output.fail(group, error)
        self.release(group)

    def _end_sequence(self, group: Group, sequence: Sequence) -> None:
        if len(group.live) > 1:
            self.scheduler.finish_sequence(group, sequence)
        else:
            self.output.finish(group)
            self.release(group)

    def _advance_beams(self, group: Group, rows: dict[Sequence, int], outputs: StepOutputs) -> None:
        search = self.output.search(group)
        advance_beams(group, rows, outputs, search, self.scheduler)
        if search.is_done:
            self.output.finish(group)
            self.release(group)


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
        return Dispatched(
            fed.schedule, fed.inputs, fed.begin_s, fed.handle, results=self._results_of(steps)
        ), not steps.are_over

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
