"""Rows whose logits are not finite, and what becomes of their requests and of what they wrote."""

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
    """Judges the rows of each step. Makes last events and forgets prefixes; to release the groups is the caller's.

        row   sound       its token goes on as ever, whatever the rows beside it are
              not sound   live, and samples: its request fails, with all its sequences, and no other does
                          of a sequence that ended: its prefix is forgotten, which was cached before this was known

    A row that computes a part of a prompt samples nothing and fails nothing: whether a request fails does not depend on
    how its prompt was cut. NaN in its keys or values makes the logits of its last token NaN.

    All that such a sequence has read is forgotten with what it wrote: one of them is at fault, and it is not known
    which. Who shares those blocks goes on, and is judged by its own logits. Pinned prefixes stay: they were sound when
    pinned. A block of NaN that is free harms nobody: slots are written before they are read.

    A row that the fields of its own request leave no token is the caller's error: its prefix stays, and it is not
    counted as a request whose logits are not finite.

    Args:
        eos_token_ids: of the model.
        vocab_size: V, the width of its logits.
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
        """Fails the requests whose rows are not sound; the groups, which hold their blocks still.

        Rows of what is proposed fail nobody: `fail_rows` judges those of which something is taken in.

        Args:
            outputs: of one step of the dispatch.
            step: which one it is.
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
        """The same for some rows, by their places on the device."""
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
            f"the model's logits are not finite: there is no token {row.output_index + 1} for sequence "
            f"{row.sequence.index}, after {row.start + row.num_tokens} tokens of context"
        )
        if not self._has_told:
            self._has_told = True
            logger.error("request %r: %s; further ones are only counted", group.request.request_id, error)
        for sequence in group.sequences:
            self._forget(sequence)
        self._stats.count_not_finite()
        self._output.fail(group, error)

    def _forget(self, sequence: Sequence) -> None:
        if self._memory.prefixes is not None:
            self._memory.prefixes.forget(sequence)
