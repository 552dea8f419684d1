"""A real server over a fake executor: every test here speaks gRPC to it over a socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.server.harness import Harness, running


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """A server with the default sizes."""
    async with running() as harness:
        yield harness


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits for something that another thread brings about; fails after 10 s."""

    async def wait(condition: Callable[[], bool]) -> None:
        until = asyncio.get_running_loop().time() + 10
        while not condition():
            assert asyncio.get_running_loop().time() < until
            await asyncio.sleep(0.002)

    return wait
