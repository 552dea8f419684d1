"""The OpenAI batch file format: one JSON object per line, in and out. No I/O.

    in    {"custom_id", "method": "POST", "url": one of `URLS`, "body": {...}}
    out   {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}
          {"id", "custom_id", "response": null, "error": {"code", "message"}}    a line that never ran

A line ends only with a line feed: texts may contain any other character. An invalid line of input becomes a failed line
of output, with a custom_id of null if it has none.

`request.py` and `embeddings.py` define the bodies. A line has one prompt and one unstreamed answer, without token ids.
Log-probabilities of the prompt are `prompt_logprobs` of each choice, or of the whole answer for a chat: one entry per
token, as in vLLM.

`Answers` runs one line on a client or on the engine of this process, and returns one line of output.

A body without a seed gets one derived from its line's custom_id. A server's seed would depend on the order of requests,
so that results would depend on the server, on concurrent lines, and on whether the run was resumed.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from jpaged import json_text
from jpaged.chat import ChatOptions, images_in
from jpaged.errors import (
    InvalidArgument,
    JpagedError,
    ModelNotFound,
    RequestTooLong,
    StorageError,
    Unsupported,
    get_reason,
)
from jpaged.openai.embeddings import (
    HEAD_TASKS,
    ClassifyJob,
    EmbedJob,
    How,
    PoolingJob,
    ScoreJob,
    ScoringJob,
    SimilarityJob,
    Text,
    check_dimensions,
    check_truncation,
    classification_body,
    embed_job,
    embeddings_body,
    loglikelihoods_body,
    pooling_body,
    score_job,
    scores_body,
    similarities_body,
)
from jpaged.openai.request import Job, chat_job, completion_job, renamed, shown
from jpaged.openai.response import (
    MAX_CHARACTER_TOKENS,
    AnswerSize,
    ResponseMetadata,
    ShownToken,
    TokenText,
    build_answer,
)
from jpaged.outputs import Evaluated
from jpaged.sampling_params import NO_DEFAULTS
from jpaged.types import ModelInfo, Pooling, RequestOutput, SamplingParams, Score

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
EMBEDDINGS_URL = "/v1/embeddings"
SCORE_URL = "/v1/score"
URLS = (COMPLETIONS_URL, CHAT_URL, EMBEDDINGS_URL, SCORE_URL)
STATUSES = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "not_found_error"),
    "ALREADY_EXISTS": (409, "conflict_error"),
    "FAILED_PRECONDITION": (409, "conflict_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "cancelled_error"),
    "INTERNAL": (500, "server_error"),
    "UNKNOWN": (500, "server_error"),
    "UNIMPLEMENTED": (501, "unsupported_error"),
    "UNAVAILABLE": (503, "server_error"),
    "DEADLINE_EXCEEDED": (504, "timeout_error"),
}
"""HTTP status and error type by gRPC status. 499 is nginx's status for a client that has disconnected."""
_CODES = {"REQUEST_TOO_LONG": "context_length_exceeded", "MODEL_NOT_FOUND": "model_not_found"}
"""OpenAI's error codes that clients handle; other errors have jpaged's names."""
_BODIES = frozenset({"body", "body.file"})
_LINE_FIELDS = {"custom_id", "method", "url", "body"}


def get_status_code(error: JpagedError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, StorageError):
        return 507
    return 413 if _is_large_body(error) else STATUSES[error.grpc_status][0]


def error_body(error: JpagedError) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    param, message, code = None, str(error), get_reason(error)
    if isinstance(error, InvalidArgument):
        param = _name_in_body(error.field)
        message = f"{param}: {error.problem}"
    if not _is_large_body(error):
        code = _CODES.get(code, code)
    return {"error": {"message": message, "type": STATUSES[error.grpc_status][1], "param": param, "code": code}}


def _is_large_body(error: JpagedError) -> bool:
    return isinstance(error, RequestTooLong) and error.field in _BODIES


def _name_in_body(field: str) -> str:
    """Return the body's name of a request field."""
    for prefix in ("sampling.", "chat."):
        field = field.removeprefix(prefix)
    return "prompt" if field == "prompt.token_ids" else field


@dataclass(frozen=True, slots=True)
class Line:
    """One request of an input file, unparsed. `number` counts from 1."""

    number: int
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """An invalid line of an input file, with the error and the custom_id if there is one."""

    number: int
    custom_id: str | None
    error: InvalidArgument


