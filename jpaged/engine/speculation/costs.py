"""Time of a step with draft tokens, from device timings at startup."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jpaged.engine.executor import BucketTable, DeviceRates

StepSeconds = Callable[[int, int], float]
"""(tokens, padded; decode rows) -> seconds on the device."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Time of a step and of proposing for it.

    Attributes:
        step_s: time on the device.
        sizes: padded step sizes in tokens, ascending; the last is the maximum.
        host_s: host overhead of a step.
        row_s: asking a proposer for one row, with or without a result.
        token_s: each draft token.
        round_s: the k-th tokens of all rows together, for a draft model that runs once for each k.
    """

    step_s: StepSeconds
    sizes: tuple[int, ...]
    host_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0
    round_s: float = 0.0

    @classmethod
    def of(
        cls,
        rates: DeviceRates,
        buckets: BucketTable,
        *,
        host_s: float = 0.0,
        row_s: float = 0.0,
        token_s: float = 0.0,
        round_s: float = 0.0,
    ) -> StepCosts:
        """Return the costs from device timings at startup."""
        sizes, seconds = zip(*rates.forward_s, strict=True)

        def step_s(num_tokens: int, num_rows: int) -> float:
            nearest = min(max(num_tokens, sizes[0]), sizes[-1])
            return float(np.interp(nearest, sizes, seconds)) * max(1.0, num_tokens / nearest)

        return cls(step_s, buckets.tokens, host_s, row_s, token_s, round_s)

    def size(self, num_tokens: int) -> int:
        """Return the padded size of num_tokens; a number above the largest size is returned unchanged."""
        place = bisect_left(self.sizes, num_tokens)
        return self.sizes[place] if place < len(self.sizes) else num_tokens

    def plain_s(self, num_rows: int, num_other_tokens: int) -> float:
        """Return the time of a step without proposals."""
        return self.step_s(self.size(num_rows + num_other_tokens), num_rows) + self.host_s
