"""Beam search step on sequences: consumes device results, and forks and drops beams.

beams     b0 b1 b2          children   b0+x  b0+y  b2+z
tables    b0 is kept by its first child, forked for its second; b1 is released
"""

from __future__ import annotations

from jpaged.engine.executor import StepOutputs
from jpaged.engine.output.beam import BeamSearch, Candidate
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.sequence import Group, Sequence
from jpaged.types import PositionLogprobs


def advance_beams(
    group: Group, rows: dict[Sequence, int], outputs: StepOutputs, search: BeamSearch, scheduler: Scheduler
) -> None:
    """Rank the results of every beam's row, and replace the group's sequences by the surviving beams.

    Args:
        rows: row of each live sequence; all of them sampled a token in the step.
        outputs: results with top log-probabilities.
    """
    beams = group.live
    num_top = search.num_candidates
    tops = []
    for sequence in beams:
        sequence.discard_in_flight()
        top = outputs.position(rows[sequence], num_top).top
        tops.append([PositionLogprobs(token, top) for token in top])
    group.sampled(len(beams))
    chosen = search.advance(tops)
    if not search.is_done:
        group.continues_as(_children(beams, chosen, scheduler))


def _children(beams: list[Sequence], chosen: list[Candidate], scheduler: Scheduler) -> list[Sequence]:
    survivors = {candidate.parent for candidate in chosen}
    for i, parent in enumerate(beams):  # first, so that the forks can use their blocks
        if i not in survivors:
            scheduler.drop_beam(parent)
    heirs: set[int] = set()
    children: list[tuple[Sequence, Candidate]] = []
    for index, candidate in enumerate(chosen):
        parent = beams[candidate.parent]
        child = scheduler.fork(parent, index) if candidate.parent in heirs else parent
        heirs.add(candidate.parent)
        children.append((child, candidate))
    for index, (child, candidate) in enumerate(children):
        child.become(index, candidate.token_id, candidate.cumulative_logprob)
    return [child for child, _ in children]
