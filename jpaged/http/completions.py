"""/v1/completions and /v1/chat/completions, as a whole or streamed.

`CompletionJob` is one HTTP request after its body is parsed. It has one request of the service per prompt: their events
as they come, or their outputs. `EventStream` sends events as an ASGI response:

    before the first event   an error is a status, as everywhere
    nothing for a while      `: keep-alive`, a comment, after the headers, so that proxies keep the connection open
    an error in the middle   data: {"error": {...}}, and the stream ends
    the client disconnects   the source of the events is closed at once, which aborts its requests

A send blocks while the client's connection is full; events are merged at their source in the meantime.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jpaged.chat import ChatMessages
from jpaged.config import HttpOptions
from jpaged.engine.tokenizer import Tokenizer, is_special_token
from jpaged.errors import Cancelled, DeadlineExceeded, InvalidArgument, JpagedError, ModelNotFound, RequestTooLong
from jpaged.http.exchange import build_answer as json_answer_of
from jpaged.http.exchange import (
    error_for,
    get_answer_headers,
    get_caller,
    get_remaining_s,
    get_request_id,
    get_tenant,
    name_request,
    note_ignored_fields,
    read_body,
    while_connected,
    while_there,
)
from jpaged.json_text import PIECE_BYTES
from jpaged.openai.lines import error_body
from jpaged.openai.request import Job, Streaming, chat_job, completion_job, renamed, shown
from jpaged.openai.response import AnswerSize, ChunkBuilder, ResponseMetadata, ShownToken, build_answer, sent_event
from jpaged.outputs import new_completions
from jpaged.service.calls import Call, Caller, RequestHandle, RequestRecord
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.score_embed import num_at_once, run_all
from jpaged.service.service import Service
from jpaged.types import LoadedAdapter, OutputEvent, PositionLogprobs, Prompt, RequestOutput


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """A job with the context of the HTTP request.

    Attributes:
        model: the model that runs it.
        adapter: the resolved adapter of all its requests.
        caller: identity of the caller.
        headers: additional response headers; code may add to them before the response begins.
        size: limit of the response.
        began_s: `time.monotonic` at the start, from which the timeout counts.
    """

    job: Job
    model: LoadedModel
    adapter: LoadedAdapter | None
    request_id: str
    tenant: str
    remaining_s: float | None
    caller: Caller
    headers: dict[str, str]
    size: AnswerSize
    began_s: float = field(default_factory=time.monotonic)

    def heading(self) -> ResponseMetadata:
        """Return the common fields of the responses."""
        name, has_versions = self.job.model or self.model.model.name, self.model.config.scheduler.enable_sleep_mode
        return ResponseMetadata(self.request_id, name, has_versions=has_versions)

    def left_s(self) -> float | None:
        """Return the remaining time of the caller's timeout."""
        return None if self.remaining_s is None else self.remaining_s - (time.monotonic() - self.began_s)

    def record(self) -> RequestRecord:
        """Return the record of a job of several prompts, which begins."""
        adapter = "" if self.adapter is None else self.adapter.name
        return RequestRecord(operation="text_completion", tenant=self.tenant, caller=self.caller, adapter=adapter)

    def call(self, number: int, record: RequestRecord | None = None) -> Call:
        """Return the service call of one prompt; one of several uses the record of the whole."""
        prompt = self.job.prompts[number]
        is_one = len(self.job.prompts) == 1
        return Call(
            read=lambda: (prompt, self.job.sampling),
            size=None if prompt.messages is not None else prompt.size,
            request_id=self.request_id if is_one else f"{self.request_id}-{number}",
            tenant=self.tenant,
            remaining_s=self.left_s(),
            is_whole=self.job.streaming is None,
            adapter=self.adapter or "",
            caller=self.caller,
            record=record,
        )

    def add_known_prompts(self) -> None:
        """Count the prompts given as token ids; raise InvalidArgument if the response would be too large."""
        self._add(sum(len(prompt.token_ids) for prompt in self.job.prompts if prompt.token_ids is not None))

    def add_prompt(self, number: int, num_tokens: int) -> None:
        """Count a prompt given as text, once its tokens are known; raise as `add_known_prompts`."""
        if self.job.prompts[number].token_ids is None:
            self._add(num_tokens)

    def _add(self, num_tokens: int) -> None:
        try:
            self.size.add_prompt(num_tokens)
        except InvalidArgument as error:
            raise renamed(error, self.job.names) from error

    @contextmanager
    def naming(self, number: int) -> Iterator[None]:
        """Rename the fields in errors of a prompt's request to the caller's."""
        try:
            yield
        except InvalidArgument as error:
            told, prompts = renamed(error, self.job.names), self.job.prompts
            num_embeds = sum(one.embeds is not None for one in prompts)  # these are the first
            if len(prompts) - num_embeds > 1 and told.field.partition(".")[0] == "prompt":
                told = type(error)(f"prompt[{number - num_embeds}]", error.problem)
            if num_embeds > 1 and told.field == "prompt_embeds":
                told = type(error)(f"prompt_embeds[{number}]", error.problem)
            raise told from error


