"""/v1/responses and /v1/messages: chats in other formats, as a whole or streamed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged import json_text
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
from jpaged.errors import (
    Cancelled,
    InvalidArgument,
    RequestTooLong,
)
from jpaged.http.completions import CompletionJob, EventStream, TokenTexts, fit_turns, iter_events, parse_job, run_job
from jpaged.http.exchange import (
    JSON,
    MAX_HEADER_CHARS,
    WARNING_HEADER,
    anthropic_error,
    body_in,
    build_answer,
    error_for,
    get_answer_headers,
    get_owner,
    while_there,
)
from jpaged.http.response_store import BackgroundRun, ReferredItems, ResponseStore, StoredResponse, StoredTurn
from jpaged.openai.request import Job, Streaming
from jpaged.openai.response import ResponseMetadata, ShownToken
from jpaged.openai.responses import (
    QUEUED,
    ResponseEvents,
    ResponseFormat,
    ResponsesRequest,
    StoredTurns,
    build_response,
    continued_items,
    listed_items,
    parse_responses_request,
)
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.service import Service
from jpaged.types import OutputEvent, Prompt


async def _num_tokens(service: Service, text: str) -> int:
    """Return the number of tokens of a text."""
    if not text:
        return 0
    return len(await service.tokenize(lambda: Prompt(text=text), len(text), add_special_tokens=False))


_ON_A_THREAD = 1 << 20
"""Size of work that never runs on the event loop."""
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


_MAX_SHOWN = 80
_MAX_LISTED, _NUM_LISTED = 100, 20
"""Maximum and default number of items in one list."""
_ORDERS = ("desc", "asc")


@dataclass(frozen=True, slots=True)
class _ResponsesCall:
    """Parsed body of /v1/responses, and the turns that it continues.

    Attributes:
        heading: id and time of the response.
        num_bytes: size of the body and of the turns.
    """

    asked: CompletionJob
    heading: ResponseMetadata
    request: ResponsesRequest
    owner: str
    earlier: tuple[StoredTurn, ...]
    num_bytes: int

    def format(self, *, is_stored: bool) -> ResponseFormat:
        """Return the format of the answer."""
        return ResponseFormat(self.heading, self.request, is_stored)


class _Responses:
    """The requests of /v1/responses on one service."""

    def __init__(self, service: Service) -> None:
        options = service.state.config.http
        share = options.tenant_response_share if service.state.config.server.isolate_tenants else 1.0
        self.store = ResponseStore(
            int(options.max_response_storage * 2**20),
            options.max_stored_responses,
            share,
            options.stored_response_expiry,
        )
        self._service = service
        self._texts = TokenTexts()
        self._late_systems = _LateSystems(service)

    async def parse(self, request: Request) -> _ResponsesCall:
        """Parse a request; raise as `parse_job`, and NotFound for a response or an item that is not stored."""
        service = self._service
        model, owner = service.state.serving(), get_owner(service, request)
        body, num_bytes = await body_in(service, request)
        earlier = self._earlier(owner, body.get("previous_response_id"), num_bytes)
        size = num_bytes + sum(len(turn.items) for turn in earlier)
        stored = StoredTurns(
            lambda: itertools.chain.from_iterable(turn.read() for turn in earlier),
            ReferredItems(self.store, owner, self._max_conversation_bytes - size).find,
        )
        parsed = await service.run_blocking(
            lambda: parse_responses_request(body, model.model.default_sampling, stored), size
        )
        job = parsed.job
        if parsed.has_late_system and not await self._late_systems.are_accepted(model):
            job = await service.run_blocking(parsed.with_one_system, size)
        job = await fit_turns(service, job) if parsed.truncates else job
        if parsed.is_background:
            if not self.store.max_response_bytes:
                raise InvalidArgument("background", "requires stored responses: max_response_storage is 0")
            job = replace(job, streaming=job.streaming or Streaming())
        asked = await parse_job(service, request, lambda *_: job, body=body, is_kept=True)
        if parsed.warnings:
            get_answer_headers(request)[WARNING_HEADER] = "; ".join(parsed.warnings)[:MAX_HEADER_CHARS]
        return _ResponsesCall(asked, asked.heading(), parsed, owner, earlier, size)

    def _earlier(self, owner: str, response_id: Any, num_bytes: int) -> tuple[StoredTurn, ...]:
        """Return the turns of the response that a body continues."""
        if response_id is None:
            return ()
        if not isinstance(response_id, str):
            raise InvalidArgument("previous_response_id", f"{str(response_id)[:_MAX_SHOWN]!r} is not a string")
        found = self.store.find(owner, response_id)
        if found.is_running:
            raise InvalidArgument("previous_response_id", "is of a response that has not ended")
        size = num_bytes + sum(len(turn.items) for turn in found.turns)
        if size > (most := self._max_conversation_bytes):
            raise RequestTooLong("previous_response_id", f"the conversation has {size} bytes, over the limit of {most}")
        return found.turns

    @property
    def _max_conversation_bytes(self) -> int:
        return int(self._service.state.config.server.max_request_size * 2**20)

    async def create(self, request: Request) -> Response | EventStream:
        """Answer a request, whole or streamed, or start it in the background."""
        call = await self.parse(request)
        if call.request.is_background:
            return await self._start(request, call)
        if call.asked.job.streaming is None:
            return await while_there(request, self._whole(call), call.asked.left_s())
        keep_alive_s = self._service.state.config.http.http_keep_alive
        return EventStream(self._events(call), keep_alive_s, call.asked.left_s())

    async def _whole(self, call: _ResponsesCall) -> Response:
        service = self._service
        (output,) = await run_job(service, call.asked)
        (one,) = output.outputs
        num_reasoning = await _num_tokens(service, one.reasoning_content)
        num_logprobs = len(one.logprobs) * (1 + len(one.logprobs[0].top)) if one.logprobs else 0
        calls = sum(len(tool.arguments) for tool in one.tool_calls)
        size = len(one.text) + len(one.reasoning_content) + calls + 10 * num_logprobs

        def body(*, is_stored: bool = False) -> dict[str, Any]:
            return build_response(call.format(is_stored=is_stored), output, self._token_text(call), num_reasoning)

        if not call.request.is_stored or size > self.store.max_response_bytes:
            return await build_answer(service, body, call.num_bytes + size)
        encoded = await self._store(call, lambda is_stored: body(is_stored=is_stored), size)
        return Response(encoded, media_type="application/json")

    async def _store(self, call: _ResponsesCall, body: Callable[[bool], dict[str, Any]], size: int) -> bytes:
        """Store a response and return it encoded.

        Args:
            body: returns the response, given if it is stored.
            size: approximate number of characters.
        """

        def encode() -> StoredResponse:
            value = body(True)
            return self._entry(call, _encoded(value), value["output"])

        entry = await self._service.run_blocking(encode, call.num_bytes + size)
        if self.store.add(entry):
            return entry.body
        return await self._service.run_blocking(lambda: _encoded(body(False)), call.num_bytes + size)

    def _entry(
        self, call: _ResponsesCall, body: bytes, output: Iterable[Mapping[str, Any]] | None = None
    ) -> StoredResponse:
        given = StoredTurn(listed_items(call.asked.request_id, call.request.items))
        response_id = call.format(is_stored=True).response_id
        entry = StoredResponse(call.owner, response_id, body, call.earlier, given)
        if output is not None:
            entry.output = StoredTurn(continued_items(output))
        return entry

    def _token_text(self, call: _ResponsesCall) -> Callable[[int], ShownToken]:
        return lambda token_id: self._texts.of(call.asked.model, token_id)

    async def _events(self, call: _ResponsesCall) -> AsyncGenerator[bytes, None]:
        service, is_stored = self._service, call.request.is_stored and self.store.max_response_bytes > 0
        events = ResponseEvents(call.format(is_stored=is_stored), self._token_text(call))
        has_begun = False
        try:
            async with aclosing(iter_events(service, call.asked)) as received:
                async for _, _, event in received:
                    if not has_begun:
                        has_begun = True
                        yield await service.run_blocking(events.begin, call.num_bytes)
                    made = await self._made(events, event)
                    if made:
                        yield made
            num_reasoning, size = await _num_tokens(service, events.reasoning), events.size

            def body(is_stored: bool) -> dict[str, Any]:
                return events.end(num_reasoning, is_stored=is_stored)

            if is_stored:
                encoded = await self._store(call, body, size)
            else:
                encoded = await service.run_blocking(lambda: _encoded(body(False)), call.num_bytes + size)
            yield events.last(events.status, encoded)
        except Exception as error:
            if not has_begun:
                raise
            made, failed = events.fail(error_for(error), is_stored=False)
            encoded = await service.run_blocking(lambda: _encoded(failed), call.num_bytes + events.size)
            yield made + events.last("failed", encoded)

    async def _made(self, events: ResponseEvents, event: OutputEvent) -> bytes:
        """Return the events of the answer for an event of the request."""
        num_logprobs = 10 * len(event.logprobs) * (1 + len(event.logprobs[0].top)) if event.logprobs else 0
        return await self._service.run_blocking(lambda: events.of(event), num_logprobs)

    async def _start(self, request: Request, call: _ResponsesCall) -> Response | EventStream:
        """Start a request in the background; return its response before it has begun, or a stream of it."""
        how = call.format(is_stored=True)
        entry = await self._service.run_blocking(
            lambda: self._entry(call, _encoded(how.body(status=QUEUED))), call.num_bytes
        )
        queued = entry.body
        entry.run = run = BackgroundRun(keeps_events=call.request.job.streaming is not None)
        if not self.store.add(entry):
            problem = f"the response has {entry.num_bytes} bytes, more than a tenant's share of max_response_storage"
            raise RequestTooLong("input", problem)
        run.task = asyncio.create_task(self._run(call, entry, run))
        run.task.add_done_callback(lambda _: run.end())
        try:
            await while_there(request, _admitted(run))
        except Cancelled:  # the client is gone without the id
            await _stop(run)
            self.store.remove(entry)
            raise
        if not run.keeps_events:
            return Response(queued, media_type="application/json")
        return EventStream(run.follow(-1), self._service.state.config.http.http_keep_alive)

    async def _run(self, call: _ResponsesCall, entry: StoredResponse, run: BackgroundRun) -> None:
        """Run a request to its end, and store its response."""
        how, store = call.format(is_stored=True), self.store
        events = ResponseEvents(how, self._token_text(call))
        try:
            async with aclosing(iter_events(self._service, call.asked, run.set_admitted)) as received:
                store.add_events(entry, await self._service.run_blocking(events.queue, call.num_bytes))
                is_queued = True
                async for _, _, event in received:
                    if is_queued:
                        is_queued = False
                        begun = await self._service.run_blocking(
                            lambda: (events.start(), _encoded(how.body())), call.num_bytes
                        )
                        store.add_events(entry, begun[0])
                        store.update(entry, begun[1], entry.output)
                    store.add_events(entry, await self._made(events, event))
            body = events.end(await _num_tokens(self._service, events.reasoning), is_stored=True)
        except asyncio.CancelledError:
            made, body = events.cancel()
            store.add_events(entry, made)
        except Exception as error:
            if not run.admitted.done():
                run.admitted.set_exception(error)
                store.remove(entry)
            made, body = events.fail(error_for(error), is_stored=True)
            store.add_events(entry, made)
        run.is_ending = True
        size = call.num_bytes + events.size
        encoded, output = await self._service.run_blocking(lambda: _encoded_parts(body), size)
        store.update(entry, encoded, output)
        store.add_events(entry, events.last(body["status"], encoded))
        run.end()

    async def get(self, request: Request) -> Response | EventStream:
        """Return a stored response, or a stream of the events of one in the background."""
        entry, query = self._found(request), request.query_params
        if query.get("stream", "false").lower() not in _TRUE:
            return Response(entry.body, media_type="application/json")
        if entry.run is None:
            raise InvalidArgument("stream", "true requires a response that was created with stream and background")
        after = _integer(request, "starting_after", -1, low=-1, high=1 << 53)
        return EventStream(entry.run.follow(after), self._service.state.config.http.http_keep_alive)

    async def cancel(self, request: Request) -> Response:
        """Cancel a response in the background; one that has ended stays as it is."""
        entry = self._found(request)
        if entry.run is None:
            raise InvalidArgument("response_id", "Cannot cancel a synchronous response.")
        await _stop(entry.run)
        return Response(entry.body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Remove a response; one that is running is cancelled."""
        entry = self._found(request)
        if entry.run is not None:
            await _stop(entry.run)
        self.store.remove(entry)
        return JSON({"id": entry.response_id, "object": "response", "deleted": True})

    async def list_input_items(self, request: Request) -> Response:
        """Return a page of the items that a response was generated from, with those of the turns that it continues."""
        entry, query = self._found(request), request.query_params
        limit = _integer(request, "limit", _NUM_LISTED, low=1, high=_MAX_LISTED)
        order, after = query.get("order", _ORDERS[0]), query.get("after")
        if order not in _ORDERS:
            raise InvalidArgument("order", f"{order[:_MAX_SHOWN]!r} is not one of {', '.join(_ORDERS)}")
        turns = (*entry.earlier, entry.input)

        def page() -> dict[str, Any]:
            items = [item for turn in turns for item in turn.read()]
            if order == _ORDERS[0]:
                items.reverse()
            begin = 0
            if after is not None:
                begin = 1 + next((i for i, item in enumerate(items) if item["id"] == after), len(items))
                if begin > len(items):
                    raise InvalidArgument("after", f"{after[:_MAX_SHOWN]!r} is the id of none of the items")
            data = items[begin : begin + limit]
            ends = (
                {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
            )
            return {"object": "list", "data": data, **ends, "has_more": begin + limit < len(items)}

        size = sum(len(turn.items) for turn in turns)
        encoded = await self._service.run_blocking(lambda: _encoded(page()), size)
        return Response(encoded, media_type="application/json")

    async def count(self, request: Request) -> Response:
        """Return the number of tokens of a body."""
        call = await self.parse(request)
        token_ids = await self._service.tokenize(lambda: call.asked.job.prompts[0], None)
        return JSON({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    def _found(self, request: Request) -> StoredResponse:
        return self.store.find(get_owner(self._service, request), request.path_params["response_id"])


_TRUE = ("true", "1")


def _encoded(value: object) -> bytes:
    return b"".join(json_text.pieces(value))


def _encoded_parts(body: Mapping[str, Any]) -> tuple[bytes, StoredTurn]:
    """Return a response encoded, and its answer as a turn."""
    return _encoded(body), StoredTurn(continued_items(body["output"]))


async def _admitted(run: BackgroundRun) -> None:
    await asyncio.shield(run.admitted)


async def _stop(run: BackgroundRun) -> None:
    """Cancel a request that runs in the background, and wait for its end."""
    if run.task is not None and not run.is_over:
        if not (run.is_ending or run.task.cancelling()):
            run.task.cancel()
        await asyncio.wait((run.task,))


def _integer(request: Request, name: str, default: int, *, low: int, high: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    digits = given.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20) or not low <= int(given) <= high:
        raise InvalidArgument(name, f"{given[:_MAX_SHOWN]!r} is not an integer from {low} to {high}")
    return int(given)


def response_routes(service: Service) -> list[Route]:
    """Return the routes of /v1/responses."""
    responses, path = _Responses(service), "/v1/responses/{response_id:path}"
    return [
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/v1/responses/input_tokens", responses.count, methods=["POST"]),
        Route(f"{path}/cancel", responses.cancel, methods=["POST"]),
        Route(f"{path}/input_items", responses.list_input_items, methods=["GET"]),
        Route(path, responses.get, methods=["GET"]),
        Route(path, responses.delete, methods=["DELETE"]),
    ]


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
            get_answer_headers(request)[WARNING_HEADER] = "; ".join(parsed[-1].warnings)[:MAX_HEADER_CHARS]
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
