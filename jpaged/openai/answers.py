"""One line -> one line of output, run on a client or on the engine of this process.

A body without a seed gets one derived from its line's custom_id. A server's seed would depend on the order of requests,
so that results would depend on the server, on concurrent lines, and on whether the run was resumed.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from jpaged.chat import ChatOptions
from jpaged.completions import Evaluated
from jpaged.errors import InvalidArgument, ModelNotFound, RequestTooLong, Unsupported
from jpaged.openai.bodies import Job, renamed, shown
from jpaged.openai.choices import MAX_CHARACTER_TOKENS, AnswerSize, ShownToken
from jpaged.openai.lines import (
    EMBEDDINGS_URL,
    SCORE_URL,
    Line,
    job_of,
    of_body,
    response_line,
    scoring_job_of,
    success_line,
)
from jpaged.openai.scoring import (
    EmbedJob,
    ScoreJob,
    ScoringJob,
    embeddings_body,
    loglikelihoods_body,
    similarities_body,
)
from jpaged.types import ModelInfo, Pooling, RequestOutput, SamplingParams, Score

_T = TypeVar("_T")
_P = TypeVar("_P")

_BYTES_OF_NUMBER, _BYTES_OF_BASE64_NUMBER, _BYTES_OF_TOKEN = 22, 6, 60
_TOKENS_AT_ONCE = 4096
_MANY_FIELDS = 200
_CHARS_OF_FIELD = 10
MAX_PARTS_OF_CALL = 256
"""Inputs or continuations of one call: 8 MiB of vectors where they have 8192 numbers."""


class Server(Protocol):
    """Server that runs lines, with the methods of `AsyncClient`."""

    async def complete(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat_options: ChatOptions | None = None,
        adapter: str = "",
    ) -> RequestOutput: ...

    async def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        *,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[Score]: ...

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling = "last",
        normalize: bool = False,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[tuple[float, ...]]: ...

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat_options: ChatOptions | None = None,
    ) -> Sequence[int]: ...

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    async def token_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Sequence[bytes]:
        """Return the bytes of each token; raise Unsupported if the server returns texts alone."""
        ...


class Work(Protocol):
    """Runs work on `size` characters, ids or numbers; may use a thread if `size` is large."""

    async def __call__(self, work: Callable[[], _T], size: int) -> _T: ...


async def at_once(work: Callable[[], _T], size: int) -> _T:
    """Run work here and now: nothing else waits."""
    return work()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of a body of scores or embeddings.

    Attributes:
        body: builds the response body.
        size: how many numbers the body has.
    """

    body: Callable[[], dict[str, Any]]
    size: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A line of output, and what it took."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Answers:
    """Answers lines, and caches the texts of tokens in log-probabilities.

    Args:
        model: the model of all servers; a line that names another is rejected.
        adapters: returns the names of loaded adapters, each of which a line may name as its model.
        work: runs the encoding of answers.
        max_bytes: limit of an answer's size, as estimated before it is computed; None for no limit.
    """

    def __init__(
        self,
        model: ModelInfo,
        work: Work = at_once,
        adapters: Callable[[], Collection[str]] = frozenset,
        *,
        max_bytes: int | None = None,
    ) -> None:
        self._adapters = adapters
        self._max_bytes = max_bytes
        self._model = model
        self._work = work
        self._token_texts: dict[int, ShownToken] = {}

    async def answer(self, server: Server, line: Line) -> Answered:
        """Run a line; raise the JpagedError that it failed with, InvalidArgument if the line is invalid."""
        if line.url in (EMBEDDINGS_URL, SCORE_URL):
            return await self._scored(server, line)
        job = await self._work(partial(job_of, line), size_of(line.body))
        job = replace(job, adapter=self._adapter(job.model, job.adapter))
        output = await self._complete(server, line.custom_id, job)
        await self._name_tokens(server, output)
        name, texts = job.model or self._model.name, self._token_texts.__getitem__
        text = await self._work(lambda: success_line(line, output, model=name, token_text=texts), _num_told(output))
        return Answered(text, output.usage.prompt_tokens, output.usage.completion_tokens)

    async def _complete(self, server: Server, custom_id: str, job: Job) -> RequestOutput:
        (prompt,), sampling = job.prompts, _seeded(job.sampling, custom_id)
        options = None if prompt.messages is None else prompt.chat_options
        if prompt.fills_length:
            num_tokens = len(prompt.token_ids or ())
            if prompt.token_ids is None:
                num_tokens = len(await server.tokenize(prompt.text, messages=prompt.messages, chat_options=options))
            most = self._model.max_model_len - num_tokens
            if self._max_bytes is not None:
                is_chat, vocab_size = prompt.messages is not None, self._model.vocab_size
                size = AnswerSize(sampling, vocab_size=vocab_size, is_chat=is_chat, max_bytes=self._max_bytes)
                most = min(most, size.max_filled or most)
            sampling = replace(sampling, max_tokens=max(sampling.max_tokens, most))
        try:
            return await server.complete(
                prompt.text,
                sampling,
                prompt_token_ids=prompt.token_ids,
                messages=prompt.messages,
                chat_options=options,
                adapter=job.adapter or "",
            )
        except InvalidArgument as error:
            raise renamed(error, job.names) from error

    async def _name_tokens(self, server: Server, output: RequestOutput) -> None:
        """Fetch the texts of the tokens in the output's log-probabilities."""
        named = await self._work(partial(_tokens_named, output), _num_told(output))
        token_ids = sorted(named - self._token_texts.keys())
        for begin in range(0, len(token_ids), _TOKENS_AT_ONCE):
            some = token_ids[begin : begin + _TOKENS_AT_ONCE]
            try:
                shown_tokens = await self._shown_tokens(server, some)
            except Unsupported:
                shown_tokens = [await self._shown_text(server, token_id) for token_id in some]
            self._token_texts.update(zip(some, shown_tokens, strict=True))

    async def _shown_tokens(self, server: Server, token_ids: Sequence[int]) -> list[ShownToken]:
        """Return tokens as log-probabilities show them."""
        every = await server.token_bytes(token_ids, skip_special_tokens=False)
        plain = await server.token_bytes(token_ids, skip_special_tokens=True)
        return [
            ShownToken(data, data.decode(errors="replace"), is_special=data != kept)
            for data, kept in zip(every, plain, strict=True)
        ]

    async def _shown_text(self, server: Server, token_id: int) -> ShownToken:
        """Return a token of an older server, which returns no bytes of parts of characters."""
        alone = await server.detokenize([token_id], skip_special_tokens=False)
        is_special = bool(alone) and not await server.detokenize([token_id], skip_special_tokens=True)
        return ShownToken(None if "\ufffd" in alone else alone.encode(), alone, is_special=is_special)

    async def _scored(self, server: Server, line: Line) -> Answered:
        job = await self._work(partial(scoring_job_of, line), size_of(line.body))
        found = await self.evaluate(server, job)

        def written() -> str:
            with of_body():
                return response_line(line.custom_id, uuid.uuid4().hex, found.body())

        text = await self._work(written, found.size)
        return Answered(text, found.prompt_tokens)

    async def evaluate(self, server: Server, job: ScoringJob) -> Evaluation:
        """Run a body of scores or embeddings; raise as `answer` does."""
        try:
            return await self._evaluate(server, job)
        except RequestTooLong as error:
            field = "input" if isinstance(job, EmbedJob) else "prompt" if isinstance(job, ScoreJob) else "text_1"
            raise RequestTooLong(field, error.problem) from error

    async def _evaluate(self, server: Server, job: ScoringJob) -> Evaluation:
        how, model = job.how, job.how.model or self._model.name
        adapter = self._adapter(how.model, how.adapter) or ""
        asked: dict[str, Any] = {"adapter": adapter, "cache_salt": how.cache_salt, "priority": how.priority}
        if isinstance(job, ScoreJob):
            scores, num_tokens = await _by_calls(
                lambda some: server.score(job.prompt, some, **asked), job.continuations, self._check_scores
            )
            body = partial(loglikelihoods_body, job, scores, model=model, prompt_tokens=num_tokens)
            return Evaluation(body, 3 * sum(len(one.tokens) for one in scores), num_tokens)
        if isinstance(job, EmbedJob):
            num_bytes = _BYTES_OF_NUMBER if job.encoding == "float" else _BYTES_OF_BASE64_NUMBER
            vectors, num_tokens = await _by_calls(
                lambda some: server.embed(some, pooling=job.pooling, normalize=job.normalize, **asked),
                job.inputs,
                partial(self._check, "input", "numbers", num_bytes),
            )
            body = partial(embeddings_body, job, vectors, model=model, prompt_tokens=num_tokens)
        else:
            vectors, num_tokens = await _by_calls(
                lambda some: server.embed(some, pooling=job.pooling, **asked),
                job.texts,
                lambda found, num: None,  # of a pair one number is written
            )
            body = partial(similarities_body, job, vectors, model=model, prompt_tokens=num_tokens)
        return Evaluation(body, sum(map(len, vectors)), num_tokens)

    def _check_scores(self, scores: Sequence[Score], num_parts: int) -> None:
        self._check("continuations", "tokens", _BYTES_OF_TOKEN, [score.tokens for score in scores], num_parts)

    def _check(self, field: str, what: str, num_bytes: int, parts: Sequence[Sequence[object]], num_parts: int) -> None:
        """Refuse a body of `num_parts` if the first `parts` show that its answer would be too large."""
        num = sum(map(len, parts)) * num_parts // len(parts)
        if self._max_bytes is not None and num * num_bytes > self._max_bytes:
            size = f"an answer of about {num * num_bytes / 2**20:.0f} MiB"
            limit = f"the limit of {self._max_bytes / 2**20:g} MiB (max_response_size)"
            raise InvalidArgument(field, f"{num_parts} with {num} {what} make {size}, over {limit}")

    def _adapter(self, name: str | None, adapter: str | None) -> str | None:
        """Return the adapter that a body names by `adapter` or by `model`."""
        if name in (None, self._model.name):
            return adapter
        if name not in self._adapters():
            raise ModelNotFound(f"model: {shown(name)} is not served; {self._model.name!r} is")
        if adapter not in (None, "", name):
            raise InvalidArgument("adapter", f"{adapter!r} is not {name!r}, the adapter that model names")
        return name


