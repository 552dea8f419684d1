"""The simulator's executor for many replicas: several decode steps in one dispatch if the result is the same.

    single steps   | s | s | s | s | arrival | s ...       the results at an arrival, or when a row ends, are the same
    one dispatch   | s   s   s   s | arrival | s ...

The engine chooses the number of steps as for any device (`Lookahead`), up to a maximum set before each dispatch. The
maximum is the number of steps that surely end before the next arrival: until then no row is added, so the rows of the
last step bound the time. A dispatch stops when a row ends, so that every request has its first token and its end at the
same time as with single steps.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from jpaged.capacity.cost import StepLoad
from jpaged.capacity.simulator.deployment import Deployment, Times
from jpaged.capacity.simulator.executor import SimulatedExecutor
from jpaged.engine.executor import I32, Geometry, SamplingInputs, StepInputs, StepOutputs
from jpaged.testing.virtual_clock import VirtualClock

MAX_STEPS = 64
"""Maximum steps of a dispatch: more save nothing, because tokens are processed one by one."""


class BulkExecutor(SimulatedExecutor):
    """Implements `jpaged.engine.executor.Executor`, for rows that need only tokens.

    Attributes:
        busy_s: simulated seconds of all steps so far.
    """

    def __init__(
        self, deployment: Deployment, clock: VirtualClock, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        super().__init__(deployment, clock, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self._times: Times = deployment if deployment.drawn is None else deployment.drawn(clock)
        self.busy_s = 0.0
        self._geometries = _with_steps(self.geometry)
        self.geometry = self._geometries[0]
        self._num_rows = self._num_kv_tokens = 0

    def look(self, until_s: float) -> None:
        """Limit the next dispatch to the steps that surely end before a time: the next arrival, or the window's end."""
        self.geometry = self._geometries[self._num_sure_steps(until_s - self._clock()) - 1]

    def forward(self, inputs: StepInputs) -> NDArray[np.int32]:
        """Advance the clock by the whole step. Return the lengths of the rows' contexts."""
        num_rows = inputs.num_rows
        query_lens = np.diff(inputs.query_starts_s1[: num_rows + 1])
        kv_lens = inputs.kv_lens_s[:num_rows]
        is_decoding = query_lens == 1
        num_kv_tokens, num_decoding = int(kv_lens.sum()), int(is_decoding.sum())
        if num_decoding == num_rows:
            load = _decoding(num_rows, num_kv_tokens)
        else:
            load = StepLoad(
                num_rows=num_rows,
                num_tokens=inputs.num_tokens,
                num_kv_tokens=num_kv_tokens,
                num_pairs=inputs.num_pairs,
                num_decoding=num_decoding,
                num_decoding_kv_tokens=int(kv_lens[is_decoding].sum()),
            )
        self._take(self._times.step_s(load))
        self._num_rows, self._num_kv_tokens = num_rows, num_kv_tokens
        return kv_lens

    def decode(
        self, inputs: StepInputs, sampling: SamplingInputs, ending_token_ids_rx: I32, num_steps: int
    ) -> StepOutputs:
        """Advance the clock by all steps: the tokens end no row."""
        num_rows = inputs.num_rows
        num_kv_tokens = int(inputs.kv_lens_s[:num_rows].sum())
        for step in range(num_steps):
            self._take(self._times.step_s(_decoding(num_rows, num_kv_tokens + step * num_rows)))
        self._num_rows, self._num_kv_tokens = num_rows, num_kv_tokens + (num_steps - 1) * num_rows
        shape = len(ending_token_ids_rx), num_steps
        return StepOutputs(np.zeros(shape, np.int32), np.ones(shape, np.bool_))

    def _take(self, seconds: float) -> None:
        self._clock.advance(seconds)
        self.busy_s += seconds

    def _num_sure_steps(self, seconds: float) -> int:
        """Return the number of steps that the last step's rows surely complete in that time; 1 if unknown."""
        num_rows, most = self._num_rows, MAX_STEPS if self._times is self._deployment else 1
        while num_rows and most > 1:
            longest_s = self._deployment.step_s(_decoding(num_rows, self._num_kv_tokens + most * num_rows))
            sure = min(most, int(seconds / longest_s))
            if sure == most or sure >= most // 2:
                return max(1, sure)
            most //= 2
        return 1


def _decoding(num_rows: int, num_kv_tokens: int) -> StepLoad:
    return StepLoad(num_rows, num_rows, num_kv_tokens, num_kv_tokens, num_rows, num_kv_tokens)


def _with_steps(geometry: Geometry) -> list[Geometry]:
    """Return the geometries with a maximum of 1, 2, ... steps per dispatch."""
    buckets = dataclasses.replace(geometry.buckets, decodes=geometry.buckets.rows)
    return [dataclasses.replace(geometry, max_num_steps=most, buckets=buckets) for most in range(1, MAX_STEPS + 1)]
