"""Server-sent events as an ASGI response, with handling of client disconnects.

    before the first event   an error is a status, as everywhere
    nothing for a while      `: keep-alive`, a comment, after the headers, so that proxies keep the connection open
    an error in the middle   data: {"error": {...}}, and the stream ends
    the client disconnects   the source of the events is closed at once, which aborts its requests

A send blocks while the client's connection is full; events are merged at their source in the meantime.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Receive, Scope, Send

from jpaged.errors import Cancelled, DeadlineExceeded
from jpaged.http.errors import error_for
from jpaged.http.exchange import while_connected
from jpaged.json_text import PIECE_BYTES
from jpaged.openai.chunks import sent_event
from jpaged.openai.lines import error_body

KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """A response of server-sent events.

    Args:
        events: encoded events; closed at the end in any case.
        keep_alive_s: send a comment after this time without an event.
        remaining_s: timeout from the client; None for no limit.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], keep_alive_s: float, remaining_s: float | None = None
    ) -> None:
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._remaining_s = remaining_s
        self._sending = asyncio.Lock()
        self._has_begun = False
        self._is_quiet = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; raise errors of the events that come before anything was sent."""
        try:
            await while_connected(receive, self._answer(send), self._remaining_s)
        except (Cancelled, DeadlineExceeded) as error:
            if not self._has_begun:
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
                    if not self._has_begun:
                        raise
                    await self._end(send, error)
                    return
            await self._end(send)
        finally:
            keeping.cancel()

    async def _end(self, send: Send, error: Exception | None = None) -> None:
        if error is not None:
            await self._send(send, sent_event(error_body(error_for(error))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._is_quiet = True
            await asyncio.sleep(self._keep_alive_s)
            if self._is_quiet and not self._sending.locked():
                await self._send(send, KEEP_ALIVE)

    async def _send(self, send: Send, event: bytes) -> None:
        async with self._sending:
            self._is_quiet = False
            if not self._has_begun:
                self._has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            for begin in range(0, len(event), PIECE_BYTES):
                piece = event[begin : begin + PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