def size_of(body: Mapping[str, Any]) -> int:
    """Return the approximate size of a body: fields, and the lengths of their values."""
    if len(body) >= _MANY_FIELDS:
        return _CHARS_OF_FIELD * len(body)
    return sum(_CHARS_OF_FIELD + len(value) if isinstance(value, str | list | dict) else 1 for value in body.values())


def seed_of(custom_id: str) -> int:
    """Return the seed of a line without one: the same on every run."""
    return int.from_bytes(hashlib.sha256(custom_id.encode(errors="surrogatepass")).digest()[:8])


async def _by_calls(
    call: Callable[[Sequence[_P]], Awaitable[Evaluated[_T]]],
    parts: Sequence[_P],
    check: Callable[[Sequence[_T], int], None],
) -> tuple[list[_T], int]:
    """Return the results of all parts, and their tokens; split them into calls that a server accepts.

    Args:
        check: raises InvalidArgument if the answers so far show that all are too large.
    """
    found: list[_T] = []
    num_tokens = 0
    for begin in range(0, len(parts), MAX_PARTS_OF_CALL):
        answered = await call(parts[begin : begin + MAX_PARTS_OF_CALL])
        found += answered
        num_tokens += answered.usage.prompt_tokens
        check(found, len(parts))
    return found, num_tokens


def _num_told(output: RequestOutput) -> int:
    """Return the approximate number of characters of an output."""
    lists = [output.prompt_logprobs or (), *(one.logprobs or () for one in output.outputs)]
    first = [positions[-1] for positions in lists if positions]
    widest = max((1 + len(one.top) + len(one.asked) for one in first if one is not None), default=0)
    num_texts = widest * sum(map(len, lists))
    return sum(len(one.text) + len(one.reasoning_content) for one in output.outputs) + 8 * num_texts


def _tokens_named(output: RequestOutput) -> set[int]:
    lists = [output.prompt_logprobs or (), *(one.logprobs or () for one in output.outputs)]
    positions = (position for some in lists for position in some if position is not None)
    found = {token.token_id for one in positions for token in (one.chosen, *one.top, *one.asked)}
    return found.union(output.prompt_token_ids[-MAX_CHARACTER_TOKENS:]) if found else found


def _seeded(sampling: SamplingParams, custom_id: str) -> SamplingParams:
    if sampling.seed is not None or sampling.is_greedy:
        return sampling
    return replace(sampling, seed=seed_of(custom_id))
