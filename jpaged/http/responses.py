"""/v1/responses and /v1/messages: chats in other formats, as a whole or streamed. Nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.anthropic import (
    MESSAGES_URL,
    PING,
    MessageEvents,
    MessageFormat,
    MessagesRequest,
    build_message_answer,
    event_bytes,
    parse_messages_request,
)
from jpaged.errors import InvalidArgument, NotFound
from jpaged.http.completions import CompletionJob, EventStream, TokenTexts, iter_events, parse_job, run_job
from jpaged.http.exchange import (
    JSON,
    MAX_HEADER_CHARS,
    anthropic_error,
    build_answer,
    error_for,
    get_answer_headers,
    while_there,
)
from jpaged.openai.request import Job
from jpaged.openai.responses import ResponseEvents, build_response, parse_responses_request
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.service import Service
from jpaged.types import Prompt


def response_routes(service: Service) -> list[Route]:
    """Return the routes of /v1/responses."""
    texts = TokenTexts()

    async def create(request: Request) -> Response | EventStream:
        echoed: dict[str, Any] = {}

        def read(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Job:
            asking = parse_responses_request(body, defaults)
            echoed.update(asking.echoed)
            return asking.job

        asked = await parse_job(service, request, read, is_kept=True)
        if asked.job.streaming is not None:
            keep_alive_s = service.state.config.http.http_keep_alive
            return EventStream(_events(service, asked, echoed, texts), keep_alive_s, asked.left_s())
        return await while_there(request, _whole(service, asked, echoed, texts), asked.left_s())

    async def count(request: Request) -> Response:
        asked = await parse_job(service, request, lambda body, defaults: parse_responses_request(body, defaults).job)
        token_ids = await service.tokenize(lambda: asked.job.prompts[0], None)
        return JSON({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    async def missing(request: Request) -> Response:
        raise NotFound("response_id: responses are not stored: each is returned only to its own request")

    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/input_tokens", count, methods=["POST"]),
        Route("/v1/responses/{rest:path}", missing, methods=["GET", "POST", "DELETE"]),
    ]


async def _whole(service: Service, asked: CompletionJob, echoed: Mapping[str, Any], texts: TokenTexts) -> Response:
    (output,) = await run_job(service, asked)
    (one,) = output.outputs
    num_reasoning = await _num_tokens(service, one.reasoning_content)

    def body() -> dict[str, Any]:
        return build_response(
            asked.heading(), echoed, output, lambda token_id: texts.of(asked.model, token_id), num_reasoning
        )

    num_told = len(one.logprobs) * (1 + len(one.logprobs[0].top)) if one.logprobs else 0
    return await build_answer(service, body, len(one.text) + len(one.reasoning_content) + 10 * num_told)


async def _events(
    service: Service, asked: CompletionJob, echoed: Mapping[str, Any], texts: TokenTexts
) -> AsyncGenerator[bytes, None]:
    events = ResponseEvents(asked.heading(), echoed, lambda token_id: texts.of(asked.model, token_id))
    has_begun = False
    try:
        async with aclosing(iter_events(service, asked)) as told:
            async for _, _, event in told:
                if not has_begun:
                    has_begun = True
                    yield events.begin()
                num_told = 10 * len(event.logprobs) * (1 + len(event.logprobs[0].top)) if event.logprobs else 0
                made = await service.run_blocking(lambda: events.of(event), num_told)  # noqa: B023 - called before the next
                if made:
                    yield made
        yield events.end(await _num_tokens(service, events.reasoning))
    except Exception as error:
        if not has_begun:
            raise
        yield events.failed(error_for(error))


async def _num_tokens(service: Service, text: str) -> int:
    """Return the number of tokens of a text."""
    if not text:
        return 0
    return len(await service.tokenize(lambda: Prompt(text=text), len(text), add_special_tokens=False))


_ON_A_THREAD = 1 << 20
"""Size of work that never runs on the event loop."""
_WARNING_HEADER = "x-jpaged-warning"
"""Header of fields of a body that were ignored."""
_SYSTEM_AFTER_USER = tuple(
    Prompt(
        messages=[
            {"role": "system", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "system", "content": late},
            {"role": "user", "content": "d"},
        ]
    )
    for late in ("c", "another text")
)


@dataclass(frozen=True, slots=True)
class _MessagesCall:
    """Parsed body of /v1/messages, and its chat."""

    asked: CompletionJob
    request: MessagesRequest

    def format(self) -> MessageFormat:
        """Return the format of the answer."""
        cache = self.asked.model.config.cache
        has_cache = cache.enable_prefix_caching and cache.kv_policy == "paged"
        return MessageFormat(self.asked.heading(), self.request, (cache.block_size or 0) if has_cache else 0)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Rename the fields in errors of the chat to those of the body."""
        try:
            yield
        except InvalidArgument as error:
            raise self.request.renamed(error) from error


