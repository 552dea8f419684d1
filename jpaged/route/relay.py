"""Forwards calls that one server answers; a stream resumes on another server if its server fails, as in the client.

    caller ──request──> Course ──> server A ── bytes, bytes, gone
         <─────────────── bytes, bytes
                        Course ──> server B ── message ──> the new part of it
         <────────────────────────────────── bytes

A message is decoded for the tokens that another server would need, and forwarded as the original bytes unless it has to
be rewritten after a resume. One message per stream is in memory: a slow caller blocks its server, and nothing is
buffered here except in gRPC's windows (fleet.py keeps them small).
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from grpc import aio

from jpaged._proto.v1 import inference_pb2
from jpaged.client.routing.endpoints import Endpoint
from jpaged.client.routing.resumable_stream import ResumableStream
from jpaged.client.routing.retry import ResumePolicy, RetryState
from jpaged.client.routing.servers import run_tries
from jpaged.errors import AlreadyExists, Unavailable
from jpaged.route.fleet import BackendPool
from jpaged.route.methods import (
    Metadata,
    forwarded_metadata,
    get_owner,
    get_response_metadata,
    get_tenant,
    has_unread_key,
)
from jpaged.route.prefix_table import PromptPrefix, parse_prompt_prefix

FIRST_WITHIN_S = 1.5
"""Time that a call waits for an available server before it starts; about as long as a client retries."""
_ACCEPTED_KEY = "x-jpaged-request-id"
_parse = inference_pb2.GenerateResponse.FromString
FlightKey = tuple[bytes, str]


class CountedTries(RetryState):
    """Attempts of one call that count by server, and notify the directory of their end.

    Attributes:
        last: the server of the last attempt.
        flight: owner and id of the stream.
    """

    def __init__(
        self,
        fleet: BackendPool,
        key: PromptPrefix | None,
        timeout_s: float | None,
        resuming: ResumePolicy | None = None,
    ) -> None:
        super().__init__(fleet.endpoints, key, timeout_s, resuming)
        self._counts = fleet.counts
        self._directory = fleet.directory
        self._beginning = key
        self._at: int | None = None
        self.last: Endpoint | None = None
        self.flight: FlightKey = (b"", "")

    def enter(self) -> Endpoint:
        """See `RetryState`."""
        self.last = super().enter()
        self._counts.begun[self.last.name] += 1
        self._at = self._directory.get_life(self.last.name)
        return self.last

    def leave(self) -> None:
        """See `RetryState`."""
        super().leave()
        if self._at is not None and self._beginning is not None:
            self._directory.ended(self._beginning, self._at)
        self._at = None

    @property
    def name(self) -> str:
        """Name of the server of the last attempt."""
        return "" if self.last is None else self.last.name

    def wait_s(self, error: Any, *, has_begun: bool = False) -> float:
        """See `RetryState`."""
        wait_s = super().wait_s(error, has_begun=has_begun)
        self._counts.retried[self.name] += 1
        return wait_s


class Proxy:
    """Forwards calls that one server answers.

    Attributes:
        flights: current attempt of each stream, by owner and id; its server is None between two servers.
    """

    def __init__(self, fleet: BackendPool, resuming: ResumePolicy | None) -> None:
        self._fleet = fleet
        self._counts = fleet.counts
        self._resuming = resuming
        self.flights: dict[FlightKey, CountedTries] = {}

    async def one(self, method: str, content: Any, context: Any) -> bytes:
        """Forward a unary call to one server.

        Raises:
            JpagedError: the server's error.
        """
        metadata = forwarded_metadata(context, self._fleet.router_id)
        beginning = None if isinstance(content, bytes) else _get_beginning(content, metadata)
        sent = content if isinstance(content, bytes) else content.SerializeToString()
        tries = CountedTries(self._fleet, beginning, context.time_remaining())
        await self._fleet.until_any(FIRST_WITHIN_S)
        call = await run_tries(tries, method, sent, metadata, lambda: None)
        if trailing := get_response_metadata(await call.trailing_metadata()):
            context.set_trailing_metadata(trailing)
        answer: bytes = await call
        return answer

    async def generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        """Forward a stream, resuming it on other servers if necessary.

        Raises:
            JpagedError: the error that ended it.
        """
        metadata = forwarded_metadata(context, self._fleet.router_id)
        owner = get_owner(metadata)
        if not request.HasField("request_id"):
            request.MergeFrom(inference_pb2.GenerateRequest(request_id=uuid.uuid4().hex))  # the same id on each server
        key = (owner, request.request_id)
        if key in self.flights:
            raise AlreadyExists(f"request_id: a request {request.request_id!r} is in flight")
        beginning = _get_beginning(request, metadata)
        tries = CountedTries(self._fleet, beginning, context.time_remaining(), self._resuming)
        tries.flight = key
        self.flights[key] = tries
        try:
            await self._fleet.until_any(FIRST_WITHIN_S)
            await self._run(ResumableStream(request, tries, metadata), tries, context)
        finally:
            tries.leave()
            self._land(tries)

    async def _run(self, course: ResumableStream, tries: CountedTries, context: Any) -> None:
        number, is_told = self._fleet.model_number, False
        try:
            while True:
                call = course.call
                try:
                    if not is_told:
                        is_told = await self._report_accepted(call, context)
                    await self._pass_messages(course, tries, context)
                    course.require_end()
                    if trailing := get_response_metadata(await call.trailing_metadata()):
                        context.set_trailing_metadata(trailing)
                    return
                except aio.AioRpcError as error:
                    if course.has_ended:
                        return
                    await asyncio.sleep(course.wait_s(error))
                await self._wait_for_server(course)
                if self._fleet.model_number != number:
                    raise Unavailable("the servers now have another model, with which this stream cannot continue")
                course.begin_again()
                if course.is_elsewhere:
                    self._counts.resumed[tries.name] += 1
        finally:
            course.call.cancel()
            course.end()

    def _land(self, tries: CountedTries) -> None:
        """Free a stream's id, although its caller may not have read all of it."""
        if self.flights.get(tries.flight) is tries:
            del self.flights[tries.flight]

    async def _wait_for_server(self, course: ResumableStream) -> None:
        is_resuming = self._resuming is not None and course.has_begun
        within_s = self._resuming.within_s if self._resuming is not None and is_resuming else FIRST_WITHIN_S
        await self._fleet.until_any(within_s)

    async def _report_accepted(self, call: Any, context: Any) -> bool:
        """Forward the initial metadata once a server has accepted the request; return True if it has."""
        initial = get_response_metadata(await call.initial_metadata())
        if not any(key == _ACCEPTED_KEY for key, _ in initial):
            return False
        await context.send_initial_metadata(initial)
        return True

    async def _pass_messages(self, course: ResumableStream, tries: CountedTries, context: Any) -> None:
        """Forward a server's messages until the end."""
        messages, tokens, name = self._counts.messages, self._counts.tokens, tries.name
        async for content in course.call:
            message = _parse(content)
            messages[name] += 1
            tokens[name] += len(message.token_ids)
            told = course.take(message)
            if course.has_ended:
                self._land(tries)
            if not course.is_elsewhere and len(told) == 1 and told[0] is message:
                await context.write(content)
                continue
            for one in told:
                await context.write(one.SerializeToString())


def _get_beginning(request: Any, metadata: Metadata) -> PromptPrefix | None:
    tenant, is_unread = get_tenant(metadata), has_unread_key(metadata)
    return parse_prompt_prefix(request, get_owner(metadata), tenant, has_unread_key=is_unread)
