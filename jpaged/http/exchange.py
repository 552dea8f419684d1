"""JSON bodies in and out without blocking the event loop, and detection of clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jpaged import json_text
from jpaged.errors import Cancelled, DeadlineExceeded, InvalidArgument
from jpaged.http.requests import content_of
from jpaged.openai.bodies import check_values, loaded
from jpaged.service.service import Service

_T = TypeVar("_T")
_GRACE_S = 0.25
"""Grace period for the engine to end an overdue request between steps, before it is ended here."""
CHARS_OF_NUMBER = 8
"""Approximate characters of a number in JSON."""


async def body_in(service: Service, request: Request) -> tuple[dict[str, Any], int]:
    """Read the JSON object of a request; return it with its size in bytes.

    Raises:
        RequestTooLong: it exceeds max_request_size.
        InvalidArgument: it is not a JSON object, or has values that a message cannot hold.
    """
    content = await _content_of(service, request)
    return await service.work(lambda: _fields_of(content), len(content)), len(content)


async def read_body(service: Service, request: Request, read: Callable[[Mapping[str, Any]], _T]) -> _T:
    """Return the result of `read` for a request's JSON object; raise as `body_in`, and as `read`."""
    content = await _content_of(service, request)
    return await service.work(lambda: read(_fields_of(content)), len(content))


async def _content_of(service: Service, request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise InvalidArgument("content-type", f"{kind[:80]!r} is not application/json")
    return await content_of(request, int(service.state.config.server.max_request_size * 2**20))


def _fields_of(content: bytes) -> dict[str, Any]:
    fields = loaded("body", content)
    check_values("body", fields)
    return fields


async def answer_of(service: Service, body: Callable[[], Any], size: int, parts: list[Any] | None = None) -> Response:
    """Return the response with a body of about `size` characters, streamed in pieces if it is long.

    Args:
        parts: large values in the body; after a long response they are removed from the list and freed one at a time.
    """
    pieces: Iterator[bytes] = iter(())

    def begin() -> tuple[bytes, bytes]:
        nonlocal pieces
        pieces = json_text.pieces(body())
        return next(pieces, b""), next(pieces, b"")

    first, second = await service.work(begin, size)
    if not second:
        return Response(first, media_type="application/json")
    return _Pieces(service, itertools.chain((first, second), pieces), [] if parts is None else parts)


class _Pieces(Response):
    """A JSON body in pieces, each encoded on a thread after the client has received the previous ones.

    Freeing a million values at once would hold the interpreter's lock for 0.5 s: `parts` are freed one at a time.
    """

    media_type = "application/json"

    def __init__(self, service: Service, pieces: Iterator[bytes], parts: list[Any]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._service = service
        self._pieces = pieces
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(Cancelled):  # the client disconnected during the response
            await while_connected(receive, self._send(send))
        self._pieces = iter(())
        await self._service.work(self._free, json_text.PIECE_BYTES)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while piece := await self._service.work(lambda: next(self._pieces, b""), json_text.PIECE_BYTES):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _free(self) -> None:
        while self._parts:
            self._parts.pop()


async def while_there(request: Request, work: Coroutine[Any, Any, _T], remaining_s: float | None = None) -> _T:
    """Run work for a request whose body has been read; see `while_connected`."""
    return await while_connected(request.receive, work, remaining_s)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T], remaining_s: float | None = None) -> _T:
    """Run work for a request whose body has been read; cancel it if the client disconnects.

    Args:
        remaining_s: timeout from the client; None for no limit.

    Raises:
        Cancelled: the client disconnected; the work was cancelled, and has ended.
        DeadlineExceeded: the timeout passed; likewise.
    """
    until_s = None if remaining_s is None else remaining_s + _GRACE_S
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED, timeout=until_s)
        if working.done():
            return working.result()
        if leaving.done():
            raise Cancelled("the client has disconnected")
        raise DeadlineExceeded(f"the request took longer than its timeout of {remaining_s:g} s")
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
            if not working.cancelled():
                working.exception()  # mark the exception as retrieved


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
