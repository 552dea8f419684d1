"""grpc.health.v1 with watches that end, and that keep nobody waiting.

gRPC's own watches hold a lock while they write, which whoever sets a status waits for: one client that reads nothing
would keep the server from its end. And one that gRPC has to cut at the end is an error in the log and CANCELLED.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

_messages: Any = health_pb2  # its stubs do not have List


class HealthServicer(health.aio.HealthServicer):
    """gRPC's own health service, with other watches."""

    def __init__(self) -> None:
        super().__init__()
        self._status: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._watches: set[asyncio.Task[Any]] = set()

    async def set(self, service: str, status: Any) -> None:
        """Sets the status of a service, and wakes those who watch."""
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
        assert call is not None  # gRPC runs each call in a task of its own
        self._watches.add(call)
        call.add_done_callback(self._watches.discard)
        await self._watch(request.service, context)

    async def end_watches(self, timeout_s: float) -> None:
        """Ends every watch with UNAVAILABLE, those that begin later too, and waits until the clients have been told.

        Those that do not read are left after `timeout_s` seconds.
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
            await watch  # raises what ended it
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server has ended")

    async def _tell(self, service: str, context: Any) -> None:
        """Writes the status of a service whenever it is another; states that come and go meanwhile are left out."""
        told = None
        while True:
            changed = self._changed
            status = self._status.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            else:
                await changed.wait()
