"""grpc.health.v1: on a server's port, with watches that end, and on a port that serves nothing else.

On the server's port, no watch may block the server.

gRPC's watches hold a lock while they write, and setting a status waits for it: a client that does not read would block
shutdown. A watch that gRPC has to cut at the end is an error in the log and CANCELLED for the client.

`ProbeServer` is a port that serves only grpc.health.v1, in every process, whatever the other ports require:

    ""  readiness     requests are accepted and make progress
    liveness          the process has not failed

It has separate threads and reads the state per request; it does not subscribe to changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from jpaged.errors import InvalidArgument

_messages: Any = health_pb2  # the stubs lack List


class HealthServicer(health.aio.HealthServicer):
    """gRPC's health service, with other watches."""

    def __init__(self) -> None:
        super().__init__()
        self._status: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._watches: set[asyncio.Task[Any]] = set()

    async def set(self, service: str, status: Any) -> None:
        """Set the status of a service, and wake the watches."""
        await super().set(service, status)
        self._status[service] = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def List(self, request: object, context: Any) -> Any:
        """Return the status of every name."""
        kind = health_pb2.HealthCheckResponse
        return _messages.HealthListResponse(statuses={name: kind(status=one) for name, one in self._status.items()})

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        call = asyncio.current_task()
        assert call is not None  # gRPC runs each call in its own task
        self._watches.add(call)
        call.add_done_callback(self._watches.discard)
        await self._watch(request.service, context)

    async def end_watches(self, timeout_s: float) -> None:
        """End every watch, including later ones, with UNAVAILABLE, and wait until the clients have the status.

        Clients that do not read are dropped after `timeout_s` seconds.
        """
        self._has_ended.set()
        if self._watches:
            await asyncio.wait(self._watches, timeout=timeout_s)

    async def _watch(self, service: str, context: Any) -> None:
        watch = asyncio.create_task(self._write_changes(service, context))
        end = asyncio.create_task(self._has_ended.wait())
        try:
            await asyncio.wait((watch, end), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            end.cancel()
            await asyncio.gather(watch, end, return_exceptions=True)
        if not self._has_ended.is_set():
            await watch  # re-raise its error
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server has shut down")

    async def _write_changes(self, service: str, context: Any) -> None:
        """Write the status of a service at each change; intermediate states may be skipped."""
        told = None
        while True:
            changed = self._changed
            status = self._status.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            else:
                await changed.wait()


LIVENESS, READINESS = "liveness", "readiness"
"""Names for grpc.health.v1 in addition to those of services; "" is readiness."""
_NUM_THREADS = 2
_MAX_CALLS = 16
_IDLE_MS, _HANDSHAKE_MS = 10_000, 2_000
"""Idle connections are closed after these times, so that strangers cannot exhaust the file limit of the process."""


class Health(NamedTuple):
    """Answer to probes."""

    is_live: bool
    is_ready: bool


class _Probes(health_pb2_grpc.HealthServicer):
    def __init__(self, health: Callable[[], Health]) -> None:
        self._health = health

    def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """Return the status of the process; NOT_FOUND for unknown names."""
        if request.service not in ("", LIVENESS, READINESS):
            context.abort(grpc.StatusCode.NOT_FOUND, f"the service must be {LIVENESS}, {READINESS} or empty")
        return self._status(request.service)

    def List(self, request: object, context: Any) -> Any:
        """Return the status of every name."""
        return _messages.HealthListResponse(statuses={name: self._status(name) for name in ("", LIVENESS, READINESS)})

    def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Refuse: a watch would occupy one of the few threads."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "this port serves only Check and List")

    def _status(self, name: str) -> health_pb2.HealthCheckResponse:
        now, kinds = self._health(), health_pb2.HealthCheckResponse
        is_well = now.is_live if name == LIVENESS else now.is_ready
        return kinds(status=kinds.SERVING if is_well else kinds.NOT_SERVING)


class ProbeServer:
    """Answers probes on a port until it is stopped; 0 is a free port.

    Raises:
        InvalidArgument: the port cannot be bound.
    """

    def __init__(self, health: Callable[[], Health], host: str, port: int) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(_NUM_THREADS, "jpaged-probes"),
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_connection_idle_ms", _IDLE_MS),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ],
            maximum_concurrent_rpcs=_MAX_CALLS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(_Probes(health), self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise InvalidArgument("probe_port", f"{address} cannot be bound: {error}") from error
        self._server.start()

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop(None).wait()
