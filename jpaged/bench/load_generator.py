"""Load generator: sends samples at their times, limited in concurrency, and times the responses.

Ctrl-C ends it at once: requests in flight are cancelled. Send times are in seconds after the start:

    rate inf        all at once
    burstiness 1    a Poisson process: exponential gaps
    burstiness b    gaps from a gamma distribution of shape b and mean 1 / rate: below 1 in bursts, above 1 more even
    a ramp          the rate changes from a start to an end over the requests, linearly or by a constant factor

At a constant rate the times are scaled so that the last of n requests is sent at n / rate: all seeds offer the same
load.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from jpaged.bench.datasets import Sample
from jpaged.bench.metrics import Trace
from jpaged.errors import InvalidArgument, JpagedError

BACKENDS = ("jpaged", "openai", "openai-chat")
"""jpaged over gRPC, and OpenAI's API: completions and chat completions."""


class BenchmarkBackend(Protocol):
    """Server interface for the load generator."""

    async def send(self, sample: Sample, trace: Trace) -> None:
        """Send one request and record its response in `trace`.

        Raises:
            JpagedError: the request failed.
        """

    async def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True, slots=True)
class Driven:
    """Finished run: one trace per sample, in order."""

    traces: tuple[Trace, ...]
    duration_s: float


async def drive(
    backend: BenchmarkBackend,
    samples: Sequence[Sample],
    times_s: np.ndarray,
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[Trace], None] = lambda trace: None,
) -> Driven:
    """Send every sample at its time.

    Args:
        backend: server to send to.
        samples: requests to send.
        times_s: seconds after the start of each; [len(samples)], ascending.
        max_concurrency: maximum number of requests in flight; further ones wait in the client. None for no limit.
        on_end: called with every finished request.
    """
    gate = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(sample: Sample, due_s: float) -> Trace:
        trace = Trace(sample.prompt_len or 0)
        async with gate:
            trace.send()
            trace.delay(trace.start_s - due_s)
            try:
                await backend.send(sample, trace)
            except JpagedError as error:
                trace.fail(str(error) or type(error).__name__)
        on_end(trace)
        return trace

    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for sample, after_s in zip(samples, times_s.tolist(), strict=True):
            if (wait_s := start_s + after_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(one(sample, time.perf_counter())))
    return Driven(tuple(task.result() for task in tasks), time.perf_counter() - start_s)


async def warm_up(backend: BenchmarkBackend, sample: Sample, count: int, max_concurrency: int | None) -> None:
    """Send one sample `count` times, outside the measurement.

    Raises:
        JpagedError: it failed, as the others would.
    """
    gate = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one() -> None:
        async with gate:
            trace = Trace(sample.prompt_len or 0)
            trace.send()
            await backend.send(sample, trace)

    for result in await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


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
class ArrivalProcess:
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