JobReader = Callable[[Mapping[str, Any], Mapping[str, Any]], Job]
"""Reads a body, given the model's sampling defaults."""


async def parse_job(
    service: Service,
    request: Request,
    read: JobReader,
    *,
    body: Mapping[str, Any] | None = None,
    is_kept: bool = False,
) -> CompletionJob:
    """Parse a request.

    Args:
        read: reads a body, given the model's sampling defaults.
        body: the request's, if it has been read.
        is_kept: a stream's last event repeats the whole answer.

    Raises:
        JpagedError: it is invalid or unsupported, or the server cannot serve it now.
    """
    began_s = time.monotonic()
    model = service.state.serving()
    tenant, remaining_s = get_tenant(request), get_remaining_s(request)
    get_request_id(request)
    defaults = model.model.default_sampling
    if body is None:
        job = await read_body(service, request, lambda given: read(given, defaults))
    else:
        job = read(body, defaults)
        note_ignored_fields(service, request, body)
    job = with_server_defaults(job, service.state.config.http)
    try:
        size = AnswerSize(
            job.sampling,
            num_prompts=len(job.prompts),
            vocab_size=model.model.vocab_size,
            is_chat=job.is_chat,
            has_echo=job.has_echo,
            counts_generated=is_kept or job.streaming is None,
            max_bytes=int(service.state.config.http.max_response_size * 2**20),
        )
    except InvalidArgument as error:
        raise renamed(error, job.names) from error
    if size.max_filled is not None:
        most = size.max_filled
        prompts = tuple(
            replace(one, max_filled=min(most, one.max_filled or most)) if one.fills_length else one
            for one in job.prompts
        )
        job = replace(job, prompts=prompts)
    return CompletionJob(
        size=size,
        job=job,
        model=model,
        adapter=_adapter(model, job),
        request_id=name_request(request, job.request_id),
        tenant=tenant,
        remaining_s=remaining_s,
        caller=replace(get_caller(request), user=job.user or ""),
        headers=get_answer_headers(request),
        began_s=began_s,
    )


async def fit_turns(service: Service, job: Job) -> Job:
    """Return the job of a chat, without its oldest turns if they exceed the model's length.

    A turn begins with a message of the user, and the last one stays. So do messages of the roles system and developer.
    """
    (prompt,) = job.prompts
    messages = prompt.messages or ()
    room = service.state.serving().model.max_model_len - job.sampling.max_num_tokens
    turns = [i for i, one in enumerate(messages) if one["role"] == "user"]

    def begin_at(turn: int) -> Prompt:
        kept = [one for i, one in enumerate(messages) if i >= turns[turn] or one["role"] in ("system", "developer")]
        return replace(prompt, messages=ChatMessages(map(dict, kept)))

    async def fits(one: Prompt) -> bool:
        try:
            return len(await service.tokenize(lambda: one, None)) <= room
        except RequestTooLong:
            return False

    if len(turns) < 2 or await fits(prompt):
        return job
    low, high = 1, len(turns) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(begin_at(middle)) else (middle + 1, high)
    return replace(job, prompts=(begin_at(low),))


