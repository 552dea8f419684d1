"""grpc.health.v1 with watches that end: one that gRPC has to cut at the end is an error in the log and CANCELLED."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2


class HealthServicer(health.aio.HealthServicer):
    """gRPC's own, whose watches the server can end."""

    def __init__(self) -> None:
        super().__init__()
        self._has_ended = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        watch = asyncio.create_task(super().Watch(request, context))
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

    def end_watches(self) -> None:
        """Ends every watch with UNAVAILABLE, those that begin later too."""
        self._has_ended.set()
