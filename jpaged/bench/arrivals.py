"""Send times of requests, in seconds after the start.

    rate inf        all at once
    burstiness 1    a Poisson process: exponential gaps
    burstiness b    gaps from a gamma distribution of shape b and mean 1 / rate: below 1 in bursts, above 1 more even
    a ramp          the rate changes from a start to an end over the requests, linearly or by a constant factor

At a constant rate the times are scaled so that the last of n requests is sent at n / rate: all seeds offer the same
load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jpaged.errors import InvalidArgument

RampStrategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class Ramp:
    """Request rate that rises or falls over a run.

    Attributes:
        start_rps: requests per second at the first request.
        end_rps: requests per second at the last.
    """

    strategy: RampStrategy
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        _require_positive("--ramp-up-start-rps", self.start_rps)
        _require_positive("--ramp-up-end-rps", self.end_rps)

    def rates(self, count: int) -> np.ndarray:
        """Return the rate at each of `count` requests; [count]."""
        progress = np.arange(count) / max(1, count - 1)
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * (self.end_rps / self.start_rps) ** progress


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival process of requests.

    Attributes:
        rate: requests per second; inf sends all at once.
        burstiness: shape of the gaps' gamma distribution; inf makes all gaps equal.
        ramp: replaces the rate.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: Ramp | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise InvalidArgument("--request-rate", f"{self.rate} is not above the limit of 0")
        if not self.burstiness > 0:
            raise InvalidArgument("--burstiness", f"{self.burstiness} is not above the limit of 0")

    def times_s(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return the send times of `count` requests in seconds after the start, ascending; [count]."""
        rates = np.full(count, self.rate) if self.ramp is None else self.ramp.rates(count)
        if math.isinf(rates[0]):
            return np.zeros(count)
        is_even = math.isinf(self.burstiness)
        times = np.cumsum(1 / rates if is_even else rng.gamma(self.burstiness, 1 / (rates * self.burstiness)))
        if self.ramp is None and times[-1] > 0:
            times *= count / self.rate / times[-1]
        return times


def _require_positive(flag: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InvalidArgument(flag, f"{value} is not above the limit of 0 and finite")
