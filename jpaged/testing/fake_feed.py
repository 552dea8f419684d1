"""Several steps of a fake in one dispatch; each runs when its masks arrive, or at once without masks."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import I32, Bool, Geometry, SamplingInputs, StepInputs, StepOutputs, Verdict
from jpaged.engine.executor.rows import EditInputs
from jpaged.errors import InternalError
from jpaged.testing.fake_model import Seen
from jpaged.testing.single_steps import step_at


class RunsSteps(Protocol):
    """Interface of a fake that runs single steps.

    Attributes:
        last_tokens: of each row.
        have_ended: rows that ended in the last multi-step dispatch, which may read slots that were never written.
    """

    last_tokens: NDArray[np.int64]
    have_ended: NDArray[np.bool_]

    @property
    def geometry(self) -> Geometry: ...

    def forward(self, inputs: StepInputs) -> list[Seen]: ...

    def sample(self, hidden: list[Seen], inputs: SamplingInputs) -> StepOutputs: ...


class FakeFeed:
    """A dispatch of several steps, as `Executor.decode` and `decode_fed` describe it."""

    def __init__(
        self, runs: RunsSteps, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> None:
        shape, used = (len(sampling.rows_r), num_steps), slice(0, inputs.num_rows)
        self._runs, self._inputs, self._used = runs, inputs, used
        self._sampling = dataclasses.replace(sampling, edits=None)
        self._ending_ids_rx = ending_token_ids_rx[used]
        self._token_ids_rn, self._is_sound_rn = np.full(shape, -1, np.int32), np.ones(shape, np.bool_)
        self._kept = runs.last_tokens[inputs.prev_sampled_rows_t[used]]
        self._ended = inputs.is_prev_sampled_t[used] & self._end(self._kept)
        self._drawn: tuple[I32, Bool] | None = None
        self._place, self._num_steps = 0, num_steps

    @property
    def is_over(self) -> bool:
        """True if no further step is run."""
        return self._place >= self._num_steps

    @property
    def outputs(self) -> StepOutputs:
        """Outputs of the steps."""
        if not self.is_over:
            raise InternalError(f"{self._num_steps} steps are collected, but only {self._place} were given masks")
        return StepOutputs(self._token_ids_rn, self._is_sound_rn)

    def run(self) -> StepOutputs:
        """Run all steps without masks."""
        while not self.is_over:
            self._step(None, Verdict.GOES_ON)
        return self.outputs

    def give(self, mask_rw: I32, verdict: Verdict) -> None:
        if self.is_over:
            raise InternalError("masks are given to a step after the last")
        self._step(mask_rw, verdict)

    def wait(self) -> tuple[I32, Bool] | None:
        drawn, self._drawn = self._drawn, None
        return drawn

    def close(self) -> None:
        self._num_steps = self._place

    def _step(self, mask_rw: I32 | None, verdict: Verdict) -> None:
        if self._ended.all():
            self._runs.last_tokens[self._used] = self._kept
            self._runs.have_ended[self._used] = True
            self.close()
            return
        place, used = self._place, self._used
        step, rows = step_at(place, self._inputs, self._sampling, self._runs.geometry.block_size)
        hidden = self._runs.forward(step)
        if verdict == Verdict.VOID:
            self.close()
            return
        if mask_rw is not None:
            neutral = EditInputs.neutral(len(rows.rows_r))
            rows = dataclasses.replace(rows, edits=dataclasses.replace(neutral, mask_rw=mask_rw))
        outputs = self._runs.sample(hidden, rows)
        self._token_ids_rn[:, place] = outputs.token_ids_rn[:, 0]
        self._is_sound_rn[used, place] = outputs.is_sound_rn[used, 0] | self._ended
        self._drawn = outputs.token_ids_rn[:, 0], self._is_sound_rn[:, place]
        self._kept = np.where(self._ended, self._kept, self._runs.last_tokens[used])
        self._runs.last_tokens[used] = self._kept
        self._ended |= self._end(self._kept)
        self._runs.have_ended[used] = self._ended
        self._place += 1
        if verdict == Verdict.LAST:
            self.close()

    def _end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        is_ending: NDArray[np.bool_] = (tokens[:, None] == self._ending_ids_rx).any(axis=1)
        return is_ending
