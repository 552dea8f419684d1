"""A port that serves only grpc.health.v1, in every process, whatever the other ports require.

    ""  readiness     requests are accepted and make progress
    liveness          the process has not failed

It has separate threads and reads the state per request; it does not subscribe to changes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged.errors import InvalidArgument

_messages: Any = health_pb2  # the stubs lack List
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
