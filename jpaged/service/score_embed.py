"""Score and embed calls of a service: one request per part of a call, a bounded number at a time.

    read ──> token ids of all parts, bounded and checked ──> one request each ──> the results, in order

A call is admitted once; its requests share model, adapter and deadline. A full queue fails the call only if no request
was admitted; otherwise the remaining requests wait.

A part is a prompt with log-probabilities or hidden states, and one sampled token that is dropped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from jpaged.errors import InternalError, InvalidArgument, QueueFull, RequestTooLong, Unsupported
from jpaged.outputs import PoolingOutput, PoolingRequestOutput
from jpaged.service.calls import NOBODY, Call, Caller, RequestRecord, loggable_name, require_salt
from jpaged.service.input_processor import InputProcessor
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.service import Service, get_timeout
from jpaged.types import (
    Embedding,
    LoadedAdapter,
    ModelInfo,
    Pooling,
    Prompt,
    RequestOutput,
    SamplingParams,
    Score,
    Usage,
)

MAX_PARTS = 1024
"""Maximum continuations of one prompt, or prompts of one embed call."""
MAX_SCORE_SIZE = 4 << 20
"""Maximum characters and token ids of one call's prompt with each of its continuations, in total: 0.25 s of tokenizing.
"""
SCORE_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0)
EMBED_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

GivenContinuation = str | Sequence[int]


def require_parts(field: str, num: int) -> None:
    """Reject an empty or too long list.

    Raises:
        InvalidArgument: names the field.
    """
    if not 1 <= num <= MAX_PARTS:
        raise InvalidArgument(field, f"{num} are given; must be from 1 to {MAX_PARTS}")


def require_score_size(size: int) -> None:
    """Reject a prompt and continuations that are too much work together, judged by their sizes.

    Raises:
        InvalidArgument: names the continuations.
    """
    if size > MAX_SCORE_SIZE:
        problem = f"have {size} characters and token ids, each with the prompt; at most {MAX_SCORE_SIZE} per call"
        raise InvalidArgument("continuations", problem)


@contextmanager
def errors_named(field: str) -> Iterator[None]:
    """Rename the field of errors about a part's prompt to the part; errors about shared fields keep their names."""
    try:
        yield
    except InvalidArgument as error:
        if error.field in ("pooling", "adapter"):
            raise
        raise type(error)(field, error.problem) from error


@dataclass(frozen=True, slots=True)
class PromptContinuations:
    """A prompt and its continuations as token ids. Shared tokens are stored once.

    Attributes:
        prompt_ids: token ids of the prompt.
        tails: for each continuation, the number of leading prompt_ids it shares, and the token ids after them.
    """

    prompt_ids: tuple[int, ...]
    tails: tuple[tuple[int, tuple[int, ...]], ...]

    def __len__(self) -> int:
        return len(self.tails)

    def size(self, i: int) -> int:
        """Return the number of tokens of the prompt with a continuation."""
        num_shared, tail = self.tails[i]
        return num_shared + len(tail)

    def prompt(self, i: int) -> Prompt:
        """Return the prompt with a continuation, with log-probabilities requested for the continuation."""
        num_shared, tail = self.tails[i]
        return Prompt(token_ids=[*self.prompt_ids[:num_shared], *tail], prompt_logprobs_start=len(self.prompt_ids))


def continued(
    processor: InputProcessor, prompt: Prompt, continuations: Sequence[GivenContinuation]
) -> PromptContinuations:
    """Return the prompt with each continuation.

    If the prompt is a text, a text continuation is tokenized together with it as one text. The tokens of both are split
    after the number of tokens that the prompt has alone.

    Raises:
        InvalidArgument: there are none or too many, or one is empty or neither text nor token ids.
        RequestTooLong: one is not below max_model_len with the prompt.
    """
    require_parts("continuations", len(continuations))
    for i, continuation in enumerate(continuations):
        if not len(continuation):
            raise InvalidArgument(f"continuations[{i}]", "is empty")
    with errors_named("prompt"):
        prompt_ids = _fitting(processor, prompt)
    tails = []
    for i, continuation in enumerate(continuations):
        with errors_named(f"continuations[{i}]"):
            tails.append(_tail(processor, prompt, prompt_ids, continuation))
    return PromptContinuations(prompt_ids, tuple(tails))


