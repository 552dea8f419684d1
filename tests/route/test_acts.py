"""What all servers have to keep: pins and adapters, on all of them or on none, and on those that come later."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from grpc import aio

from jpaged._proto.v1 import control_pb2
from jpaged.client import AsyncClient
from jpaged.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unsupported,
)
from jpaged.route import aggregate
from jpaged.types import SamplingParams
from tests.access.test_keys import FILE, OTHER, TOKEN
from tests.client.routing.cutting import wire
from tests.client.test_adapters import executor
from tests.route.rig import Routed, routed
from tests.server.harness import Harness, eventually, failure_of, running

PREFIX = "a prefix"
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def server(**options: Any) -> Any:
    return running(executor=executor(), max_loras=2, **options)


async def has_pin(harness: Harness, name: str, tenant: str = "") -> bool:
    """Whether a server keeps a prefix of this name; it keeps it still."""
    async with AsyncClient(harness.target, tenant=tenant) as direct:
        try:
            await direct.pin_prefix(name, PREFIX)
        except AlreadyExists:
            return True
        await direct.unpin_prefix(name)
        return False


async def adapters_of(harness: Harness) -> set[str]:
    async with AsyncClient(harness.target) as direct:
        return {one.name for one in await direct.list_adapters()}


@contextmanager
def answering(router: Routed, target: str, method: str, answer: Any) -> Iterator[None]:
    """The answer of one server to a method; `answer` is given what it really is asked with, to go on or not."""
    methods = router.router.fleet.members[target].endpoint.methods
    ask = methods[method]

    async def answered(*given: Any, **options: Any) -> bytes:
        code = await answer(lambda: ask(*given, **options), options["timeout"])
        raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), "lost")

    with patch.dict(methods, {method: answered}):
        yield


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    path = tmp_path / "adapter"
    path.write_text("3")
    return str(path)


async def test_all_servers_do_what_one_is_asked_for(adapter):
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server()) for _ in range(3)]
        router = await stack.enter_async_context(routed(*(one.target for one in servers)))
        client = await stack.enter_async_context(router.client())
        assert await client.pin_prefix("p", PREFIX) > 0
        assert await client.load_adapter("x", adapter) > 0
        assert [await has_pin(one, "p") for one in servers] == [True] * 3
        assert [await adapters_of(one) for one in servers] == [{"x"}] * 3
        assert [one.name for one in await client.list_adapters()] == ["x"]
        for i in range(6):
            await client.complete(f"prompt {i}", GREEDY, adapter="x")
        with pytest.raises(AlreadyExists):
            await client.pin_prefix("p", PREFIX)
        await client.unpin_prefix("p")
        await client.unload_adapter("x")
        assert [await has_pin(one, "p") for one in servers] == [False] * 3
        with pytest.raises(NotFound):
            await client.unpin_prefix("p")
        with pytest.raises(NotFound):
            await client.unload_adapter("x")


async def test_where_one_server_does_not_none_does(adapter):
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server()) for _ in range(2)]
        strange = await stack.enter_async_context(server(disable_control=True))
        router = await stack.enter_async_context(routed(*(one.target for one in (*servers, strange))))
        client = await stack.enter_async_context(router.client())
        with pytest.raises(PermissionDenied) as failure:
            await client.load_adapter("x", adapter)
        assert strange.target in str(failure.value)
        assert "1 of 3 servers" in str(failure.value)
        with pytest.raises(PermissionDenied):
            await client.pin_prefix("p", PREFIX)
        assert [await adapters_of(one) for one in servers] == [set()] * 2
        assert [await has_pin(one, "p") for one in servers] == [False] * 2


async def test_what_all_refuse_is_refused_as_one_does(tmp_path):
    async with server() as first, server() as second, running() as plain:
        async with routed(first.target, second.target) as router, router.client() as client:
            with pytest.raises(InvalidArgument) as failure:
                await client.pin_prefix("p", "")
            assert failure.value.field == "token_ids"
            with pytest.raises(InvalidArgument):
                await client.load_adapter("x", str(tmp_path / "nothing"))
        async with routed(plain.target) as router, router.client() as client:
            with pytest.raises(Unsupported):
                await client.load_adapter("x", str(tmp_path))


async def test_a_server_that_comes_later_has_it_before_it_has_calls(adapter):
    async with server() as first:
        async with server() as gone:
            port = gone.port
        async with (
            routed(first.target, f"127.0.0.1:{port}", wait_for=1) as router,
            router.client() as client,
            router.client(tenant="acme") as acme,
        ):
            await client.load_adapter("x", adapter)
            await client.pin_prefix("p", PREFIX)
            await acme.pin_prefix("p", PREFIX)
            await acme.pin_prefix("q", PREFIX)
            await acme.unpin_prefix("q")
            async with server(port=port) as again:
                await router.until(2)
                assert await adapters_of(again) == {"x"}
                assert await has_pin(again, "p")
                assert await has_pin(again, "p", "acme")
                assert not await has_pin(again, "q", "acme")


async def test_a_server_that_was_away_undoes_what_was_undone_meanwhile(adapter):
    async with (
        server() as first,
        server() as second,
        wire(second.port) as cut,
        routed(first.target, cut.target) as router,
        router.client() as client,
    ):
        await client.load_adapter("x", adapter)
        await client.pin_prefix("p", PREFIX)
        cut.kill()
        await router.until(1)
        await client.unload_adapter("x")
        await client.unpin_prefix("p")
        await client.pin_prefix("q", PREFIX)
        assert await adapters_of(second) == {"x"}
        cut.restart()
        await router.until(2)
        assert await adapters_of(second) == set()
        assert not await has_pin(second, "p")
        assert await has_pin(second, "q")


@pytest.mark.parametrize(("most", "left"), [(2, set()), (1, {"q"})])
async def test_what_servers_did_without_the_router_is_undone_up_to_a_number_of_calls(monkeypatch, most, left):
    monkeypatch.setattr(aggregate, "_MAX_UNDONE", most)
    async with (
        server() as first,
        server() as second,
        wire(second.port) as cut,
        routed(first.target, cut.target) as router,
        router.client() as client,
    ):
        for one in (first, second):
            async with AsyncClient(one.target) as direct:
                for name in ("p", "q"):
                    await direct.pin_prefix(name, PREFIX)
        cut.kill()
        await router.until(1)
        await client.unpin_prefix("p")
        await client.unpin_prefix("q")
        cut.restart()
        await router.until(2)
        assert {name for name in ("p", "q") if await has_pin(second, name)} == left
        assert not await has_pin(first, "p")


async def test_what_is_done_again_and_undone_again_is_undone_where_it_was_done_first(adapter):
    async with (
        server() as first,
        server() as second,
        wire(second.port) as cut,
        routed(first.target, cut.target) as router,
        router.client() as client,
    ):
        await client.load_adapter("x", adapter)
        cut.kill()
        await router.until(1)
        await client.unload_adapter("x")
        await client.load_adapter("x", adapter)
        await client.unload_adapter("x")
        assert await adapters_of(second) == {"x"}
        cut.restart()
        await router.until(2)
        assert await adapters_of(second) == set()


async def test_a_server_that_cannot_keep_it_has_no_calls(adapter):
    async with server() as first, server() as gone:
        port = gone.port
        gone.server.request_stop()
        await gone.run
        async with routed(first.target, f"127.0.0.1:{port}", wait_for=1) as router, router.client() as client:
            await client.load_adapter("x", adapter)
            async with running(port=port):  # takes no adapters
                await eventually(lambda: "LoadAdapter fails on this server" in router.states()[f"127.0.0.1:{port}"])
                assert len(router.router.fleet.admitted()) == 1
                for i in range(6):
                    await client.complete(f"prompt {i}", GREEDY, adapter="x")


async def test_what_who_asked_may_not_do_there_is_not_repeated(adapter):
    async with server() as first, server() as gone:
        port = gone.port
        gone.server.request_stop()
        await gone.run
        async with routed(first.target, f"127.0.0.1:{port}", wait_for=1) as router, router.client() as client:
            await client.load_adapter("x", adapter)
            async with server(port=port, disable_control=True):
                await router.until(2)
                assert not router.router._acts._standing


async def test_what_nobody_may_undo_stands(adapter, tmp_path):
    """Whoever may not unload an adapter does not keep servers that come later from having it, either."""
    keys = tmp_path / "keys.toml"
    keys.write_text(FILE)
    async with server(api_keys=str(keys)) as first:
        async with server() as gone:
            port = gone.port
        async with (
            routed(first.target, f"127.0.0.1:{port}", wait_for=1, api_key=OTHER) as router,
            router.client(api_key=OTHER) as control,
            router.client(api_key=TOKEN) as inference,
        ):
            await control.load_adapter("x", adapter)
            with pytest.raises(PermissionDenied):
                await inference.unload_adapter("x")
            async with server(port=port) as again:
                await router.until(2)
                assert await adapters_of(again) == {"x"}


async def test_names_of_nothing_are_not_kept_for_a_server_that_is_away():
    async with server() as first, routed(first.target, "127.0.0.1:1", wait_for=1) as router, router.client() as client:
        for i in range(3):
            with pytest.raises(NotFound):
                await client.unload_adapter(f"nothing {i}")
        assert not any(router.router._acts._undone.values())


async def test_what_a_server_may_have_done_before_it_was_lost_is_undone_when_it_comes_again(adapter):
    async with (
        server() as first,
        server() as second,
        wire(second.port) as cut,
        routed(first.target, cut.target) as router,
    ):

        async def done_and_lost(ask: Any, within_s: float) -> grpc.StatusCode:
            await ask()
            cut.kill()
            return grpc.StatusCode.UNAVAILABLE

        async def lost(ask: Any, within_s: float) -> grpc.StatusCode:
            cut.kill()
            return grpc.StatusCode.UNAVAILABLE

        load = control_pb2.LoadAdapterRequest(name="x", path=adapter)
        unload = control_pb2.UnloadAdapterRequest(name="x")
        for method, answer, message in (("LoadAdapter", done_and_lost, load), ("UnloadAdapter", lost, unload)):
            with answering(router, cut.target, method, answer):
                error = await failure_of(getattr(router.control, method)(message))
            assert (error.code(), "1 of 2 servers" in error.details()) == (grpc.StatusCode.UNAVAILABLE, True)
            assert [await adapters_of(one) for one in (first, second)] == [set(), {"x"}]
            await router.until(1)
            cut.restart()
            await router.until(2)
            assert await adapters_of(second) == set()
            if method == "LoadAdapter":
                await router.control.LoadAdapter(load)


async def test_a_server_that_never_answers_holds_nobody_up_for_ever(adapter, monkeypatch):
    monkeypatch.setattr(aggregate, "ACT_TIMEOUT_S", 0.2)
    async with (
        server() as first,
        server() as second,
        routed(first.target, second.target) as router,
        router.client() as client,
    ):

        async def silent(ask: Any, within_s: float) -> grpc.StatusCode:
            await asyncio.sleep(within_s)
            return grpc.StatusCode.DEADLINE_EXCEEDED

        load = control_pb2.LoadAdapterRequest(name="x", path=adapter)
        with answering(router, second.target, "LoadAdapter", silent):
            error = await failure_of(router.control.LoadAdapter(load))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "the other servers have undone it" in error.details()
        assert await client.pin_prefix("p", PREFIX) > 0
        assert await adapters_of(first) == set()
