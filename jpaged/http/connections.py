"""Connections of the HTTP port: few that do nothing, none that is fed a byte at a time, whatever peers send.

    a connection without a request       closed after `idle_s`
    a head or a body that does not come  closed after `REQUEST_TIMEOUT_S` without a part of a body, or a whole head
    a head without an end                400, and closed
    bytes that are no HTTP               400, and closed
    more connections than the limit      503, and closed

uvicorn, whose protocol it is, bounds how much of a body and of an answer lies in memory.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import ssl
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jpaged import json_text
from jpaged.errors import InvalidArgument, Unavailable
from jpaged.http.wire import App
from jpaged.openai.lines import error_body

_LOG = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
"""How long a request's head may take, and a body may pause."""
MAX_HEAD_BYTES = 64 << 10
_READ_BYTES = 64 << 10
"""Bytes of one read, a quarter of asyncio's: as chunks of one byte they take 10 ms."""
TlsFactory = Callable[[uvicorn.Config, Callable[[], ssl.SSLContext]], ssl.SSLContext]
_NEVER_S = 1 << 30
"""uvicorn's own timeout of idle connections: ours is instead."""


class PortConfig(uvicorn.Config):
    """uvicorn's settings for an application, and the limits of its connections.

    Args:
        tls: makes the context of each connection; None speaks in the clear.

    Attributes:
        max_connections: at one time.
        idle_s: a connection without a request may stay so long.
    """

    def __init__(
        self, app: App, *, max_connections: int, idle_s: float, backlog: int, tls: TlsFactory | None = None
    ) -> None:
        super().__init__(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_NEVER_S,
            backlog=backlog,
            ssl_context_factory=tls,
        )
        self.max_connections = max_connections
        self.idle_s = idle_s


class Connection(HttpToolsProtocol):
    """One connection, within the limits of a `PortConfig`."""

    config: PortConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._is_receiving = False
        self._chunks: list[bytes] = []
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)
        if len(self.connections) > self.config.max_connections:
            error = Unavailable(f"{self.config.max_connections} connections are open, the limit")
            self._say(b"503 Service Unavailable", error_body(error), b"retry-after: 1\r\n")
        else:
            self._wait(self.config.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes, self._is_receiving = 0, True
        self._wait(REQUEST_TIMEOUT_S)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._wait(REQUEST_TIMEOUT_S)
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._pass_body()

    def on_body(self, body: bytes) -> None:
        """Keep a chunk until all that came with it is read: uvicorn copies what lies before each."""
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._pass_body()
        self._is_receiving = False
        self._wait(self.config.idle_s if self.cycle.response_complete else None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_receiving:
            self._wait(self.config.idle_s)

    def send_400_response(self, msg: str) -> None:
        """Say that what came is no HTTP, in the form of every error."""
        self._say(b"400 Bad Request", error_body(InvalidArgument("request", msg)))

    def _say(self, status: bytes, body: dict[str, Any], header: bytes = b"") -> None:
        content = json_text.dumps(body).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(content)
        self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + head + header + b"\r\n" + content)
        self.transport.close()

    def _pass_body(self) -> None:
        if self._chunks:
            body = b"".join(self._chunks)
            self._chunks.clear()
            self._wait(REQUEST_TIMEOUT_S)
            super().on_body(body)

    def _count(self, num_bytes: int) -> None:
        """Bound the head of a request: what is raised here ends it as what is no HTTP."""
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is too long")

    def _wait(self, seconds: float | None) -> None:
        """Close the connection after so long, unless told otherwise meanwhile; None waits for ever."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self._is_receiving and self.flow.read_paused:  # it is we who do not read
            self._wait(REQUEST_TIMEOUT_S)
        else:
            self.transport.close()


def num_connections(asked: int) -> int:
    """Return as many as asked, and at most a quarter of the files that this process may have open: gRPC has half."""
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_files == resource.RLIM_INFINITY or asked <= num_files // 4:
        return asked
    most = max(1, num_files // 4)
    _LOG.warning("the HTTP port takes %d connections, not %d: the process may open %d files", most, asked, num_files)
    return most