def parse_file(data: bytes) -> list[Line | BadLine]:
    """Parse all lines of an input file, as `parse_lines`.

    Raises:
        InvalidArgument: it is not UTF-8, or as in `parse_lines`.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise InvalidArgument(f"line {number}", f"is not UTF-8: byte 0x{data[error.start]:02x}") from error
    return parse_lines(text.split("\n"))


def parse_lines(texts: Sequence[str]) -> list[Line | BadLine]:
    """Parse all lines of an input file; skip empty ones.

    Raises:
        InvalidArgument: no line has a custom_id, or two share one; nothing has been sent yet.
    """
    lines: list[Line | BadLine] = []
    first: dict[str, int] = {}
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        line = parse_line(number, text)
        lines.append(line)
        if line.custom_id is None:
            continue
        if line.custom_id in first:
            raise InvalidArgument(
                f"line {number}: custom_id", f"{line.custom_id!r} is also that of line {first[line.custom_id]}"
            )
        first[line.custom_id] = number
    if lines and isinstance(lines[0], BadLine) and not first:
        raise lines[0].error
    return lines


def parse_line(number: int, text: str) -> Line | BadLine:
    """Parse one line of an input file; `number` is the line number."""
    try:
        value = json_text.load_object(f"line {number}", text)
    except InvalidArgument as error:
        return BadLine(number, None, error)
    return parse_request_line(number, value)


def parse_request_line(number: int, value: Mapping[str, Any]) -> Line | BadLine:
    """Return the line of a parsed object."""
    given = value.get("custom_id")
    try:
        _check_line(f"line {number}", value)
    except InvalidArgument as error:
        return BadLine(number, given if isinstance(given, str) and given else None, error)
    return Line(number, value["custom_id"], value["url"], value["body"])


def _check_line(where: str, value: Mapping[str, Any]) -> None:
    for name in value.keys() - _LINE_FIELDS:
        raise InvalidArgument(
            f"{where}: {name[:80]}", f"unknown field; the fields are {', '.join(sorted(_LINE_FIELDS))}"
        )
    for name in sorted(_LINE_FIELDS - value.keys()):
        raise InvalidArgument(f"{where}: {name}", "is missing")
    json_text.check_values(where, value, f"{where}: ")
    if not isinstance(value["custom_id"], str) or not value["custom_id"]:
        raise InvalidArgument(f"{where}: custom_id", f"{shown(value['custom_id'])} is not a non-empty string")
    if value["method"] != "POST":
        raise InvalidArgument(f"{where}: method", f"{shown(value['method'])} is not POST")
    if value["url"] not in URLS:
        raise InvalidArgument(f"{where}: url", f"{shown(value['url'])} is not one of {', '.join(URLS)}")
    if not isinstance(value["body"], dict):
        raise InvalidArgument(f"{where}: body", "is not a JSON object")


@contextmanager
def of_body() -> Iterator[None]:
    """Prefix the fields of errors raised inside with `body.`."""
    try:
        yield
    except InvalidArgument as error:
        raise type(error)(f"body.{error.field}", error.problem) from error


def parse_job(line: Line, defaults: Mapping[str, Any] = NO_DEFAULTS) -> Job:
    """Parse the body of a line of completions or chats.

    Args:
        defaults: the model's sampling defaults, for fields that the body leaves out.

    Raises:
        InvalidArgument: a field of the body is unknown, invalid, or not supported in a file.
    """
    with of_body():
        job = (chat_job if line.url == CHAT_URL else completion_job)(line.body, defaults)
        if len(job.prompts) > 1:
            raise InvalidArgument(
                "prompt", "must be one string or one list of token ids: write one line for each prompt"
            )
        (prompt,) = job.prompts
        elsewhere = {
            "stream": job.streaming is not None,
            "echo": job.has_echo,
            "return_token_ids": job.has_token_ids,
            "prompt_embeds": prompt.embeds is not None,
            "truncation_side": prompt.truncation_side != "left",
            "add_special_tokens": not prompt.add_special_tokens or prompt.chat_options.add_special_tokens,
        }
        for name, is_asked in elsewhere.items():
            if is_asked:
                raise InvalidArgument(name, f"{shown(line.body[name])} is not supported in a file")
    return job


def parse_scoring_job(line: Line) -> ScoringJob:
    """Parse the body of a line of embeddings or scores; raise as `parse_job`."""
    with of_body():
        return embed_job(line.body) if line.url == EMBEDDINGS_URL else score_job(line.body)


def success_line(custom_id: str, job: Job, output: RequestOutput, *, model: str, token_text: TokenText) -> str:
    """Return the output line of a finished request; `token_text` must cover the tokens of the log-probabilities."""
    body = build_answer(ResponseMetadata(output.request_id, model), job, [output], token_text)
    return response_line(custom_id, output.request_id, body)


def response_line(custom_id: str, request_id: str, body: Mapping[str, Any]) -> str:
    """Return the output line of an answered request."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return _dumped({"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None})


