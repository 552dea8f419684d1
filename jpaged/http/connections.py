"""Connections of the HTTP port: few that do nothing, none that is fed a byte at a time, whatever peers send.

    a connection without a request       closed after `idle_s`
    a head or a body that does not come  closed after `REQUEST_TIMEOUT_S` without a part of a body, or a whole head
    a head without an end                400, and closed
    bytes that are no HTTP               400, and closed
    a head of more than 64 KiB           400, and closed, however many lines it has
    more connections than the limit      health alone is answered, on a few more; all else 503, and closed

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
from starlette.types import ASGIApp as App
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jpaged import json_text
from jpaged.access.permissions import Public, permission_of_route
from jpaged.errors import InvalidArgument, Unavailable
from jpaged.openai.lines import error_body

_LOG = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
"""How long a request's head may take, and a body may pause."""
MAX_HEAD_BYTES = 64 << 10
_READ_BYTES = 64 << 10
"""Bytes of one read, a quarter of asyncio's: as chunks of one byte they take 10 ms."""
_BYTES_OF_LINE = 4
"""Bytes of a line of a head besides its name and value: a colon, a space, the end of the line."""
MAX_PROBES = 32
"""Connections over the limit, which are kept for probes of health: each has one request."""
PROBE_TIMEOUT_S = 2.0
"""How long such a connection may take to send its request."""
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
        probes: connections over the limit, the oldest first.
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
        self.probes: dict[Connection, None] = {}


class Connection(HttpToolsProtocol):
    """One connection, within the limits of a `PortConfig`."""

    config: PortConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._is_receiving = False
        self._chunks: list[bytes] = []
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        self._num_part_bytes = 0
        super().connection_made(transport)
        limit = self.config.max_connections
        self._is_probe = len(self.connections) - len(self.config.probes) > limit
        if not self._is_probe:
            self._wait(self.config.idle_s)
            return
        self.config.probes[self] = None
        self._wait(PROBE_TIMEOUT_S)
        if len(self.config.probes) > MAX_PROBES:  # the oldest has had the longest to send its request
            next(iter(self.config.probes))._refuse_over_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        self.config.probes.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, and bound a head that does not end: the parser keeps a line until it is whole."""
        self._is_in_head = True
        super().data_received(data)
        self._pass_body()
        if not self._is_in_head or self.transport.is_closing():
            self._num_part_bytes = 0
            return
        self._num_part_bytes += len(data)
        if self._num_part_bytes > MAX_HEAD_BYTES:
            self.send_400_response("the head is too long")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes, self._is_receiving = 0, True
        self._wait(PROBE_TIMEOUT_S if self._is_probe else REQUEST_TIMEOUT_S)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _BYTES_OF_LINE)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._is_probe and not is_health(self.parser.get_method().decode("ascii"), self.url):
            self._refuse_over_limit()
            return
        self._wait(REQUEST_TIMEOUT_S)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Keep a chunk until all that came with it is read: uvicorn copies what lies before each."""
        self._is_in_head = False
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._pass_body()
        self._is_receiving = self._is_in_head = False
        if self.cycle is None:  # it was refused
            return
        self._wait(self.config.idle_s if self.cycle.response_complete else None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_probe:
            self.transport.close()
        elif not self._is_receiving:
            self._wait(self.config.idle_s)

    def send_400_response(self, msg: str) -> None:
        """Say that what came is no HTTP, in the form of every error."""
        self._say(b"400 Bad Request", error_body(InvalidArgument("request", msg)))

    def _refuse_over_limit(self) -> None:
        self.config.probes.pop(self, None)
        error = Unavailable(f"{self.config.max_connections} connections are open, the limit")
        self._say(b"503 Service Unavailable", error_body(error), b"retry-after: 1\r\n")

    def _say(self, status: bytes, body: dict[str, Any], header: bytes = b"") -> None:
        content = json_text.dumps(body).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(content)
        self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + head + header + b"\r\n" + content)
        self.transport.close()

    def _pass_body(self) -> None:
        if self._chunks:
            body = b"".join(self._chunks)
            self._chunks.clear()
            if self.cycle is None:  # it was refused
                return
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
        if self._is_probe and self.cycle is None:
            self._refuse_over_limit()
        elif self._is_receiving and self.flow.read_paused:  # it is we who do not read
            self._wait(REQUEST_TIMEOUT_S)
        else:
            self.transport.close()


def is_health(method: str, url: bytes) -> bool:
    """Return True if a request needs no key because it is for health."""
    path = url.partition(b"?")[0].decode("latin-1")
    return permission_of_route(method, path).public is Public.ALWAYS


def num_connections(asked: int) -> int:
    """Return as many as asked, and at most a quarter of the files that this process may have open: gRPC has half."""
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_files == resource.RLIM_INFINITY or asked <= num_files // 4:
        return asked
    most = max(1, num_files // 4)
    _LOG.warning("the HTTP port accepts %d connections, not %d: the process may open %d files", most, asked, num_files)
    return most
