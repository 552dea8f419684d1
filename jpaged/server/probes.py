"""A port that answers grpc.health.v1 and nothing else: in every process, whatever the other ports ask for.

    ""  readiness     requests are taken and worked on
    liveness          the process is of use, or may become so

It has threads of its own, and asks for the state when it is asked: nothing here is told of changes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged.errors import InvalidArgument

_messages: Any = health_pb2  # its stubs do not have List
LIVENESS, READINESS = "liveness", "readiness"
"""Names that grpc.health.v1 is asked for, beside those of services; "" is readiness."""
_NUM_THREADS = 2
_MAX_CALLS = 16
_IDLE_MS, _HANDSHAKE_MS = 10_000, 2_000
"""Connections that do nothing end after these times, so that strangers do not use up the files of the process."""


class Health(NamedTuple):
    """What probes are told."""

    is_live: bool
    is_ready: bool


class _Probes(health_pb2_grpc.HealthServicer):
    def __init__(self, health: Callable[[], Health]) -> None:
        self._health = health

    def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """Answer for the process; NOT_FOUND for names that mean nothing here."""
        if request.service not in ("", LIVENESS, READINESS):
            context.abort(grpc.StatusCode.NOT_FOUND, f"the names here are {LIVENESS}, {READINESS} and none")
        return self._status(request.service)

    def List(self, request: object, context: Any) -> Any:
        """Return the status of every name."""
        return _messages.HealthListResponse(statuses={name: self._status(name) for name in ("", LIVENESS, READINESS)})

    def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Refuse: a watch would keep one of the few threads."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "this port answers Check and List")

    def _status(self, name: str) -> health_pb2.HealthCheckResponse:
        now, kinds = self._health(), health_pb2.HealthCheckResponse
        is_well = now.is_live if name == LIVENESS else now.is_ready
        return kinds(status=kinds.SERVING if is_well else kinds.NOT_SERVING)


class ProbeServer:
    """Answers probes on a port until it is stopped; 0 is a free port.

    Raises:
        InvalidArgument: the port cannot be had.
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
        """Answer nothing any more."""
        self._server.stop(None).wait()
