"""The port of the HTTP frontend: uvicorn on the server's event loop, and limits of connections.

The server handles signals and shutdown. Connections have limits of idle time, of slow or oversized requests, and of
their number:

    a connection without a request       closed after `idle_s`
    a slow head or body                  closed after `REQUEST_TIMEOUT_S` without more of the body, or a complete head
    a head without an end                400, and closed
    bytes that are not HTTP/1.1          400, and closed; of gRPC clients, too
    a head of more than 64 KiB           400, and closed, whatever the number of lines
    more connections than the limit      a few more may ask only for health; all else 503, and closed

uvicorn's protocol bounds the parts of a body and of a response in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp as App
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jpaged import json_text
from jpaged.access.authenticator import Authenticator, Public, permission_of_route
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument, Unavailable
from jpaged.http.app import make_app, require_free_path
from jpaged.http.batches.job import BatchJobRunner
from jpaged.openai.lines import error_body
from jpaged.service.service import Service

_LOG = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
"""Timeout of a request's head, and of pauses in a body."""
MAX_HEAD_BYTES = 64 << 10
_READ_BYTES = 64 << 10
"""Maximum bytes per read, a quarter of asyncio's: as chunks of one byte they take 10 ms."""
_HTTP2_PREFACE = b"PRI * HTTP/2.0"
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
        if self.cycle is None and not self._is_receiving and data.startswith(_HTTP2_PREFACE):
            self.send_400_response("HTTP/2 is not served here: gRPC clients connect to the port of --port")
            return
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


DEFAULT_PORTS = range(8000, 8100)
"""Ports to try, in this order, if http_port is unset."""
_BACKLOG = 2048
_LAST_S = 2.0
"""Maximum wait at the end for tasks of aborted connections."""
_PROBES = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 3))
"""TCP keepalive: detects an unreachable client after two minutes, if the system supports it."""
_TICK_S = 0.1
_TICKS_OF_A_DAY = 864_000


class HttpPort:
    """Serves HTTP on a port until it is stopped.

    The port is the option http_port, where 0 is a free one. If it is unset, the port is the first one from 8000 that no
    other program has and no other option names.

    Raises:
        InvalidArgument: the port cannot be bound, the folder of batches is unusable, or root_path is a path of the API.
    """

    def __init__(self, service: Service, gate: Authenticator, options: EngineConfig) -> None:
        server = options.server
        require_free_path(options.http.root_path)
        self._batches = _get_batches(service)
        try:
            self._socket = _bind(options)
        except InvalidArgument:
            if self._batches is not None:
                self._batches.store.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        files = gate.certificates
        config = PortConfig(
            make_app(service, gate, self._batches),
            max_connections=num_connections(server.max_connections),
            idle_s=server.connection_idle_timeout,
            backlog=_BACKLOG,
            tls=None if files is None else lambda config, default: files.context(),
        )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # errors caused by peers are not logged
        self._server = _UvicornServer(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to serve, and to run batches."""
        if self._batches is not None:
            self._batches.start()
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    async def stop(self, timeout_s: float) -> None:
        """Finish open requests within the timeout, and close the port; batches are left to the next server."""
        if self._batches is not None:
            await self._batches.stop()
        if self._serving is None:
            self._socket.close()
            return
        self._server.end()
        await asyncio.wait((self._serving,), timeout=timeout_s)
        if not self._serving.done():
            await self._server.hurry()
            await self._serving
        self._socket.close()


class _UvicornServer(uvicorn.Server):
    """uvicorn without signal handlers, which ends at once on request."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._has_ended = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._has_ended.set()

    async def main_loop(self) -> None:
        """Tick, as uvicorn does, until the end."""
        for counter in itertools.count():
            if await self.on_tick(counter % _TICKS_OF_A_DAY):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._has_ended.wait()

    async def hurry(self) -> None:
        """Abort connections of clients that do not read, and cancel their tasks."""
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if tasks := list(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=_LAST_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not capture signals."""
        yield


def _get_batches(service: Service) -> BatchJobRunner | None:
    options = service.state.config.http
    return None if options.batch_dir is None else BatchJobRunner(service, options, Path(options.batch_dir))


def _bind(options: EngineConfig) -> socket.socket:
    """Listen on the port of the options.

    Raises:
        InvalidArgument: it cannot be bound, or none of the default ports is free.
    """
    host, port = options.server.host, options.http.http_port
    if port is not None:
        try:
            return _listen(host, port)
        except OSError as error:
            raise InvalidArgument("http_port", f"cannot listen on port {port} of {host}: {error}") from error
    server = options.server
    named = {server.port, server.metrics_port, server.probe_port, options.access.control_port}
    for port in DEFAULT_PORTS:
        if port in named:
            continue
        try:
            listening = _listen(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise InvalidArgument("http_port", f"cannot listen on port {port} of {host}: {error}") from error
        if port != DEFAULT_PORTS[0]:
            _LOG.warning("port %d is taken: the OpenAI API listens on port %d (--http-port)", DEFAULT_PORTS[0], port)
        return listening
    taken = f"all ports from {DEFAULT_PORTS[0]} to {DEFAULT_PORTS[-1]} are taken"
    raise InvalidArgument("http_port", f"{taken}: name a free one, or turn HTTP off (--no-enable-http)")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    # Accepted connections inherit the options. Without TCP_NODELAY, bodies wait 40 ms until the client acknowledges the
    # headers. asyncio sets it only for sockets with a protocol number, and create_server gives none.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if (number := getattr(socket, name, None)) is not None:
            listening.setsockopt(socket.IPPROTO_TCP, number, value)
    return listening
