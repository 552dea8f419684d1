"""A real server over a fake executor: every test here speaks gRPC to it over a socket."""

from collections.abc import AsyncIterator

import pytest

from tests.server.harness import Harness, running


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """A server with the default sizes."""
    async with running() as harness:
        yield harness
