"""grpc.health.v1 with watches that end, and that never block the server.

gRPC's watches hold a lock while they write, and setting a status waits for it: a client that does not read would block
shutdown. A watch that gRPC has to cut at the end is an error in the log and CANCELLED for the client.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

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
        watch = asyncio.create_task(self._tell(service, context))
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

    async def _tell(self, service: str, context: Any) -> None:
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
