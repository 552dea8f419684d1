"""Starts a router in this process, on a free port, in front of servers that are there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from grpc import aio

from jpaged._proto.v1 import control_pb2_grpc, inference_pb2_grpc
from jpaged.client import AsyncClient
from jpaged.config import AccessOptions, EngineConfig
from jpaged.route import fleet
from jpaged.route.router import RouteOptions, Router
from tests.server.harness import eventually

_LOOK_S = 0.02
"""A router looks so often at its list and its servers here, so that no test waits for that."""


@dataclass
class Routed:
    """A running router and ways to reach it; stubs are Any, as protoc writes them without types."""

    router: Router
    channel: Any
    run: asyncio.Task[int]

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.router.port}"

    @property
    def inference(self) -> Any:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def control(self) -> Any:
        return control_pb2_grpc.ControlServiceStub(self.channel)

    def client(self, **options: Any) -> AsyncClient:
        return AsyncClient(self.target, **options)

    def states(self) -> dict[str, str]:
        """Why each server takes no calls; empty where it does."""
        return {name: member.problem for name, member in self.router.fleet.members.items()}

    async def until(self, num_admitted: int) -> None:
        """Waits until so many servers take calls."""
        await eventually(lambda: len(self.router.fleet.admitted()) == num_admitted)


@asynccontextmanager
async def routed(
    *targets: str,
    wait_for: int | None = None,
    server: dict[str, Any] | None = None,
    access: AccessOptions | None = None,
    **options: Any,
) -> AsyncIterator[Routed]:
    """A router that has found its servers; stopped at the end, whatever happened.

    Args:
        wait_for: so many of them; None is all that are named.
        server: options of its port.
        options: those of `RouteOptions`.
    """
    with patch.object(fleet, "LOOK_S", _LOOK_S):
        async with _routed(targets, wait_for, server, access, options) as made:
            yield made


@asynccontextmanager
async def _routed(
    targets: tuple[str, ...],
    wait_for: int | None,
    server: dict[str, Any] | None,
    access: AccessOptions | None,
    options: dict[str, Any],
) -> AsyncIterator[Routed]:
    config = EngineConfig.load({"port": 0, **(server or {})})
    router = Router(RouteOptions(targets, **options), config.server, access or AccessOptions())
    port = await router.start()
    run = asyncio.create_task(router.run())
    channel = aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
    made = Routed(router, channel, run)
    try:
        await made.until(len(targets) if wait_for is None else wait_for)
        yield made
    finally:
        await channel.close()
        router.request_stop()
        router.request_stop()
        await run