def with_server_defaults(job: Job, options: HttpOptions) -> Job:
    """Return a job with what the server's options add to every request."""
    if options.return_tokens_as_token_ids:
        job = replace(job, names_token_ids=True)
    if options.enable_force_include_usage and job.streaming is not None:
        job = replace(job, streaming=Streaming(include_usage=True, continuous_usage_stats=True))
    return job


def _adapter(model: LoadedModel, job: Job) -> LoadedAdapter | None:
    """Return the adapter of a job, named by `adapter` or, for OpenAI's clients, by `model`."""
    if job.model is None or job.model in model.names:
        return model.adapters.named(job.adapter or "")
    if job.model not in {one.name for one in model.adapters.loaded()}:
        raise ModelNotFound(f"model: {shown(job.model)} is not served; {model.model.name!r} is")
    if job.adapter not in (None, job.model):
        raise InvalidArgument("adapter", f"{job.adapter!r} is not {job.model!r}, the adapter that model names")
    return model.adapters.named(job.model or "")


JobEvent = tuple[int, RequestHandle, OutputEvent]
"""Index of the prompt, its request, and the event."""
_MAX_WAITING = 64
"""Maximum queued events of several prompts; further ones are merged in their streams."""


async def run_job(service: Service, asked: CompletionJob) -> list[RequestOutput]:
    """Run a job to its end; return the output of each prompt.

    Raises:
        JpagedError: a request is refused or has failed; the others are aborted.
    """
    asked.add_known_prompts()
    if len(asked.job.prompts) == 1:
        return [await _output(service, asked, 0)]
    record = asked.record()
    async with service.open_batch_call(None, record) as model:
        asked.headers.update(record.headers)
        return await run_all(
            lambda number: _output(service, asked, number, model, record),
            len(asked.job.prompts),
            num_at_once(model),
        )


async def _output(
    service: Service,
    asked: CompletionJob,
    number: int,
    model: LoadedModel | None = None,
    record: RequestRecord | None = None,
) -> RequestOutput:
    completions = new_completions(asked.job.sampling)
    with asked.naming(number):
        async with service.generate(asked.call(number, record), model) as generation:
            asked.add_prompt(number, len(generation.prompt_token_ids))
            asked.headers.update(generation.record.headers)
            async for event in generation:
                completions.add(event)
            return completions.output(generation.request_id, None, generation.prompt_token_ids)


async def iter_events(
    service: Service, asked: CompletionJob, on_admitted: Callable[[], None] | None = None
) -> AsyncGenerator[JobEvent, None]:
    """Run a job and yield its events; closing it aborts running requests. Raises as `run_job`.

    Args:
        on_admitted: called when the engine has accepted the request of a job with one prompt.
    """
    asked.add_known_prompts()
    if len(asked.job.prompts) > 1:
        async with aclosing(_events_of_several(service, asked)) as told:
            async for one in told:
                yield one
        return
    with asked.naming(0):
        async with service.generate(asked.call(0)) as generation:
            asked.add_prompt(0, len(generation.prompt_token_ids))
            asked.headers.update(generation.record.headers)
            if on_admitted is not None:
                on_admitted()
            async for event in generation:
                yield 0, generation, event


