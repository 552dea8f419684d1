"""Limits of the HTTP port's connections: idle time, slow or oversized requests, and number.

    a connection without a request       closed after `idle_s`
    a slow head or body                  closed after `REQUEST_TIMEOUT_S` without more of the body, or a complete head
    a head without an end                400, and closed
    bytes that are not HTTP              400, and closed
    a head of more than 64 KiB           400, and closed, whatever the number of lines
    more connections than the limit      a few more may ask only for health; all else 503, and closed

uvicorn's protocol bounds the parts of a body and of a response in memory.
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
from jpaged.access.authenticator import Public, permission_of_route
from jpaged.errors import InvalidArgument, Unavailable
from jpaged.openai.lines import error_body

_LOG = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
"""Timeout of a request's head, and of pauses in a body."""
MAX_HEAD_BYTES = 64 << 10
_READ_BYTES = 64 << 10
"""Maximum bytes per read, a quarter of asyncio's: as chunks of one byte they take 10 ms."""
_BYTES_OF_LINE = 4
"""Overhead of a header line besides name and value: a colon, a space, the line end."""
MAX_PROBES = 32
"""Connections over the limit, kept for health probes; each may make one request."""
PROBE_TIMEOUT_S = 2.0
"""Timeout for such a connection to send its request."""
TlsFactory = Callable[[uvicorn.Config, Callable[[], ssl.SSLContext]], ssl.SSLContext]
_NEVER_S = 1 << 30
"""Disables uvicorn's timeout of idle connections, which this module replaces."""


class PortConfig(uvicorn.Config):
    """uvicorn's settings for an application, and limits of connections.

    Args:
        tls: creates the context of each connection; None for no TLS.

    Attributes:
        max_connections: maximum open connections.
        idle_s: timeout of a connection without a request.
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
        if len(self.config.probes) > MAX_PROBES:  # the oldest has had the longest time to send a request
            next(iter(self.config.probes))._refuse_over_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        self.config.probes.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and limit an endless head: the parser buffers a line until it is complete."""
        self._is_in_head = True
        super().data_received(data)
        self._pass_body()
        if not self._is_in_head or self.transport.is_closing():
            self._num_part_bytes = 0
            return
        self._num_part_bytes += len(data)
        if self._num_part_bytes > MAX_HEAD_BYTES:
            self.send_400_response("the request head is too long")

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
        """Collect chunks until all received bytes are parsed: uvicorn copies the body so far for each chunk."""
        self._is_in_head = False
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._pass_body()
        self._is_receiving = self._is_in_head = False
        if self.cycle is None:  # the request was rejected
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
        """Send OpenAI's error object for bytes that are not HTTP."""
        self._say(b"400 Bad Request", error_body(InvalidArgument("request", msg)))

    def _refuse_over_limit(self) -> None:
        self.config.probes.pop(self, None)
        error = Unavailable(f"{self.config.max_connections} connections are open, which is the limit")
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
            if self.cycle is None:  # the request was rejected
                return
            self._wait(REQUEST_TIMEOUT_S)
            super().on_body(body)

    def _count(self, num_bytes: int) -> None:
        """Limit the head of a request; an error raised here is handled like invalid HTTP."""
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the request head is too long")

    def _wait(self, seconds: float | None) -> None:
        """Close the connection after a timeout, replacing the current one; None sets no timeout."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self._is_probe and self.cycle is None:
            self._refuse_over_limit()
        elif self._is_receiving and self.flow.read_paused:  # paused by this server: not the client's fault
            self._wait(REQUEST_TIMEOUT_S)
        else:
            self.transport.close()


def is_health(method: str, url: bytes) -> bool:
    """Return True if a request is for health, which needs no key."""
    path = url.partition(b"?")[0].decode("latin-1")
    return permission_of_route(method, path).public is Public.ALWAYS


def num_connections(asked: int) -> int:
    """Return the limit of connections: `asked`, but at most a quarter of the process's file limit.

    gRPC may use half of the files.
    """
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_files == resource.RLIM_INFINITY or asked <= num_files // 4:
        return asked
    most = max(1, num_files // 4)
    _LOG.warning("the HTTP port accepts %d connections, not %d: the process may open %d files", most, asked, num_files)
    return most
