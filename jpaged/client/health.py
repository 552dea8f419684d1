"""A single check of grpc.health.v1 without retries: callers decide about failures."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged.client.channel import proxy_name, require_target
from jpaged.client.failures import translated
from jpaged.client.tls import Tls, open_channel


def check_health(
    target: str, *, service: str = "", timeout_s: float, tls: Tls | None = None, proxy: str | None = None
) -> str:
    """Return the status by name: SERVING, or NOT_SERVING while a server loads or drains.

    Args:
        target: host:port.
        service: name of the service; "" for the server as a whole.
        timeout_s: timeout for connecting and answering.
        tls: None connects without TLS.
        proxy: URL of an HTTP proxy, or "none"; None reads the environment. Never used for loopback addresses.

    Raises:
        InvalidArgument: the target is not HOST:PORT.
        Unavailable: no server listens there.
        DeadlineExceeded: no answer came in time.
        NotFound: there is no such service.
    """
    require_target("target", target)
    with open_channel(grpc, target, tls, proxy=proxy) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            raise translated(error, proxy_name(target, proxy)) from error
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
