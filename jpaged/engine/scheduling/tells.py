"""What is asked of a step besides its samples: how much of it there may be, and in which rows of which tell it is.

positions    of a prompt, each once, in chunks of at most as many a step as the device has room for
samples      log-probabilities of named tokens, or of more than a sample tells, of the tokens that it draws
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jpaged.engine.executor import Geometry
from jpaged.engine.executor.telling import Tell, TellInputs
from jpaged.engine.sequence import Group, Sequence

if TYPE_CHECKING:
    from jpaged.engine.scheduling.schedule import Schedule

TELL_SIZES = {Tell.LOGPROBS: 64, Tell.ALL_LOGPROBS: 8, Tell.HIDDEN: 64}
"""Rows of one tell."""


class ToldBudget:
    """How many more tokens of the step that is put together may be told of."""

    def __init__(self, num_told: int) -> None:
        self._num_told = self._num_left = num_told

    def begin_step(self) -> None:
        self._num_left = self._num_told

    def within(self, sequence: Sequence, num_tokens: int) -> int:
        """As many of the next tokens of a sequence as what is to be told of them leaves; they are taken off."""
        start = sequence.num_computed_tokens
        begin = max(start, sequence.told_from)
        end = min(start + num_tokens, sequence.told_end)
        if begin >= end:
            return num_tokens
        if end - begin > self._num_left:
            num_tokens = begin + self._num_left - start
        self._num_left -= min(end - begin, self._num_left)
        return num_tokens


class Asked(NamedTuple):
    """A hidden state that something is asked of.

    Attributes:
        position: of a prompt's token; None of what the row sampled.
        row: the device's, of what it sampled; 0 else.
    """

    group: Group
    sequence: Sequence
    position: int | None
    row: int


@dataclass(frozen=True, slots=True)
class StepTell:
    """One tell of a step, and who asked for each of its rows."""

    inputs: TellInputs
    asked: list[Asked]


def told_tokens(schedule: Schedule) -> Iterator[tuple[int, int, Asked]]:
    """Of each token of a prompt that is told of, in the device's order: row, place in the row, and who asks."""
    for row in range(len(schedule.decodes) + len(schedule.rows)):
        scheduled = schedule.row_at(row) if schedule.rows else None
        if scheduled is not None:
            for position in scheduled.told:
                yield row, position - scheduled.start, Asked(scheduled.group, scheduled.sequence, position, 0)


def build_tells(schedule: Schedule, geometry: Geometry) -> list[StepTell]:
    """Every tell of a step, each of a bounded number of rows."""
    if not schedule.rows:
        return []
    asked: dict[Tell, list[tuple[int, list[int], Asked]]] = {}
    first = geometry.buckets.rows[-1]
    for number, (_, _, one) in enumerate(told_tokens(schedule)):
        assert one.position is not None
        tell = _tell_of_prompt(one.group)
        following = one.sequence.token_ids[one.position + 1 : one.position + 2]
        asked.setdefault(tell, []).append((first + number, following, one))
    for row in range(schedule.num_rows):
        scheduled = schedule.row_at(row)
        sampling = scheduled.group.request.sampling
        if scheduled.samples_token and sampling.asks_more_of_samples:
            tell = Tell.LOGPROBS if sampling.logprob_token_ids else Tell.ALL_LOGPROBS
            ids = [0, *sampling.logprob_token_ids]
            asked.setdefault(tell, []).append((row, ids, Asked(scheduled.group, scheduled.sequence, None, row)))
    return [part for tell, rows in asked.items() for part in _parts(tell, rows)]


def _tell_of_prompt(group: Group) -> Tell:
    request = group.request
    if request.pooling is not None:
        return Tell.HIDDEN
    return Tell.ALL_LOGPROBS if request.sampling.asks_all_of(request.sampling.prompt_logprobs) else Tell.LOGPROBS


def _parts(tell: Tell, rows: list[tuple[int, list[int], Asked]]) -> Iterator[StepTell]:
    size = TELL_SIZES[tell]
    for begin in range(0, len(rows), size):
        places, ids, asked = zip(*rows[begin : begin + size], strict=True)
        yield StepTell(TellInputs.padded(tell, list(places), list(ids), size), list(asked))
