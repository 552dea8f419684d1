"""Results of a dispatch: checks, counts and publishes tokens; ends finished sequences and requests.

one step     several steps     drafts                 r0 r1 are rows of the step, d their sampled tokens
r0 -> d      step 0: r0 r1     the sequence's own row: d
r1 -> d      step 1: r0 r1     then its draft rows: d d, while drafts are accepted; draft-model rounds yield a count

Guard against logits that are not finite: fails the requests and drops their cached blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jpaged.engine.executor import SamplingInputs, StepOutputs
from jpaged.engine.kv_cache.interface import KVCacheManager
from jpaged.engine.output.beam import advance_beams
from jpaged.engine.output.processor import OutputProcessor
from jpaged.engine.scheduler.decode_batch import StepKind
from jpaged.engine.scheduler.logits_processors import nothing_left
from jpaged.engine.scheduler.output import SampledRows, ScheduledRow, SchedulerOutput
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequence import Sequence, SequenceGroup
from jpaged.engine.speculative.drafts import Accepted
from jpaged.engine.stats import StepStats
from jpaged.engine.structured_output import ConstrainedRow, StructuredOutputManager
from jpaged.errors import InternalError, JpagedError

logger = logging.getLogger(__name__)


class NonFiniteLogitsGuard:
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
        memory: KVCacheManager,
        output: OutputProcessor,
        stats: StepStats,
        eos_token_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self._eos_token_ids, self._vocab_size = eos_token_ids, vocab_size
        self._memory = memory
        self._output = output
        self._stats = stats
        self._has_logged = False

    def fail_nonfinite(self, schedule: SchedulerOutput, outputs: StepOutputs, step: int = 0) -> list[SequenceGroup]:
        """Fail the requests whose rows are not finite. Return their groups, which still hold their blocks.

        Rows of draft tokens fail no request: `fail_rows` checks those whose tokens are accepted.

        Args:
            outputs: of one step of the dispatch.
            step: index of that step.
        """
        failed: dict[SequenceGroup, None] = {}
        for row in np.flatnonzero(~outputs.is_finite_rn[: schedule.num_rows, 0]).tolist():
            scheduled = schedule.row_at(row, step)
            if not scheduled.sequence.is_live:
                self._drop_prefix(scheduled.sequence)
            elif scheduled.samples_token and scheduled.proposed is None and scheduled.group not in failed:
                failed[scheduled.group] = None
                self._fail(scheduled)
        return list(failed)

    def fail_rows(self, rows: Mapping[int, ScheduledRow], outputs: StepOutputs) -> list[SequenceGroup]:
        """Like `fail_nonfinite` for the given rows, keyed by their index on the device."""
        failed: dict[SequenceGroup, None] = {}
        for row_index, row in rows.items():
            if not outputs.is_finite_rn[row_index, 0] and row.group not in failed:
                failed[row.group] = None
                self._fail(row)
        return list(failed)

    def _fail(self, row: ScheduledRow) -> None:
        group = row.group
        token_ids = row.sequence.token_ids
        error_of_caller = nothing_left(group.request, token_ids, self._eos_token_ids, self._vocab_size)
        if error_of_caller is not None:
            self._output.fail(group, error_of_caller)
            return
        error = InternalError(
            f"the model's logits are not finite: no token {row.output_index + 1} can be sampled for sequence "
            f"{row.sequence.index}, after {row.start + row.num_tokens} tokens of context"
        )
        if not self._has_logged:
            self._has_logged = True
            logger.error("request %r: %s; later ones are counted but not logged", group.request.request_id, error)
        for sequence in group.sequences:
            self._drop_prefix(sequence)
        self._stats.count_not_finite()
        self._output.fail(group, error)

    def _drop_prefix(self, sequence: Sequence) -> None:
        if self._memory.prefixes is not None:
            self._memory.prefixes.remove_prefix(sequence)


@dataclass(slots=True)
class ResultProcessor:
    """Processes sampled tokens for one engine.

    Args:
        release: ends a request whose last event is known.
    """

    scheduler: Scheduler
    output: OutputProcessor
    guard: NonFiniteLogitsGuard
    grammars: StructuredOutputManager
    stats: StepStats
    release: Callable[[SequenceGroup], None]

    def process_steps(self, schedule: SchedulerOutput, outputs: StepOutputs, now_s: float) -> None:
        """Process the tokens of several steps; those of a masked dispatch have already advanced their grammars."""
        for step in range(schedule.num_steps):
            self.process_step(schedule, outputs.at(step), now_s, step)

    def process_drafts(self, schedule: SchedulerOutput, outputs: StepOutputs, now_s: float) -> None:
        """Process the tokens of a step with draft tokens, of which a prefix is accepted."""
        accepted = Accepted.of(schedule, outputs)
        self.process_step(schedule, outputs, now_s, continuing=accepted.longer_than(0))
        for depth in range(1, accepted.depth + 1):
            self._process_accepted(accepted.at(depth), outputs, now_s, accepted.longer_than(depth))
        for draft, count in zip(schedule.drafts, accepted.num_accepted, strict=True):
            draft.set_num_accepted(count)
            self.scheduler.drafts.ran(draft.group, draft.sequence, count)
        self.stats.count_drafts([len(draft.token_ids) for draft in schedule.drafts], accepted.num_accepted)

    def apply_grammar_masks(
        self, schedule: SchedulerOutput, rows: list[ConstrainedRow], sampling: SamplingInputs
    ) -> None:
        """Apply grammar masks to rows of a step in flight. End sequences and requests that end there."""
        self._end_by_grammar(self.grammars.fill_bitmasks(schedule, rows, sampling, self.output))

    def process_rounds(self, schedule: SchedulerOutput, outputs: StepOutputs, now_s: float) -> None:
        """Process the tokens of draft-model rounds: each row has at least one, and up to `num_tokens_r`."""
        rounds = outputs.speculated
        if rounds is None:
            raise InternalError("a dispatch of a draft model has no counts of tokens")
        decodes, counts = schedule.decodes, rounds.num_tokens_r[: schedule.num_rows].tolist()
        first = outputs.at(0)
        for group in self.guard.fail_nonfinite(schedule, first):
            self.release(group)
        tokens, _ = schedule.live_tokens()
        for row, group in zip(tokens.rows, tokens.groups, strict=True):
            self.stats.count_tokens([group], now_s, counts[row])
        self._publish(tokens, first, 1, ())
        for step in range(1, max(counts)):
            continuing = [row for row, one in enumerate(decodes.sequences) if counts[row] > step and one.is_live]
            if not continuing:
                break
            self._process_accepted({row: schedule.row_at(row, step) for row in continuing}, outputs.at(step), now_s, ())
        for row, count in enumerate(counts):
            slot = rounds.state_slots_r.item(row)
            self.scheduler.drafts.ran(decodes.groups[row], decodes.sequences[row], count - 1, slot)
        proposed, accepted = (
            counted[: rounds.num_rounds, : len(counts)].ravel().tolist()
            for counted in (rounds.num_proposed_nr, rounds.num_accepted_nr)
        )
        self.stats.count_drafts(proposed, accepted)

    def process_step(
        self,
        schedule: SchedulerOutput,
        outputs: StepOutputs,
        now_s: float,
        step: int = 0,
        continuing: Collection[Sequence] = (),
    ) -> None:
        """Process the tokens of one step of a dispatch. Alternating steps arrive one by one, before the dispatch ends.

        Args:
            step: index of the step.
            continuing: sequences that have more tokens sampled in the same step.
        """
        for group in self.guard.fail_nonfinite(schedule, outputs, step):
            self.release(group)
        tokens, beams = schedule.live_tokens(step)
        kind = schedule.decodes.kind
        num_at_once = 1 if kind is StepKind.ALTERNATING else schedule.num_steps
        self.stats.count_tokens([*tokens.groups, *beams.groups], now_s, num_at_once)
        follows = schedule.has_grammars and kind is not StepKind.MASKED_MULTI_STEP
        self._publish(tokens, outputs, schedule.num_steps, continuing if follows else None)
        for group, rows in beams.by_group().items():
            self._advance_beams(group, rows, outputs)

    def _process_accepted(
        self, rows: dict[int, ScheduledRow], outputs: StepOutputs, now_s: float, continuing: Collection[Sequence]
    ) -> None:
        """Process the tokens sampled after accepted draft tokens, keyed by device row."""
        for group in self.guard.fail_rows(rows, outputs):
            self.release(group)
        tokens = SampledRows()
        for row_index, row in rows.items():
            if row.sequence.is_live:
                row.sequence.accept_draft_token()
                tokens.add(row_index, row)
        self.stats.count_tokens(tokens.groups, now_s)
        self._publish(tokens, outputs, 1, continuing)

    def _publish(
        self, tokens: SampledRows, outputs: StepOutputs, num_steps: int, continuing: Collection[Sequence] | None
    ) -> None:
        for group, sequence in self.output.publish(tokens, outputs):
            if max(num_steps, sequence.num_in_flight_tokens) > 1:
                sequence.truncate_after_stop()
            self._end_sequence(group, sequence)
        if continuing is not None and tokens.has_grammars:
            self._end_by_grammar(self.grammars.accept_tokens(tokens, self.output, continuing))

    def _end_by_grammar(self, ended: Iterator[tuple[SequenceGroup, Sequence, JpagedError | None]]) -> None:
        for group, sequence, error in ended:
            if error is None:
                self._end_sequence(group, sequence)
            else:
                self._fail_request(group, error)
        self.stats.count_forced(self.grammars.take_num_forced())

    def _fail_request(self, group: SequenceGroup, error: JpagedError) -> None:
        """Fail a running request with its own error."""
        self.output.fail(group, error)
        self.release(group)

    def _end_sequence(self, group: SequenceGroup, sequence: Sequence) -> None:
        if len(group.live) > 1:
            self.scheduler.finish_sequence(group, sequence)
        else:
            self.output.finish(group)
            self.release(group)

    def _advance_beams(self, group: SequenceGroup, rows: dict[Sequence, int], outputs: StepOutputs) -> None:
        search = self.output.search(group)
        advance_beams(group, rows, outputs, search, self.scheduler)
        if search.is_done:
            self.output.finish(group)
            self.release(group)
