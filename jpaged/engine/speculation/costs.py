"""What a step with proposals takes, by what the device was timed at and what steps have taken since."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jpaged.engine.executor import BucketTable, DeviceRates

StepSeconds = Callable[[int, int], float]
"""(tokens, padded; rows that decode) -> seconds of the device."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What is paid for a step, and for proposing in it.

    Attributes:
        step_s: of the device.
        sizes: tokens that a step is padded to, ascending; the last is the most that it holds.
        host_s: what the host adds to a step.
        row_s: asking a proposer for one row, whether it has something or not.
        token_s: a token that is proposed.
        round_s: the k-th tokens of all rows together, as where a draft model runs once for each k.
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
        """The costs of a device that was timed when it started."""
        sizes, seconds = zip(*rates.forward_s, strict=True)

        def step_s(num_tokens: int, num_rows: int) -> float:
            nearest = min(max(num_tokens, sizes[0]), sizes[-1])
            return float(np.interp(nearest, sizes, seconds)) * max(1.0, num_tokens / nearest)

        return cls(step_s, buckets.tokens, host_s, row_s, token_s, round_s)

    def size(self, num_tokens: int) -> int:
        """What so many tokens are padded to; more than a step holds stay as they are."""
        place = bisect_left(self.sizes, num_tokens)
        return self.sizes[place] if place < len(self.sizes) else num_tokens

    def plain_s(self, num_rows: int, num_other_tokens: int) -> float:
        """A step in which nobody was asked for proposals."""
        return self.step_s(self.size(num_rows + num_other_tokens), num_rows) + self.host_s
