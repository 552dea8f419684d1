"""A server's status reaches the caller although grpc.aio replaces it when a message is written as the call ends."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc import aio

from jpaged.client import AsyncClient
from jpaged.client import errors as errors_module
from jpaged.client.errors import ServerStatus
from jpaged.errors import InvalidArgument
from tests.server.harness import running
from tests.server.travel.pairs import GREEDY, TEXT, executor, framed, messages_of, saved_by

REPLACED = (grpc.StatusCode.INTERNAL, "Internal error from Core", ())
SENT = (grpc.StatusCode.UNAVAILABLE, "the server drains", (("retry", "1"),))


class Call:
    """Gets statuses as a call of grpc.aio does: the last one stays, and each calls the callback."""

    def __init__(self):
        self._callbacks: list[Any] = []
        self._status: Any = None

    def add_done_callback(self, callback):
        self._callbacks.append(callback)

    def end(self, status):
        self._status = status
        for callback in self._callbacks:
            callback(self)

    async def code(self):
        return self._status[0]

    async def details(self):
        return self._status[1]

    async def initial_metadata(self):
        return aio.Metadata(("accepted", "7"))

    async def trailing_metadata(self):
        return aio.Metadata(*self._status[2])


def error_of(status: Any) -> aio.AioRpcError:
    code, details, trailing = status
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailing), details)


@pytest.mark.parametrize("statuses", [(SENT, REPLACED), (REPLACED, SENT)])
async def test_the_status_of_the_server_is_found_in_either_order(statuses):
    call = Call()
    status = ServerStatus(call)
    call.end(statuses[0])
    restoring = asyncio.create_task(status.restored(error_of(REPLACED)))
    await asyncio.sleep(0)
    call.end(statuses[1])
    error = await restoring
    assert (error.code(), error.details()) == SENT[:2]
    assert (tuple(error.trailing_metadata()), error.initial_metadata()["accepted"]) == (SENT[2], "7")


async def test_other_errors_stay_and_a_status_that_never_comes_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(errors_module, "_STATUS_TIMEOUT_S", 0.01)
    call, other, replaced = Call(), error_of(SENT), error_of(REPLACED)
    status = ServerStatus(call)
    assert await status.restored(other) is other
    call.end(REPLACED)
    assert await status.restored(replaced) is replaced


@pytest.mark.long
async def test_a_refused_prefix_always_names_its_problem():
    """About one call in 60 ended with INTERNAL before."""
    async with running(executor=executor()) as harness, AsyncClient(harness.target) as client:
        await client.complete(TEXT, GREEDY)
        header, pieces = messages_of(await saved_by(client))
        pieces.pieces.pieces[0].contents = b"x" * 100

        async def chunks():
            for chunk in framed([header, *[pieces] * 40]):
                yield chunk
                await asyncio.sleep(0)

        for _ in range(400):
            with pytest.raises(InvalidArgument, match=r"blocks\[0\]\.contents"):
                await client.prefixes.load(chunks())
