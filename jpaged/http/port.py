"""The port of the HTTP frontend: uvicorn on the event loop of the server, which handles signals and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from jpaged.access.authenticator import Authenticator
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument
from jpaged.http.app import make_app, require_free_path
from jpaged.http.batches.job import BatchJobRunner
from jpaged.http.connections import PortConfig, num_connections
from jpaged.service.service import Service

_LOG = logging.getLogger(__name__)

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
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted connections inherit it
    for name, value in _PROBES:
        if (number := getattr(socket, name, None)) is not None:
            listening.setsockopt(socket.IPPROTO_TCP, number, value)
    return listening
