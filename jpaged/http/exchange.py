"""A JSON body in and a JSON body out, neither of which holds up the event loop; and callers that leave meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from jpaged import json_text
from jpaged.errors import Cancelled
from jpaged.http.requests import content_of, json_of
from jpaged.service.service import Service

_T = TypeVar("_T")
_CHARS_OF_NUMBER = 8
"""Characters that a number makes as JSON, about."""


async def body_in(service: Service, request: Request) -> tuple[dict[str, Any], int]:
    """Read the JSON object of a request and return it with how many bytes it had.

    Raises:
        RequestTooLong: it is over max_request_size.
        InvalidArgument: it is no JSON object.
    """
    content = await content_of(request, int(service.state.config.server.max_request_size * 2**20))
    return await service.work(lambda: json_of(content), len(content)), len(content)


async def answer_of(service: Service, body: Callable[[], dict[str, Any]], size: int) -> Response:
    """Return the response of a body that is made of so many numbers or characters."""

    def written() -> bytes:
        return json_text.dumps(body(), ensure_ascii=False).encode("utf-8", "replace")

    return Response(await service.work(written, _CHARS_OF_NUMBER * size), media_type="application/json")


async def while_there(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Do work for a caller whose body has been read; one that goes away ends it.

    Raises:
        Cancelled: the caller has gone.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the caller has gone")
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
