"""Aux outputs of a step: what is computed from its hidden states in addition to the samples.

positions    of a prompt, each once, in chunks of at most the positions per step that the device has room for
samples      log-probabilities of given token ids, or of more tokens than a sample reports
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jpaged.engine.executor import Geometry
from jpaged.engine.executor.aux_io import NO_ID, AuxInputs, AuxKind
from jpaged.engine.scheduler.output import SchedulerOutput
from jpaged.engine.sequence import Sequence, SequenceGroup

AUX_SIZES = {AuxKind.LOGPROBS: 64, AuxKind.ALL_LOGPROBS: 8, AuxKind.HIDDEN: 64}
"""Rows of one aux call."""


class AuxRequest(NamedTuple):
    """A hidden state from which an aux output is requested.

    Attributes:
        position: position of a prompt token; None for the token that the row samples from.
        row: the device row of a sample; 0 for a prompt token.
    """

    group: SequenceGroup
    sequence: Sequence
    position: int | None
    row: int


@dataclass(frozen=True, slots=True)
class StepAux:
    """One aux call of a step, and the origin of each row."""

    inputs: AuxInputs
    requests: list[AuxRequest]


def build_aux_inputs(schedule: SchedulerOutput, geometry: Geometry) -> list[StepAux]:
    """Return every aux call of a step, each with a bounded number of rows."""
    requests: dict[AuxKind, list[tuple[int, list[int], AuxRequest]]] = {}
    first = geometry.buckets.rows[-1]
    for number, (row_index, row, position) in enumerate(schedule.aux_tokens()):
        is_pooled = row.group.request.is_encoded and row.group.request.is_pooled_on_device
        place = row_index if is_pooled else first + number
        following = row.sequence.token_ids[position + 1 : position + 2]
        one = AuxRequest(row.group, row.sequence, position, 0)
        requests.setdefault(_build_prompt_aux(row.group), []).append((place, following, one))
    needs_aux = any(row.group.request.sampling.needs_extra_logprobs for row in schedule.rows)
    for row_index in range(schedule.num_rows) if needs_aux else ():
        row = schedule.row_at(row_index)
        sampling = row.group.request.sampling
        if row.samples_token and sampling.needs_extra_logprobs:
            needs_all = sampling.sampling_logprobs or not sampling.logprob_token_ids
            kind = AuxKind.ALL_LOGPROBS if needs_all else AuxKind.LOGPROBS
            ids = [NO_ID, *sampling.logprob_token_ids]
            requests.setdefault(kind, []).append((row_index, ids, AuxRequest(row.group, row.sequence, None, row_index)))
    return [part for kind, rows in requests.items() for part in _parts(kind, rows)]


def _build_prompt_aux(group: SequenceGroup) -> AuxKind:
    request = group.request
    if request.pooling is not None:
        return AuxKind.HIDDEN
    sampling = request.sampling
    # The samples of such a request come from the same program: the same logits have the same bits.
    needs_all = sampling.sampling_logprobs or sampling.wants_full_vocab(sampling.prompt_logprobs)
    return AuxKind.ALL_LOGPROBS if needs_all else AuxKind.LOGPROBS


def _parts(kind: AuxKind, rows: list[tuple[int, list[int], AuxRequest]]) -> Iterator[StepAux]:
    size = AUX_SIZES[kind]
    for begin in range(0, len(rows), size):
        row_indices, ids, requests = zip(*rows[begin : begin + size], strict=True)
        yield StepAux(AuxInputs.padded(kind, list(row_indices), list(ids), size), list(requests))
