"""The port of the HTTP face: uvicorn, on the event loop of the server, which has the signals and the end itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from jpaged.access.gate import Gate
from jpaged.errors import InvalidArgument
from jpaged.http.app import make_app
from jpaged.http.batching.runner import Runner
from jpaged.service.service import Service

_KEEP_ALIVE_S = 75
"""A connection without a request is closed then; behind proxies that close theirs after 60 s."""
_BACKLOG = 2048


class HttpPort:
    """Answers HTTP on a port until it is stopped; 0 is a free port.

    Raises:
        InvalidArgument: the port cannot be had, or the folder of batches.
    """

    def __init__(self, service: Service, gate: Gate, host: str, port: int) -> None:
        self._batches = _batches_of(service)
        try:
            self._socket = _bound(host, port)
        except InvalidArgument:
            if self._batches is not None:
                self._batches.store.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        files = gate.certificates
        config = uvicorn.Config(
            make_app(service, gate, self._batches),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=_BACKLOG,
            ssl_context_factory=None if files is None else lambda config, default: files.context(),
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to answer, and to run batches."""
        if self._batches is not None:
            self._batches.start()
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    async def stop(self, timeout_s: float) -> None:
        """Answer what has come, for so long, and close the port; batches are left to the next server."""
        if self._batches is not None:
            await self._batches.stop()
        if self._serving is None:
            self._socket.close()
            return
        self._server.end()
        await asyncio.wait((self._serving,), timeout=timeout_s)
        if not self._serving.done():
            self._server.hurry()
            await self._serving
        self._socket.close()


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    def end(self) -> None:
        self.should_exit = True

    def hurry(self) -> None:
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _batches_of(service: Service) -> Runner | None:
    options = service.state.config.http
    return None if options.batch_dir is None else Runner(service, options, Path(options.batch_dir))


def _bound(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise InvalidArgument("http_port", f"{port} on {host} cannot be listened on: {error}") from error
