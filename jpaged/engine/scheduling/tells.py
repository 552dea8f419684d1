"""Aux outputs of a step: what is computed from its hidden states in addition to the samples.

positions    of a prompt, each once, in chunks of at most the positions per step that the device has room for
samples      log-probabilities of given token ids, or of more tokens than a sample reports
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jpaged.engine.executor import Geometry
from jpaged.engine.executor.io import NO_ID, Tell, TellInputs
from jpaged.engine.scheduling.schedule import Schedule
from jpaged.engine.sequence import Group, Sequence

TELL_SIZES = {Tell.LOGPROBS: 64, Tell.ALL_LOGPROBS: 8, Tell.HIDDEN: 64}
"""Rows of one aux call."""


class Asked(NamedTuple):
    """A hidden state from which an aux output is requested.

    Attributes:
        position: position of a prompt token; None for the token that the row samples from.
        row: the device row of a sample; 0 for a prompt token.
    """

    group: Group
    sequence: Sequence
    position: int | None
    row: int


@dataclass(frozen=True, slots=True)
class StepTell:
    """One aux call of a step, and the origin of each row."""

    inputs: TellInputs
    asked: list[Asked]


def build_tells(schedule: Schedule, geometry: Geometry) -> list[StepTell]:
    """Return every aux call of a step, each with a bounded number of rows."""
    asked: dict[Tell, list[tuple[int, list[int], Asked]]] = {}
    first = geometry.buckets.rows[-1]
    for number, (_, row, position) in enumerate(schedule.told_tokens()):
        following = row.sequence.token_ids[position + 1 : position + 2]
        one = Asked(row.group, row.sequence, position, 0)
        asked.setdefault(_tell_of_prompt(row.group), []).append((first + number, following, one))
    asks_more = any(row.group.request.sampling.asks_more_of_samples for row in schedule.rows)
    for place in range(schedule.num_rows) if asks_more else ():
        row = schedule.row_at(place)
        sampling = row.group.request.sampling
        if row.samples_token and sampling.asks_more_of_samples:
            tell = Tell.LOGPROBS if sampling.logprob_token_ids else Tell.ALL_LOGPROBS
            ids = [NO_ID, *sampling.logprob_token_ids]
            asked.setdefault(tell, []).append((place, ids, Asked(row.group, row.sequence, None, place)))
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