async def _events_of_several(service: Service, asked: CompletionJob) -> AsyncGenerator[JobEvent, None]:
    waiting: asyncio.Queue[JobEvent | Exception | None] = asyncio.Queue(_MAX_WAITING)
    record = asked.record()

    async def tell(number: int, model: LoadedModel) -> None:
        with asked.naming(number):
            async with service.generate(asked.call(number, record), model) as generation:
                asked.add_prompt(number, len(generation.prompt_token_ids))
                async for event in generation:
                    await waiting.put((number, generation, event))

    async def tell_all(model: LoadedModel) -> None:
        try:
            await run_all(lambda number: tell(number, model), len(asked.job.prompts), num_at_once(model))
        except Exception as error:
            await waiting.put(error)
        else:
            await waiting.put(None)

    async with service.open_batch_call(None, record) as model:
        asked.headers.update(record.headers)
        telling = asyncio.create_task(tell_all(model))
        try:
            while (one := await waiting.get()) is not None:
                if isinstance(one, Exception):
                    raise one
                yield one
        finally:
            telling.cancel()
            await asyncio.wait((telling,))


async def get_prompt_text(
    service: Service, asked: CompletionJob, number: int, prompt_token_ids: tuple[int, ...]
) -> str:
    """Return the text of a prompt, as given or from the tokens after truncation."""
    given = asked.job.prompts[number].text
    if given is not None and asked.job.echoes_text(number):
        return given
    text = await service.detokenize(prompt_token_ids, skip_special_tokens=False)
    if asked.job.is_only_told or not text.endswith("\ufffd"):
        return text
    return text.removesuffix(_begun_character(asked.model.tokenizer, prompt_token_ids))


class TokenTexts:
    """Cache of the texts of a model's tokens; at most one entry per token."""

    def __init__(self) -> None:
        self._model: LoadedModel | None = None
        self._texts: dict[int, ShownToken] = {}

    def of(self, model: LoadedModel, token_id: int) -> ShownToken:
        """Return one token as log-probabilities show it."""
        if model is not self._model:
            self._model, self._texts = model, {}
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = shown_token(model.tokenizer, token_id)
        return text


def shown_token(tokenizer: Tokenizer, token_id: int) -> ShownToken:
    """Return a token as log-probabilities show it."""
    alone = tokenizer.decode([token_id], skip_special_tokens=False)
    return ShownToken(tokenizer.token_bytes(token_id), alone, is_special=is_special_token(tokenizer, token_id))


