"""Prefill servers that are there and say nothing: they cost few prompts their time, and are found again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jpaged import peers as prefill_module
from jpaged.server.health import HealthServicer
from tests.server.harness import Harness, collect, failure_of, request, running
from tests.server.roles.test_roles import LONG, alone, apart, fake, folded, pair


@pytest.fixture(autouse=True)
def without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "_ABSENT_S", 0.0)


async def generated(decode: Harness, number: int) -> None:
    message = request(f"{number} {LONG}")
    told = await collect(decode.inference.Generate(message))
    assert folded(told) == folded(await alone(message))


async def test_a_server_that_says_nothing_is_asked_once_and_again_when_it_speaks() -> None:
    held: list[asyncio.StreamWriter] = []

    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with running(executor=fake(), role="prefill") as there:
        options = apart(there.target, prefill_target=(f"127.0.0.1:{port}", there.target))
        async with running(executor=fake(), **options) as decode:
            for number in range(6):
                await generated(decode, number)
            assert there.serving.role_counts.load().num_prefills_for_others == 6
            prefills: Any = decode.server._prefills
            assert [server.num_asked for server in prefills._servers] == [1, 6]
            silent.close()
            for writer in held:
                writer.close()
            async with running(executor=fake(), role="prefill", port=port) as back, asyncio.timeout(300):
                while not back.serving.role_counts.load().num_prefills_for_others:
                    number += 1
                    await generated(decode, number)


async def test_a_server_that_takes_too_long_is_taken_for_one_that_is_gone() -> None:
    async with pair(decode={"prefill_timeout": 0.05}) as both:
        prefills: Any = both.decode.server._prefills
        (server,) = prefills._servers
        both.prefill.faults.hold_after(0)
        await generated(both.decode, 1)
        assert server.absent_until_s
        both.prefill.faults.release()


class StoppedStub:
    """Calls of a prefill server that sends some messages, and then nothing."""

    def __init__(self, stub: Any, num_messages: int) -> None:
        self._stub, self._num_left = stub, num_messages

    def Prefill(self, *arguments: Any, **options: Any) -> StoppedStub:
        self._call = self._stub.Prefill(*arguments, **options)
        return self

    async def read(self) -> Any:
        if self._num_left == 0:
            await asyncio.sleep(3600)
        self._num_left -= 1
        return await self._call.read()

    def cancel(self) -> None:
        self._call.cancel()


@pytest.mark.parametrize(("num_messages", "failed"), [(0, "prefill"), (1, "transfer")])
async def test_a_server_that_is_stopped_is_left_before_its_timeouts(
    num_messages: int, failed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, continues = HealthServicer.Check, asyncio.Event()

    async def check_later(*arguments: Any) -> Any:
        await continues.wait()
        return await check(*arguments)

    continues.set()
    monkeypatch.setattr(HealthServicer, "Check", check_later)
    monkeypatch.setattr(prefill_module, "_SILENCE_S", 0.01)
    monkeypatch.setattr(prefill_module, "_CHECK_S", 0.05)
    async with pair(decode={"prefill_timeout": 3600.0, "transfer_timeout": 3600.0}) as both:
        prefills: Any = both.decode.server._prefills
        (server,) = prefills._servers
        server.stub = StoppedStub(server.stub, num_messages)
        continues.clear()
        await generated(both.decode, 1)
        assert server.absent_until_s
        assert both.failures == {failed: 1}
        continues.set()


async def test_a_server_that_computes_for_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    check, has_checked = HealthServicer.Check, asyncio.Event()

    async def noted(*arguments: Any) -> Any:
        answer = await check(*arguments)
        has_checked.set()
        return answer

    monkeypatch.setattr(prefill_module, "_SILENCE_S", 0.01)
    monkeypatch.setattr(HealthServicer, "Check", noted)
    async with pair() as both:
        both.prefill.faults.hold_after(0)
        call = asyncio.ensure_future(generated(both.decode, 1))
        for _ in range(3):
            await has_checked.wait()
            has_checked.clear()
        both.prefill.faults.release()
        await call
        assert not both.failures
        assert both.prefill.serving.role_counts.load().num_prefills_for_others == 1


async def test_the_haste_of_one_request_says_nothing_of_a_server() -> None:
    async with pair() as both:
        prefills: Any = both.decode.server._prefills
        (server,) = prefills._servers
        both.prefill.faults.hold_after(0)
        error = await failure_of(both.decode.inference.Generate(request(LONG), timeout=0.2))
        assert error.code().name == "DEADLINE_EXCEEDED"
        assert not server.absent_until_s
        both.prefill.faults.release()