def embeddable(processor: InputProcessor, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt.

    Raises:
        InvalidArgument: one is empty, or has an id outside the vocabulary.
        RequestTooLong: one is not below max_model_len.
    """
    found = []
    for i, prompt in enumerate(prompts):
        with errors_named(f"inputs[{i}]"):
            found.append(_fitting(processor, prompt))
    return found


def _fitting(processor: InputProcessor, prompt: Prompt) -> tuple[int, ...]:
    token_ids = processor.prefix(prompt)
    if not token_ids:
        raise InvalidArgument("prompt", "is empty: at least one token is needed")
    return token_ids if prompt.token_ids is not None else processor.prefix(Prompt(token_ids=token_ids))


def _tail(
    processor: InputProcessor, prompt: Prompt, prompt_ids: tuple[int, ...], continuation: GivenContinuation
) -> tuple[int, tuple[int, ...]]:
    if not isinstance(continuation, str):
        whole = (*prompt_ids, *continuation)
    elif prompt.text is not None:
        whole = processor.prefix(Prompt(text=prompt.text + continuation))
    else:
        whole = (*prompt_ids, *processor.tokenize(Prompt(text=continuation), add_special_tokens=False))
    if len(whole) <= len(prompt_ids):
        raise InvalidArgument("continuation", "adds no token to the prompt")
    try:
        processor.prefix(Prompt(token_ids=whole))
    except RequestTooLong as error:
        raise RequestTooLong("continuation", f"with the prompt, {error.problem}") from error
    num_shared = next((i for i, (a, b) in enumerate(zip(whole, prompt_ids, strict=False)) if a != b), len(prompt_ids))
    return num_shared, whole[num_shared:]


def get_score(output: RequestOutput) -> Score:
    """Return the score of a finished request made by `PromptContinuations.prompt`."""
    if output.prompt_logprobs is None:
        raise InternalError(f"request {output.request_id!r} has no prompt log-probabilities")
    told = [position.chosen for position in output.prompt_logprobs if position is not None]
    return Score(tuple(told), all(one.rank == 1 for one in told), output.usage)


def get_embedding(output: RequestOutput, *, normalize: bool = False) -> Embedding:
    """Return the embedding of a finished request with pooling; scaled to length 1 if `normalize`."""
    values = output.embedding
    if not isinstance(values, tuple):
        raise InternalError(f"request {output.request_id!r} has no pooled hidden states")
    if normalize:
        length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
        values = tuple(value / length for value in values)
    return Embedding(output.prompt_token_ids, values, output.usage)


def get_token_embeddings(output: RequestOutput, *, normalize: bool = False) -> NDArray[np.float32]:
    """Return the hidden state of each prompt token `[T, E]`, float32, of a finished request with the pooling "all".

    Args:
        normalize: scale each hidden state to length 1.
    """
    if not isinstance(output.embedding, memoryview):
        raise InternalError(f"request {output.request_id!r} has no hidden states of its tokens")
    values_te = np.frombuffer(output.embedding, np.float32).reshape(len(output.prompt_token_ids), -1)
    if not normalize:
        return values_te
    lengths_t1 = np.linalg.norm(values_te, axis=1, keepdims=True)
    return np.divide(values_te, np.where(lengths_t1 == 0, 1, lengths_t1), dtype=np.float32)


def get_pooling_output(output: RequestOutput, *, normalize: bool) -> PoolingRequestOutput[PoolingOutput]:
    """Return the result of `LLM.encode` from a finished request with pooling."""
    if isinstance(output.embedding, memoryview):
        data = PoolingOutput(get_token_embeddings(output, normalize=normalize))
    else:
        data = PoolingOutput(get_embedding(output, normalize=normalize).values)
    return PoolingRequestOutput(output.request_id, data, output.prompt_token_ids, output.usage.cached_tokens)


def no_classification_head(model: ModelInfo) -> Unsupported:
    """Return the error of a classification with a model that cannot classify."""
    what = f"{model.name!r} ({model.architecture}) has no classification head, as *ForSequenceClassification have"
    return Unsupported(f"classify: {what}; compare the log-likelihoods of continuations instead")


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerOptions:
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
            adapter=self.adapter and loggable_name(self.adapter),
        )


async def score(
    service: Service, asker: CallerOptions, read: Callable[[], tuple[Prompt, Sequence[GivenContinuation]]], size: int
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
    async with service.open_batch_call(asker.model, record) as model:
        parts = _Parts(service, model, asker, record)
        given = await service.run_blocking(lambda: continued(model.input_processor, *read()), size)

        async def one(i: int) -> Score:
            with errors_named(f"continuations[{i}]"):
                return get_score(await parts.complete(lambda: given.prompt(i), given.size(i), SCORE_SAMPLING))

        return await run_all(one, len(given), parts.num_at_once)


async def embed(
    service: Service,
    asker: CallerOptions,
    read: Callable[[], Sequence[Prompt]],
    size: int,
    pooling: Pooling,
    *,
    normalize: bool = False,
) -> list[Embedding]:
    """Embed each prompt that `read` decodes; `size` is their characters and token ids. Raises as `score` does."""
    return await _pool(service, asker, read, size, pooling, lambda output: get_embedding(output, normalize=normalize))


async def embed_tokens(
    service: Service, asker: CallerOptions, read: Callable[[], Sequence[Prompt]], size: int, *, normalize: bool = False
) -> list[tuple[NDArray[np.float32], Usage]]:
    """Return the hidden states of each prompt's tokens `[T, E]`, with its usage; arguments and errors as `embed`."""

    def convert(output: RequestOutput) -> tuple[NDArray[np.float32], Usage]:
        return get_token_embeddings(output, normalize=normalize), output.usage

    return await _pool(service, asker, read, size, "all", convert)


async def _pool(
    service: Service,
    asker: CallerOptions,
    read: Callable[[], Sequence[Prompt]],
    size: int,
    pooling: Pooling,
    convert: Callable[[RequestOutput], _T],
) -> list[_T]:
    require_salt(asker.cache_salt)
    record = asker.begins("embeddings")
    async with service.open_batch_call(asker.model, record) as model:
        parts = _Parts(service, model, asker, record)

        def prepare() -> list[tuple[int, ...]]:
            prompts = read()
            require_parts("inputs", len(prompts))
            return embeddable(model.input_processor, prompts)

        inputs = await service.run_blocking(prepare, size)

        async def one(i: int) -> _T:
            prompt = Prompt(token_ids=inputs[i], pooling=pooling)
            with errors_named(f"inputs[{i}]"):
                output = await parts.complete(lambda: prompt, len(inputs[i]), EMBED_SAMPLING)
            num_numbers = len(output.embedding or ())
            return await service.run_blocking(lambda: convert(output), num_numbers)

        return await run_all(one, len(inputs), parts.num_at_once)


class _Parts:
    """The requests of one call."""

    def __init__(self, service: Service, model: LoadedModel, asker: CallerOptions, record: RequestRecord) -> None:
        self._service, self._model, self._asker, self._record = service, model, asker, record
        self._adapter: str | LoadedAdapter = model.adapters.named(asker.adapter) or ""
        self._began_s = time.monotonic()
        self.num_at_once = num_at_once(model)

    async def complete(self, read: Callable[[], Prompt], size: int, sampling: SamplingParams) -> RequestOutput:
        """Run one request to its end; raise what `Service.complete` raises."""
        asker = self._asker
        sampling = dataclasses.replace(sampling, cache_salt=asker.cache_salt, priority=asker.priority)
        remaining_s = get_timeout(self._model, asker.remaining_s)
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