def failure_line(custom_id: str | None, error: JpagedError) -> str:
    """Return the output line of a failed request, with the same status and body as over HTTP."""
    if isinstance(error, InvalidArgument):
        error = type(error)(error.field.removeprefix("body."), error.problem)
    number = uuid.uuid4().hex
    response = {"status_code": get_status_code(error), "request_id": number, "body": error_body(error)}
    return _dumped({"id": f"batch_req_{number}", "custom_id": custom_id, "response": response, "error": None})


def _dumped(value: Mapping[str, Any]) -> str:
    custom_id = value["custom_id"]
    try:
        (custom_id or "").encode()
    except UnicodeEncodeError:  # an unpaired surrogate in a custom_id, or in the error that names it
        return json_text.dumps(value) + "\n"
    return b"".join((*json_text.pieces(value), b"\n")).decode()


_T = TypeVar("_T")
_P = TypeVar("_P")

_BYTES_OF_NUMBER, _BYTES_OF_BASE64_NUMBER, _BYTES_OF_TOKEN = 22, 6, 60
_TOKENS_AT_ONCE = 4096
_MANY_FIELDS = 200
_CHARS_OF_FIELD = 10
MAX_PARTS_OF_CALL = 256
"""Inputs or continuations of one call: 8 MiB of vectors where they have 8192 numbers."""


class LineServer(Protocol):
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
        pooling: Pooling | None = None,
        normalize: bool | None = None,
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


