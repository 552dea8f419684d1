"""Guard against logits that are not finite: fails the requests and drops their cached blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from jpaged.engine.executor import StepOutputs
from jpaged.engine.kv.interface import KVMemory
from jpaged.engine.output.processor import OutputProcessor
from jpaged.engine.scheduling.editing import nothing_left
from jpaged.engine.scheduling.schedule import Schedule
from jpaged.engine.scheduling.scheduled import ScheduledRow
from jpaged.engine.sequence import Group, Sequence
from jpaged.engine.stats import StepStats
from jpaged.errors import InternalError

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
