"""Aux outputs of prompts and samples, until they are sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import StepOutputs
from jpaged.engine.executor.telling import ToldOutputs
from jpaged.engine.scheduling.tells import Asked, StepTell
from jpaged.engine.sequence import Group
from jpaged.types import PositionLogprobs, SamplingParams, TokenLogprob


@dataclass(slots=True)
class _OfPrompt:
    """Accumulated log-probabilities of a prompt, or the sum of hidden states."""

    logprobs: list[PositionLogprobs] = field(default_factory=list)
    sum_e: NDArray[np.float64] | None = None
    num_summed: int = 0

    def add(self, asked: Asked, outputs: ToldOutputs, row: int) -> None:
        """Add the next position."""
        if outputs.hidden_re is not None:
            hidden_e = outputs.hidden_re[row].astype(np.float64)
            self.sum_e = hidden_e if self.sum_e is None else self.sum_e + hidden_e
            self.num_summed += 1
            return
        assert asked.position is not None
        token_id = asked.sequence.token_ids[asked.position + 1]
        num_top = asked.group.request.sampling.prompt_logprobs or 0
        self.logprobs.append(PositionLogprobs(outputs.chosen(row, token_id), outputs.top(row, num_top)))

    @property
    def embedding(self) -> tuple[float, ...]:
        """Return the mean of the hidden states, in float32."""
        if self.sum_e is None:
            return ()
        mean: list[float] = (self.sum_e / self.num_summed).astype(np.float32).tolist()
        return tuple(mean)


class Told:
    """Collector of aux outputs of requests in flight.

    Attributes:
        ready: groups whose prompt outputs are complete, and not yet sent.
    """

    def __init__(self) -> None:
        self.ready: dict[Group, _OfPrompt] = {}
        self._prompts: dict[Group, _OfPrompt] = {}
        self._samples: dict[int, tuple[ToldOutputs, int]] = {}

    def take(self, told: Iterable[tuple[StepTell, ToldOutputs]]) -> None:
        """Add all aux outputs of a step."""
        self._samples.clear()
        for tell, outputs in told:
            for row, asked in enumerate(tell.asked):
                if asked.position is None:
                    self._samples[asked.row] = outputs, row
                elif asked.sequence.is_live:
                    found = self._prompts.setdefault(asked.group, _OfPrompt())
                    found.add(asked, outputs, row)
                    if asked.position + 1 == asked.sequence.told_end:
                        self.ready[asked.group] = self._prompts.pop(asked.group)

    def forget(self, group: Group) -> None:
        """Remove a request that has ended."""
        self._prompts.pop(group, None)
        self.ready.pop(group, None)

    def position(self, row: int, outputs: StepOutputs, sampling: SamplingParams) -> PositionLogprobs:
        """Return the log-probabilities of a row's sample, for a request that needs aux outputs."""
        of_row, place = self._samples[row]
        token_id = outputs.token(row)
        if not sampling.logprob_token_ids:
            return PositionLogprobs(of_row.chosen(place, token_id), of_row.top(place, sampling.logprobs or 0))
        assert of_row.logprobs_rk is not None
        values = of_row.logprobs_rk[place, 1 : 1 + len(sampling.logprob_token_ids)].tolist()
        pairs = zip(sampling.logprob_token_ids, values, strict=True)
        asked = tuple(TokenLogprob(asked_id, value) for asked_id, value in pairs)
        return PositionLogprobs(outputs.position(row, 0).chosen, asked=asked)