class _LateSystems:
    """Checks if a model's chat template accepts system messages after the first message; one result for each model."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._model: LoadedModel | None = None
        self._are_accepted = False

    async def are_accepted(self, model: LoadedModel) -> bool:
        """Return False if the template rejects them, or leaves them out."""
        if model is not self._model:
            try:
                one = await self._service.tokenize(lambda: _SYSTEM_AFTER_USER[0], None)
                other = await self._service.tokenize(lambda: _SYSTEM_AFTER_USER[1], None)
                self._are_accepted = list(one) != list(other)
            except InvalidArgument:
                self._are_accepted = False
            self._model = model
        return self._are_accepted


def message_routes(service: Service) -> list[Route]:
    """Return the routes of /v1/messages."""
    late_systems = _LateSystems(service)

    async def parse(request: Request, *, counts: bool = False) -> _MessagesCall:
        parsed: list[MessagesRequest] = []
        can_think = bool(service.state.serving().model.reasoning_parser)

        def read(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Job:
            parsed.append(parse_messages_request(body, defaults, can_think=can_think, counts=counts))
            return parsed[-1].job

        asked = await parse_job(service, request, read)
        if parsed[-1].late_systems and not await late_systems.are_accepted(asked.model):
            asked = replace(asked, job=await service.run_blocking(parsed[-1].with_reminders, _ON_A_THREAD))
        if parsed[-1].warnings:
            get_answer_headers(request)[_WARNING_HEADER] = "; ".join(parsed[-1].warnings)[:MAX_HEADER_CHARS]
        return _MessagesCall(asked, parsed[-1])

    async def create(request: Request) -> Response | EventStream:
        call = await parse(request)
        left_s = call.asked.left_s()
        if call.asked.job.streaming is None:
            return await while_there(request, _whole_message(service, call), left_s)
        return EventStream(
            _message_events(service, call),
            service.state.config.http.http_keep_alive,
            left_s,
            keep_alive=PING,
            failed=lambda error: event_bytes(anthropic_error(error, call.asked.request_id)),
        )

    async def count(request: Request) -> Response:
        call = await parse(request, counts=True)
        with call.naming():
            token_ids = await service.tokenize(lambda: call.asked.job.prompts[0], None)
        edits = {"context_management": {"original_input_tokens": len(token_ids)}} if call.request.reports_edits else {}
        return JSON({"input_tokens": len(token_ids), **edits})

    return [
        Route(MESSAGES_URL, create, methods=["POST"]),
        Route(f"{MESSAGES_URL}/count_tokens", count, methods=["POST"]),
    ]


async def _whole_message(service: Service, call: _MessagesCall) -> Response:
    with call.naming():
        (output,) = await run_job(service, call.asked)
    (one,) = output.outputs
    num_thinking = await _num_tokens(service, one.reasoning_content)
    how = call.format()
    size = len(one.text) + len(one.reasoning_content) + sum(len(tool.arguments) for tool in one.tool_calls)
    return await build_answer(service, lambda: build_message_answer(how, output, num_thinking), size)


async def _message_events(service: Service, call: _MessagesCall) -> AsyncGenerator[bytes, None]:
    events = MessageEvents(call.format())
    with call.naming():
        async with aclosing(iter_events(service, call.asked)) as received:
            async for _, _, event in received:
                if made := events.of(event):
                    yield made
    yield events.end(await _num_tokens(service, events.thinking))
