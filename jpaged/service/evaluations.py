"""Scores and embeddings of a service: one call is as many requests as it has parts, a bounded number at a time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jpaged.errors import JpagedError
from jpaged.service.scoring import (
    EMBED_SAMPLING,
    SCORE_SAMPLING,
    GivenContinuation,
    continued,
    embedding_of,
    require_parts,
    score_of,
)
from jpaged.service.service import Call, Service
from jpaged.types import Embedding, Pooling, Prompt, SamplingParams, Score

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who asks, and with what, as in `service.Call`."""

    model: str | None = None
    tenant: str = ""
    remaining_s: float | None = None
    adapter: str = ""
    cache_salt: str = ""

    def call(self, prompt: Prompt, sampling: SamplingParams) -> Call:
        """One request of it."""
        sampling = dataclasses.replace(sampling, cache_salt=self.cache_salt)
        return Call(
            read=lambda: (prompt, sampling),
            size=prompt.size,
            model=self.model,
            tenant=self.tenant,
            remaining_s=self.remaining_s,
            is_whole=True,
            adapter=self.adapter,
        )


async def score(
    service: Service, asker: Asker, read: Callable[[], tuple[Prompt, Sequence[GivenContinuation]]], size: int
) -> list[Score]:
    """How likely each continuation of a prompt is.

    Args:
        read: decodes the prompt and its continuations; called on a thread where they are large.
        size: characters or token ids of all of them.

    Raises:
        JpagedError: one of them cannot run, or has failed; the others are ended.
    """
    wholes, num_prompt = await service.work(lambda processor: continued(processor, *read()), size, asker.model)

    async def one(token_ids: list[int]) -> Score:
        call = asker.call(Prompt(token_ids=token_ids, told_from=num_prompt), SCORE_SAMPLING)
        return score_of(await service.complete(call))

    return await _all(one, wholes, service.max_num_at_once)


async def embed(
    service: Service, asker: Asker, prompts: Sequence[Prompt], pooling: Pooling, *, normalize: bool = False
) -> list[Embedding]:
    """The vector of each prompt; raises as `score` does."""
    require_parts("inputs", len(prompts))

    async def one(prompt: Prompt) -> Embedding:
        call = asker.call(dataclasses.replace(prompt, pooling=pooling), EMBED_SAMPLING)
        return embedding_of(await service.complete(call), normalize=normalize)

    return await _all(one, prompts, service.max_num_at_once)


_P = TypeVar("_P")


async def _all(work: Callable[[_P], Awaitable[_T]], parts: Sequence[_P], num_at_once: int) -> list[_T]:
    """Works on all parts, so many at a time; the first error ends it."""
    free, tasks = asyncio.Semaphore(num_at_once), list[asyncio.Task[_T]]()

    async def run(part: _P) -> _T:
        async with free:
            return await work(part)

    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(run(part)) for part in parts]
    except* JpagedError as errors:
        error = errors
    else:
        return [task.result() for task in tasks]
    first: BaseException = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    raise first