def _begun_character(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the placeholder of a character that the last tokens begin and the next may complete; "" without one."""
    data = b"".join(map(tokenizer.token_bytes, token_ids[-4:]))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return "\ufffd" if decoder.getstate()[0] else ""


KEEP_ALIVE = b": keep-alive\n\n"
_EVENTS = b"text/event-stream; charset=utf-8"
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """A response of server-sent events.

    Args:
        events: encoded events; closed at the end in any case.
        keep_alive_s: send `keep_alive` after this time without an event.
        remaining_s: timeout from the client; None for no limit.
        keep_alive: a comment, or an event that clients ignore.
        failed: encodes the last event of a stream that fails.
        content_type: type of the response, if events have another encoding.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keep_alive_s: float,
        remaining_s: float | None = None,
        *,
        keep_alive: bytes = KEEP_ALIVE,
        failed: Callable[[JpagedError], bytes] = lambda error: sent_event(error_body(error)),
        content_type: bytes = _EVENTS,
    ) -> None:
        self._headers = [(b"content-type", content_type), *_HEADERS]
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._remaining_s = remaining_s
        self._keep_alive_event = keep_alive
        self._failed = failed
        self._sending = asyncio.Lock()
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; raise errors of the events that come before anything was sent."""
        try:
            await while_connected(receive, self._answer(send), self._remaining_s)
        except (Cancelled, DeadlineExceeded) as error:
            if not self._num_sent:
                raise
            await self._end(send, error)

    async def _answer(self, send: Send) -> None:
        keeping = asyncio.create_task(self._keep_alive(send))
        try:
            async with aclosing(self._events) as events:
                try:
                    async for event in events:
                        await self._send(send, event)
                except Exception as error:
                    if not self._num_sent:
                        raise
                    await self._end(send, error)
                    return
            await self._end(send)
        finally:
            keeping.cancel()

    async def _end(self, send: Send, error: Exception | None = None) -> None:
        if error is not None or not self._num_sent:
            await self._send(send, b"" if error is None else self._failed(error_for(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            num_before = self._num_sent
            await asyncio.sleep(self._keep_alive_s)
            if self._num_sent == num_before and not self._sending.locked():
                await self._send(send, self._keep_alive_event)

    async def _send(self, send: Send, event: bytes) -> None:
        async with self._sending:
            self._num_sent += 1
            if self._num_sent == 1:
                await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            for begin in range(0, len(event), PIECE_BYTES):
                piece = event[begin : begin + PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})


def completion_routes(service: Service) -> list[Route]:
    """Return the routes of /v1/completions and /v1/chat/completions."""
    texts = TokenTexts()

    def answering(read: JobReader) -> Callable[[Request], Awaitable[Any]]:
        async def answer(request: Request) -> Response | EventStream:
            return await answer_job(service, request, await parse_job(service, request, read), texts)

        return answer

    return [
        Route("/v1/completions", answering(completion_job), methods=["POST"]),
        Route("/v1/chat/completions", answering(chat_job), methods=["POST"]),
    ]


async def answer_job(
    service: Service, request: Request, asked: CompletionJob, texts: TokenTexts
) -> Response | EventStream:
    """Return the response to a job, whole or streamed."""
    if asked.job.streaming is not None:
        keep_alive_s = service.state.config.http.http_keep_alive
        return EventStream(_chunks(service, asked, texts), keep_alive_s, asked.left_s())
    return await while_there(request, _whole(service, asked, texts), asked.left_s())


async def _whole(service: Service, asked: CompletionJob, texts: TokenTexts) -> Response:
    outputs, heading = await run_job(service, asked), asked.heading()
    prompt_texts = []
    if asked.job.has_echo:
        for number, output in enumerate(outputs):
            prompt_texts.append(await get_prompt_text(service, asked, number, output.prompt_token_ids))

    def body() -> dict[str, Any]:
        return build_answer(heading, asked.job, outputs, lambda token_id: texts.of(asked.model, token_id), prompt_texts)

    return await json_answer_of(service, body, sum(map(_size_of_output, outputs)), outputs)


async def _chunks(service: Service, asked: CompletionJob, texts: TokenTexts) -> AsyncGenerator[bytes, None]:
    chunks = ChunkBuilder(asked.heading(), asked.job, lambda token_id: texts.of(asked.model, token_id))
    prompt_texts: dict[int, str] = {}
    async with aclosing(iter_events(service, asked)) as told:
        async for number, generation, event in told:
            token_ids = generation.prompt_token_ids
            if asked.job.has_echo and number not in prompt_texts:
                prompt_texts[number] = await get_prompt_text(service, asked, number, token_ids)
            prompt_text = prompt_texts.get(number, "")
            if event.logprobs or event.prompt_logprobs:
                size = len(event.text) + _size((*event.logprobs, *event.prompt_logprobs))
                chunk = await service.run_blocking(
                    lambda: chunks.of(number, event, token_ids, prompt_text),  # noqa: B023 - called before the next
                    size,
                )
            else:
                chunk = chunks.of(number, event, token_ids, prompt_text)
            if chunk:
                yield chunk
    yield chunks.end()


def _size_of_output(output: RequestOutput) -> int:
    """Return the approximate number of characters of an output in JSON."""
    size = sum(len(one.text) + len(one.token_ids) + _size(one.logprobs or ()) for one in output.outputs)
    return size + _size((output.prompt_logprobs or ())[1:])


def _size(told: Sequence[PositionLogprobs | None]) -> int:
    """Estimate the characters of log-probabilities, from the width of the first position."""
    first = told[0] if told else None
    return 0 if first is None else 10 * len(told) * (1 + len(first.top) + len(first.asked))