class TokenEmbedder(Protocol):
    """Call that returns the hidden states of the tokens of each input."""

    async def __call__(
        self,
        inputs: Sequence[Sequence[int]],
        *,
        normalize: bool = False,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[NDArray[np.float32]]: ...


class TextClassifier(Protocol):
    """Call that returns the probabilities of each input's labels, or their logits."""

    async def __call__(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        use_activation: bool = True,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[tuple[float, ...]]: ...


class PairScorer(Protocol):
    """Call that returns the score of each pair of texts."""

    async def __call__(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        limit: int | None = None,
        use_activation: bool = True,
        adapter: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Evaluated[float]: ...


class LocalCalls(NamedTuple):
    """Calls of a server in this process, whose `embed` also takes `dimensions` and `prompt_name`.

    Attributes:
        labels: of the model's classification head; empty without one.
        score_pairs: returns the score of each pair of texts by that head; None compares vectors.
        classify: returns the probabilities of each input's labels; None without a head.
    """

    labels: Sequence[str] = ()
    score_pairs: PairScorer | None = None
    classify: TextClassifier | None = None


class WorkRunner(Protocol):
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
        model: the model of all servers. Lines that name another model are rejected.
        adapters: returns the names of loaded adapters, each of which a line may name as its model.
        work: runs the encoding of answers.
        max_bytes: limit of an answer's size, as estimated before it is computed; None for no limit.
        hidden_size: numbers of a vector; 0 if unknown.
        embed_tokens: returns the hidden states of each input's tokens `[T, E]`; None if the server has no such call.
        local: the calls of a server in this process; None for another server, which lacks them.
    """

    def __init__(
        self,
        model: ModelInfo,
        work: WorkRunner = at_once,
        adapters: Callable[[], Collection[str]] = frozenset,
        *,
        max_bytes: int | None = None,
        hidden_size: int = 0,
        embed_tokens: TokenEmbedder | None = None,
        local: LocalCalls | None = None,
    ) -> None:
        self._shapes_vectors, self._local = local is not None, local or LocalCalls()
        self._hidden_size = hidden_size
        self._embed_tokens = embed_tokens
        self._adapters = adapters
        self._names = (None, model.name, *model.aliases)
        self._max_bytes = max_bytes
        self._model = model
        self._work = work
        self._token_texts: dict[int, ShownToken] = {}

    async def answer(self, server: LineServer, line: Line) -> Answered:
        """Run a line; raise the JpagedError that it failed with, InvalidArgument if the line is invalid."""
        if line.url in (EMBEDDINGS_URL, SCORE_URL):
            return await self._scored(server, line)
        read = partial(parse_job, line, self._model.default_sampling)
        job = await self._work(read, estimate_size(line.body))
        job = replace(job, adapter=self._adapter(job.model, job.adapter))
        output = await self._complete(server, line.custom_id, job)
        await self._name_tokens(server, output)
        name, texts = job.model or self._model.name, self._token_texts.__getitem__
        text = await self._work(
            lambda: success_line(line.custom_id, job, output, model=name, token_text=texts), _estimate_chars(output)
        )
        return Answered(text, output.usage.prompt_tokens, output.usage.completion_tokens)

    async def _complete(self, server: LineServer, custom_id: str, job: Job) -> RequestOutput:
        (prompt,), sampling = job.prompts, _seeded(job.sampling, custom_id)
        options = None if prompt.messages is None else prompt.chat_options
        if prompt.fills_length:
            num_tokens = len(prompt.token_ids or ())
            if prompt.token_ids is None:
                num_tokens = len(await server.tokenize(prompt.text, messages=prompt.messages, chat_options=options))
            most = self._model.max_model_len - num_tokens
            most = min(most, prompt.max_filled or most)
            if self._max_bytes is not None:
                is_chat, vocab_size = prompt.messages is not None, self._model.vocab_size
                size = AnswerSize(sampling, vocab_size=vocab_size, is_chat=is_chat, max_bytes=self._max_bytes)
                most = min(most, size.max_filled or most)
            sampling = replace(sampling, max_tokens=max(sampling.max_num_tokens, most))
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

    async def _name_tokens(self, server: LineServer, output: RequestOutput) -> None:
        """Fetch the texts of the tokens in the output's log-probabilities."""
        named = await self._work(partial(_tokens_named, output), _estimate_chars(output))
        token_ids = sorted(named - self._token_texts.keys())
        for begin in range(0, len(token_ids), _TOKENS_AT_ONCE):
            some = token_ids[begin : begin + _TOKENS_AT_ONCE]
            try:
                shown_tokens = await self._shown_tokens(server, some)
            except Unsupported:
                shown_tokens = [await self._shown_text(server, token_id) for token_id in some]
            self._token_texts.update(zip(some, shown_tokens, strict=True))

    async def _shown_tokens(self, server: LineServer, token_ids: Sequence[int]) -> list[ShownToken]:
        """Return tokens as log-probabilities show them."""
        every = await server.token_bytes(token_ids, skip_special_tokens=False)
        plain = await server.token_bytes(token_ids, skip_special_tokens=True)
        return [
            ShownToken(data, data.decode(errors="replace"), is_special=data != kept)
            for data, kept in zip(every, plain, strict=True)
        ]

    async def _shown_text(self, server: LineServer, token_id: int) -> ShownToken:
        """Return a token of an older server, which returns no bytes of parts of characters."""
        alone = await server.detokenize([token_id], skip_special_tokens=False)
        is_special = bool(alone) and not await server.detokenize([token_id], skip_special_tokens=True)
        return ShownToken(None if "\ufffd" in alone else alone.encode(), alone, is_special=is_special)

    async def _scored(self, server: LineServer, line: Line) -> Answered:
        job = await self._work(partial(parse_scoring_job, line), estimate_size(line.body))
        if isinstance(job, EmbedJob) and job.is_binary:
            raise InvalidArgument("encoding_format", f"{job.encoding!r} is not supported in batches: use base64")
        found = await self.evaluate(server, job)

        def written() -> str:
            with of_body():
                return response_line(line.custom_id, uuid.uuid4().hex, found.body())

        text = await self._work(written, found.size)
        return Answered(text, found.prompt_tokens)

    async def evaluate(self, server: LineServer, job: ScoringJob) -> Evaluation:
        """Run a body of scores or embeddings; raise as `answer` does."""
        try:
            return await self._evaluate(server, job)
        except RequestTooLong as error:
            if isinstance(job, EmbedJob):
                field = "input" if job.messages is None else "messages"
            else:
                field = "prompt" if isinstance(job, ScoreJob) else job.name
            raise RequestTooLong(field, error.problem) from error

    async def _evaluate(self, server: LineServer, job: ScoringJob) -> Evaluation:
        how, model = job.how, job.how.model or self._model.name
        adapter = self._adapter(how.model, how.adapter) or ""
        asked: dict[str, Any] = {"adapter": adapter, "cache_salt": how.cache_salt, "priority": how.priority}
        if isinstance(job, ScoreJob):
            scores, num_tokens = await _by_calls(
                partial(server.score, job.prompt, **asked), job.continuations, self._check_scores
            )
            body = partial(loglikelihoods_body, job, scores, model=model, prompt_tokens=num_tokens)
            return Evaluation(body, 3 * sum(len(one.tokens) for one in scores), num_tokens)
        if isinstance(job, EmbedJob):
            if not job.add_special_tokens and any(isinstance(one, str) for one in job.inputs):
                raise InvalidArgument("add_special_tokens", "False is not supported in batches: send token ids")
            if job.messages is not None:
                if given := images_in(job.messages):
                    raise InvalidArgument(given[0].field, "is an image: this method takes only text")
                token_ids = await server.tokenize(messages=job.messages, chat_options=job.chat_options)
                job = replace(job, inputs=(tuple(token_ids),))
            shape: dict[str, Any] = {"dimensions": job.dimensions, "prompt_name": job.prompt_name}
            asked |= shape if self._shapes_vectors else {}
            if job.prompt_name is not None and not self._shapes_vectors:
                raise InvalidArgument("prompt_name", "is not supported by this server")
            if self._hidden_size and not self._shapes_vectors:
                check_dimensions(job, self._hidden_size)
            job = replace(job, inputs=await self._truncated(server, how, job.inputs))
            if isinstance(job, PoolingJob) and job.pooling == "all":
                if self._hidden_size:
                    check_dimensions(job, self._hidden_size)
                asked = {name: value for name, value in asked.items() if name not in shape}
                return await self._token_embeddings(server, job, asked)
            if isinstance(job, ClassifyJob) or (isinstance(job, PoolingJob) and job.task == HEAD_TASKS[0]):
                return await self._classified(job, {name: asked[name] for name in asked if name not in shape})
            num_bytes = _BYTES_OF_NUMBER if job.encoding == "float" else _BYTES_OF_BASE64_NUMBER
            vectors, num_tokens = await _by_calls(
                partial(server.embed, pooling=job.pooling, normalize=job.normalize, **asked),
                job.inputs,
                partial(self._check, "input", "numbers", num_bytes),
            )
            if isinstance(job, PoolingJob):
                body = partial(pooling_body, job, vectors, model=model, prompt_tokens=num_tokens)
            else:
                body = partial(embeddings_body, job, vectors, model=model, prompt_tokens=num_tokens)
            return Evaluation(body, sum(map(len, vectors)), num_tokens)
        return await self._compared(server, job, asked)

    async def _compared(self, server: LineServer, job: SimilarityJob, asked: Mapping[str, Any]) -> Evaluation:
        """Run a body that asks for the scores of pairs of texts: by the model's head, or by the texts' vectors."""
        how, model = job.how, job.how.model or self._model.name
        if any(job.max_tokens):
            raise InvalidArgument("max_tokens_per_doc", "is not supported in batches: use truncate_prompt_tokens")
        if self._local.score_pairs is not None and job.pooling is None:
            check_truncation(how.truncate_prompt_tokens, self._model.max_model_len)
            score = partial(self._local.score_pairs, limit=how.truncate_prompt_tokens)
            found, num_tokens = await _by_calls(
                partial(score, use_activation=job.use_activation, **asked), job.pairs, lambda found, num: None
            )
            body = partial(scores_body, job, found, model=model, prompt_tokens=num_tokens)
            return Evaluation(body, len(found), num_tokens)
        vectors, num_tokens = await _by_calls(
            partial(server.embed, pooling=job.pooling, **asked),
            await self._truncated(server, how, job.texts),
            lambda found, num: None,  # of a pair one number is written
        )
        body = partial(similarities_body, job, vectors, model=model, prompt_tokens=num_tokens)
        return Evaluation(body, sum(map(len, vectors)), num_tokens)

    async def _classified(self, job: ClassifyJob | PoolingJob, asked: Mapping[str, Any]) -> Evaluation:
        """Run a body that asks for the probabilities of labels."""
        if self._local.classify is None:
            what = f"{self._model.name!r} ({self._model.architecture}) has no classification head"
            raise Unsupported(
                f"classify: {what}, as *ForSequenceClassification have; compare the log-likelihoods of continuations "
                "instead"
            )
        found, num_tokens = await _by_calls(
            partial(self._local.classify, use_activation=job.normalize is not False, **asked),
            job.inputs,
            lambda found, num: None,
        )
        usage: dict[str, Any] = {"model": job.how.model or self._model.name, "prompt_tokens": num_tokens}
        if isinstance(job, PoolingJob):
            written = partial(pooling_body, job, found, **usage)
        else:
            written = partial(classification_body, job, found, self._local.labels, **usage)
        return Evaluation(written, sum(map(len, found)), num_tokens)

    async def _token_embeddings(self, server: LineServer, job: PoolingJob, asked: Mapping[str, Any]) -> Evaluation:
        """Run a body that asks for a vector per token; its size is known before it runs."""
        if self._embed_tokens is None:
            raise Unsupported("task: 'token_embed' is not supported by this server")
        inputs = [await server.tokenize(one) if isinstance(one, str) else one for one in job.inputs]
        num_bytes = _BYTES_OF_NUMBER if job.encoding == "float" else _BYTES_OF_BASE64_NUMBER
        self._check_size("input", "numbers", num_bytes, sum(map(len, inputs)) * self._hidden_size, len(inputs))
        found, num_tokens = await _by_calls(
            partial(self._embed_tokens, normalize=bool(job.normalize), **asked), inputs, lambda found, num: None
        )
        job, model = replace(job, inputs=tuple(map(tuple, inputs))), job.how.model or self._model.name
        body = partial(pooling_body, job, found, model=model, prompt_tokens=num_tokens)
        return Evaluation(body, sum(one.size for one in found), num_tokens)

    async def _truncated(self, server: LineServer, how: How, texts: Sequence[Text]) -> tuple[Text, ...]:
        """Return inputs of the length that the caller asks for; texts become token ids if there is one."""
        if how.truncate_prompt_tokens is None:
            return tuple(texts)
        every = [await server.tokenize(text) if isinstance(text, str) else text for text in texts]
        return tuple(how.truncated(token_ids, self._model.max_model_len) for token_ids in every)

    def _check_scores(self, scores: Sequence[Score], num_parts: int) -> None:
        self._check("continuations", "tokens", _BYTES_OF_TOKEN, [score.tokens for score in scores], num_parts)

    def _check(self, field: str, what: str, num_bytes: int, parts: Sequence[Sequence[object]], num_parts: int) -> None:
        """Refuse a body of `num_parts` if the first `parts` show that its answer would be too large."""
        self._check_size(field, what, num_bytes, sum(map(len, parts)) * num_parts // len(parts), num_parts)

    def _check_size(self, field: str, what: str, num_bytes: int, num: int, num_parts: int) -> None:
        if self._max_bytes is not None and num * num_bytes > self._max_bytes:
            size = f"an answer of about {num * num_bytes / 2**20:.0f} MiB"
            limit = f"the limit of {self._max_bytes / 2**20:g} MiB (max_response_size)"
            raise InvalidArgument(field, f"{num_parts} with {num} {what} make {size}, over {limit}")

    def check_model(self, how: How) -> None:
        """Raise ModelNotFound or InvalidArgument if a body names another model than that of the servers."""
        self._adapter(how.model, how.adapter)

    def _adapter(self, name: str | None, adapter: str | None) -> str | None:
        """Return the adapter that a body names by `adapter` or by `model`."""
        if name in self._names:
            return adapter
        if name not in self._adapters():
            raise ModelNotFound(f"model: {shown(name)} is not served; {self._model.name!r} is")
        if adapter not in (None, "", name):
            raise InvalidArgument("adapter", f"{adapter!r} is not {name!r}, the adapter that model names")
        return name


def estimate_size(body: Mapping[str, Any]) -> int:
    """Return the approximate size of a body: fields, and the lengths of their values."""
    if len(body) >= _MANY_FIELDS:
        return _CHARS_OF_FIELD * len(body)
    return sum(_CHARS_OF_FIELD + len(value) if isinstance(value, str | list | dict) else 1 for value in body.values())


def compute_seed(custom_id: str) -> int:
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


def _estimate_chars(output: RequestOutput) -> int:
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
    return replace(sampling, seed=compute_seed(custom_id))
