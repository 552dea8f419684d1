"""Load generator: sends samples at their times, limited in concurrency, and times the responses.

Ctrl-C ends it at once: requests in flight are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jpaged.bench.datasets import Sample
from jpaged.bench.trace import Trace
from jpaged.errors import JpagedError

BACKENDS = ("jpaged", "openai", "openai-chat")
"""jpaged over gRPC, and OpenAI's API: completions and chat completions."""


class Backend(Protocol):
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
    backend: Backend,
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


async def warm_up(backend: Backend, sample: Sample, count: int, max_concurrency: int | None) -> None:
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
