"""Processes the results of a step: checks, counts and publishes tokens; ends finished sequences and requests.

one step     several steps     drafts                 r0 r1 are rows of the step, d their sampled tokens
r0 -> d      step 0: r0 r1     the sequence's own row: d
r1 -> d      step 1: r0 r1     then its draft rows: d d, while drafts are accepted; draft-model rounds yield a count

Steps that alternate with masks arrive one by one: `take_first` processes them, except the last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from jpaged.engine.executor import SamplingInputs, Speculated, StepOutputs
from jpaged.engine.grammars import BoundRow, Grammars
from jpaged.engine.output.beam_rows import advance_beams
from jpaged.engine.output.processor import OutputProcessor
from jpaged.engine.scheduling.schedule import Schedule
from jpaged.engine.scheduling.scheduled import Sampled, ScheduledRow
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.sequence import Group, Sequence
from jpaged.engine.soundness import Soundness
from jpaged.engine.speculation.drafts import Accepted
from jpaged.engine.stats import StepStats
from jpaged.errors import JpagedError


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

    def take(self, schedule: Schedule, outputs: StepOutputs, now_s: float) -> list[int]:
        """Process all tokens that a dispatch sampled. Return the number of accepted tokens of each draft."""
        if outputs.speculated is not None:
            self._take_rounds(schedule, outputs, outputs.speculated, now_s)
            return []
        if schedule.decodes.is_in_turn:
            self._take_step(schedule, outputs, now_s, schedule.num_steps - 1)
            return []
        if schedule.num_steps > 1:  # a fed dispatch has already advanced its grammars
            for step in range(schedule.num_steps):
                self._take_step(schedule, outputs.at(step), now_s, step)
            return []
        if not schedule.drafts:
            self._take_step(schedule, outputs, now_s)
            return []
        accepted = Accepted.of(schedule, outputs)
        self._take_step(schedule, outputs, now_s, going_on=accepted.beyond(0))
        for depth in range(1, accepted.depth + 1):
            self._take_behind(accepted.at(depth), outputs, now_s, accepted.beyond(depth))
        for draft, count in zip(schedule.drafts, accepted.num_accepted, strict=True):
            self.scheduler.drafts.ran(draft.group, draft.sequence, count)
        self.stats.count_drafts([len(draft.token_ids) for draft in schedule.drafts], accepted.num_accepted)
        return accepted.num_accepted

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
