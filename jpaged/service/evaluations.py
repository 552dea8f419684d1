"""Score and embed calls of a service: one request per part of a call, a bounded number at a time.

    read ──> token ids of all parts, bounded and checked ──> one request each ──> the results, in order

A call is admitted once; its requests share model, adapter and deadline. A full queue fails the call only if no request
was admitted; otherwise the remaining requests wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jpaged.errors import QueueFull
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.names import require_salt, told_name
from jpaged.service.records import NOBODY, Caller, RequestRecord
from jpaged.service.scoring import (
    EMBED_SAMPLING,
    SCORE_SAMPLING,
    GivenContinuation,
    continued,
    embeddable,
    embedding_of,
    errors_named,
    require_parts,
    require_score_size,
    score_of,
)
from jpaged.service.service import Call, Service, time_of
from jpaged.types import Embedding, LoadedAdapter, Pooling, Prompt, RequestOutput, SamplingParams, Score

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Caller and options of a score or embed call, as in `service.Call`.

    Attributes:
        priority: of each request.
        cache_salt: of each request.
    """

    model: str | None = None
    tenant: str = ""
    remaining_s: float | None = None
    adapter: str = ""
    cache_salt: str = ""
    priority: int = 0
    caller: Caller = NOBODY

    def begins(self, operation: str) -> RequestRecord:
        """Return the record of a call that begins."""
        return RequestRecord(
            operation=operation,
            tenant=self.tenant,
            caller=self.caller,
            adapter=self.adapter and told_name(self.adapter),
        )


async def score(
    service: Service, asker: Asker, read: Callable[[], tuple[Prompt, Sequence[GivenContinuation]]], size: int
) -> list[Score]:
    """Score each continuation of a prompt by its log-likelihood.

    Args:
        read: decodes the prompt and its continuations; called on a thread if they are large.
        size: total characters and token ids of the prompt with each continuation.

    Raises:
        JpagedError: one of them is invalid or has failed; the others are aborted.
    """
    require_score_size(size)
    require_salt(asker.cache_salt)
    record = asker.begins("score")
    async with service.several(asker.model, record) as model:
        parts = _Parts(service, model, asker, record)
        given = await service.work(lambda: continued(model.input_processor, *read()), size)

        async def one(i: int) -> Score:
            with errors_named(f"continuations[{i}]"):
                return score_of(await parts.complete(lambda: given.prompt(i), given.size(i), SCORE_SAMPLING))

        return await run_all(one, len(given), parts.num_at_once)


async def embed(
    service: Service,
    asker: Asker,
    read: Callable[[], Sequence[Prompt]],
    size: int,
    pooling: Pooling,
    *,
    normalize: bool = False,
) -> list[Embedding]:
    """Embed each prompt that `read` decodes; `size` is their characters and token ids. Raises as `score` does."""
    require_salt(asker.cache_salt)
    record = asker.begins("embeddings")
    async with service.several(asker.model, record) as model:
        parts = _Parts(service, model, asker, record)

        def prepare() -> list[tuple[int, ...]]:
            prompts = read()
            require_parts("inputs", len(prompts))
            return embeddable(model.input_processor, prompts)

        inputs = await service.work(prepare, size)

        async def one(i: int) -> Embedding:
            prompt = Prompt(token_ids=inputs[i], pooling=pooling)
            with errors_named(f"inputs[{i}]"):
                output = await parts.complete(lambda: prompt, len(inputs[i]), EMBED_SAMPLING)
            return embedding_of(output, normalize=normalize)

        return await run_all(one, len(inputs), parts.num_at_once)


class _Parts:
    """The requests of one call."""

    def __init__(self, service: Service, model: LoadedModel, asker: Asker, record: RequestRecord) -> None:
        self._service, self._model, self._asker, self._record = service, model, asker, record
        self._adapter: str | LoadedAdapter = model.adapters.named(asker.adapter) or ""
        self._began_s = time.monotonic()
        self.num_at_once = num_at_once(model)

    async def complete(self, read: Callable[[], Prompt], size: int, sampling: SamplingParams) -> RequestOutput:
        """Run one request to its end; raise what `Service.complete` raises."""
        asker = self._asker
        sampling = dataclasses.replace(sampling, cache_salt=asker.cache_salt, priority=asker.priority)
        remaining_s = time_of(self._model, asker.remaining_s)
        if remaining_s is not None:
            remaining_s -= time.monotonic() - self._began_s
        call = Call(
            read=lambda: (read(), sampling),
            size=size,
            tenant=asker.tenant,
            remaining_s=remaining_s,
            is_whole=True,
            adapter=self._adapter,
            caller=asker.caller,
            record=self._record,
        )
        return await self._service.complete(call, self._model)


def num_at_once(model: LoadedModel) -> int:
    """Return how many parts of a call may run concurrently: the number of rows of a step, over all replicas."""
    engine = model.engine
    return min(engine.geometry.max_num_seqs * max(1, len(engine.replica_loads())), engine.max_num_in_flight)


async def run_all(work: Callable[[int], Awaitable[_T]], num: int, num_at_once: int) -> list[_T]:
    """Run all parts of a call, `num_at_once` at a time; the first error ends the call.

    A part that finds the queue full is retried, unless no part of the call is running or done.
    """
    free, num_open, num_done = asyncio.Semaphore(num_at_once), 0, 0

    async def run(i: int) -> _T:
        nonlocal num_open, num_done
        async with free:
            while True:
                num_open += 1
                try:
                    result = await work(i)
                except QueueFull as error:
                    if num_open == 1 and not num_done:
                        raise
                    wait_s = error.retry_after_s
                else:
                    num_done += 1
                    return result
                finally:
                    num_open -= 1
                await asyncio.sleep(wait_s)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(i)) for i in range(num)]
    except BaseExceptionGroup as errors:  # the first error has cancelled all others
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
