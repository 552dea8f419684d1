"""Load generator: sends samples at their times, limited in concurrency, and times the responses.

Ctrl-C ends it at once: requests in flight are cancelled. Send times are in seconds after the start:

    rate inf        all at once
    burstiness 1    a Poisson process: exponential gaps
    burstiness b    gaps from a gamma distribution of shape b and mean 1 / rate: below 1 in bursts, above 1 more even
    a ramp          the rate changes from a start to an end over the requests, linearly or by a constant factor

At a constant rate the times are scaled so that the last of n requests is sent at n / rate: all seeds offer the same
load.

The first turn of a conversation has a send time. Each later turn is sent after the previous answer and a delay:

    session a   send ── first token ── end ── delay ── send ...     turn 2 begins with turn 1 and its answer
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from jpaged.bench.datasets import Prompt, Sample
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
    """Send every sample at its time. If a turn fails, later turns of the same session fail without being sent.

    Args:
        backend: server to send to.
        samples: requests to send.
        times_s: seconds after the start of each conversation (`conversations`), in their order; ascending.
        max_concurrency: maximum number of requests in flight; further ones wait in the client. None for no limit.
        on_end: called with every finished request.
    """
    gate = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(sample: Sample, due_s: float) -> Trace:
        trace = Trace(sample.prompt_len or 0, turn=sample.turn)
        async with gate:
            trace.send()
            trace.delay(trace.start_s - due_s)
            try:
                await backend.send(sample, trace)
            except JpagedError as error:
                trace.fail(str(error) or type(error).__name__)
        on_end(trace)
        return trace

    traces: dict[int, Trace] = {}

    async def talk(turns: Sequence[int], due_s: float) -> None:
        history: tuple[tuple[Prompt, Prompt], ...] = ()
        first, begin_s = samples[turns[0]], due_s
        for index in turns:
            sample = samples[index] if not samples[index].adds else replace(samples[index], history=history)
            if index != turns[0]:
                due_s = time.perf_counter() + sample.delay_s
                if sample.start_s is not None and first.start_s is not None:
                    due_s = max(due_s, begin_s + sample.start_s - first.start_s)
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                due_s = time.perf_counter()
            trace = traces[index] = await one(sample, due_s)
            if trace.error:
                break
            answer = trace.text if isinstance(sample.prompt, str) else tuple(trace.token_ids)
            history = (*sample.history, (sample.prompt, answer))
        for index in turns:
            if index not in traces:
                traces[index] = Trace(samples[index].prompt_len or 0, turn=samples[index].turn)
                traces[index].fail("an earlier turn of the conversation failed")
                on_end(traces[index])

    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for turns, after_s in zip(conversations(samples), times_s.tolist(), strict=True):
            if (wait_s := start_s + after_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(talk(turns, time.perf_counter()))
    return Driven(tuple(traces[index] for index in range(len(samples))), time.perf_counter() - start_s)


def conversations(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of the samples of each session, and each independent sample alone, in order."""
    found: dict[str | int, list[int]] = {}
    for index, sample in enumerate(samples):
        found.setdefault(index if sample.session is None else sample.session, []).append(index)
    return list(found.values())


def recorded_times_s(samples: Sequence[Sample]) -> np.ndarray | None:
    """Return the recorded time of each conversation of a trace, ascending; None if one has no time."""
    times_s = [samples[turns[0]].start_s for turns in conversations(samples)]
    known_s = [time_s for time_s in times_s if time_s is not None]
    return np.array(known_s) if len(known_s) == len(times_s) else None


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
