"""A JSON body in and a JSON body out, neither of which holds up the event loop; and callers that leave meanwhile."""

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
"""The engine ends a request when its time is over, between two steps; here it is ended where the engine does not."""
CHARS_OF_NUMBER = 8
"""Characters that a number makes as JSON, about."""


async def body_in(service: Service, request: Request) -> tuple[dict[str, Any], int]:
    """Read the JSON object of a request and return it with how many bytes it had.

    Raises:
        RequestTooLong: it is over max_request_size.
        InvalidArgument: it is no JSON object, or holds what a message cannot.
    """
    content = await _content_of(service, request)
    return await service.work(lambda: _fields_of(content), len(content)), len(content)


async def read_body(service: Service, request: Request, read: Callable[[Mapping[str, Any]], _T]) -> _T:
    """Return what `read` makes of a request's JSON object; raises as `body_in`, and as `read`."""
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


async def answer_of(service: Service, body: Callable[[], Any], size: int) -> Response:
    """Return the response of a body that is made of about `size` characters, in pieces if it is long."""
    pieces: Iterator[bytes] = iter(())

    def begin() -> tuple[bytes, bytes]:
        nonlocal pieces
        pieces = json_text.pieces(body())
        return next(pieces, b""), next(pieces, b"")

    first, second = await service.work(begin, size)
    if not second:
        return Response(first, media_type="application/json")
    return _Pieces(service, itertools.chain((first, second), pieces))


class _Pieces(Response):
    """A JSON body in pieces, each made on a thread when the client has taken those before."""

    media_type = "application/json"

    def __init__(self, service: Service, pieces: Iterator[bytes]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._service = service
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(Cancelled):  # the client has gone while it was answered
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while piece := await self._service.work(lambda: next(self._pieces, b""), json_text.PIECE_BYTES):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_there(request: Request, work: Coroutine[Any, Any, _T], remaining_s: float | None = None) -> _T:
    """Do work for a caller whose body has been read; see `while_connected`."""
    return await while_connected(request.receive, work, remaining_s)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T], remaining_s: float | None = None) -> _T:
    """Do work for a client whose body has been read, and give up when it goes away.

    Args:
        remaining_s: time that the client gives it; None is no limit.

    Raises:
        Cancelled: it has gone; the work was cancelled, and has ended.
        DeadlineExceeded: likewise, as the time is over.
    """
    until_s = None if remaining_s is None else remaining_s + _GRACE_S
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED, timeout=until_s)
        if working.done():
            return working.result()
        if leaving.done():
            raise Cancelled("the caller has gone")
        raise DeadlineExceeded(f"the request took longer than the {remaining_s:g} s that it was given")
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
            if not working.cancelled():
                working.exception()  # nobody is told


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
