"""Who is one of a router's servers, and who of them takes calls."""

import asyncio
import dataclasses
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jpaged._proto.v1 import control_pb2, inference_pb2, inference_pb2_grpc, prefixes_pb2, prefixes_pb2_grpc
from jpaged.client import AsyncClient, Client
from jpaged.client.channel import open_channel
from jpaged.errors import InternalError, InvalidArgument, NotFound, PermissionDenied, Unauthenticated
from jpaged.route import fleet, relay
from jpaged.route import router as router_module
from jpaged.route.methods import channel_methods
from jpaged.route.targets import BackendTargets, read_targets
from jpaged.server import servicer
from jpaged.testing import FakeExecutor
from jpaged.types import SamplingParams
from tests.access.test_keys import FILE, TOKEN
from tests.client.routing.test_resuming import server
from tests.route.rig import Routed, routed
from tests.server import harness as harness_module
from tests.server.harness import collect, eventually, failure_of, request, running

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(router: Routed, service: str = "") -> Any:
    stub: Any = health_pb2_grpc.HealthStub(router.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def until_health(router: Routed, wanted: Any) -> None:
    stub: Any = health_pb2_grpc.HealthStub(router.channel)
    async with asyncio.timeout(300):
        async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
            if answer.status == wanted:
                return


async def test_a_router_serves_while_any_server_does(monkeypatch):
    monkeypatch.setattr(relay, "FIRST_WITHIN_S", 0.05)  # the last call waits for a server that does not come
    async with server() as first, server() as second, routed(first.target, second.target) as router:
        await until_health(router, SERVING)
        assert await health_of(router, "jpaged.v1.InferenceService") == SERVING
        assert await health_of(router, "liveness") == SERVING
        second.server.request_stop()
        await router.until(1)
        state = router.states()[second.target]
        assert "its health is not SERVING" in state or "has shut down" in state
        assert await health_of(router) == SERVING
        first.server.request_stop()
        await until_health(router, NOT_SERVING)
        assert await health_of(router, "liveness") == SERVING
        with pytest.raises(aio.AioRpcError) as failure:
            await collect(router.inference.Generate(request()))
        assert failure.value.code().name == "UNAVAILABLE"


async def test_a_server_that_drains_has_no_new_call_and_ends_those_that_it_has():
    async with server() as first, server() as second, routed(first.target, second.target) as router:
        for one in (first, second):
            one.faults.gate.clear()
        same = "the same beginning " * 5
        running_ = asyncio.ensure_future(collect(router.inference.Generate(request(same, max_tokens=30))))
        await eventually(lambda: first.num_open_calls + second.num_open_calls == 1)
        mine, other = (first, second) if first.num_open_calls else (second, first)
        mine.server.request_stop()
        await router.until(1)
        other.faults.release()
        for _ in range(4):  # its beginning is at the one that drains
            assert await collect(router.inference.Generate(request(same)))
        assert router.router.counts.begun[other.target] == 4
        mine.faults.release()
        assert (await running_)[-1].is_last
        assert not router.router.counts.resumed


async def test_a_server_that_comes_later_or_again_takes_part():
    async with server() as first:
        async with server() as gone:
            port = gone.port
        async with routed(first.target, f"127.0.0.1:{port}", wait_for=1) as router, router.client() as client:
            await client.complete("x", GREEDY)
            async with server(port=port) as again:
                await router.until(2)
                for i in range(12):
                    await client.complete(f"prompt {i}", GREEDY)
                assert again.serving.engine.load().num_generation_tokens > 0
            await router.until(1)
            await client.complete("x", GREEDY)


async def test_a_server_of_another_model_is_set_aside_and_said_so(monkeypatch):
    async with server() as first:
        other = harness_module.MODEL.__class__(
            **{name: getattr(harness_module.MODEL, name) for name in harness_module.MODEL.__slots__}
            | {"name": "another", "max_model_len": 99}
        )
        monkeypatch.setattr(harness_module, "MODEL", other)
        async with (
            running() as second,
            routed(first.target, second.target, wait_for=1) as router,
            router.client() as client,
        ):
            await eventually(lambda: "another model" in "".join(router.states().values()))
            (told,) = [text for text in router.states().values() if text]
            assert "name is" in told
            assert "max_model_len is" in told
            served = (await client.model_info()).name
            for i in range(6):
                await client.complete(f"prompt {i}", GREEDY)
            with pytest.raises(NotFound):
                async with router.client(model="a third") as stranger:
                    await stranger.complete("x", GREEDY)
            idle = second if served == "fake" else first
            assert idle.serving.engine.load().num_generation_tokens == 0
            options = (await client.server_info()).options
            assert "another model" in options[f"target {idle.target}"]


async def test_a_server_that_computes_prompts_for_others_is_set_aside():
    async with (
        running(executor=FakeExecutor(num_host_blocks=40), role="prefill") as prefill,
        running(
            executor=FakeExecutor(num_host_blocks=40),
            role="decode",
            prefill_target=(prefill.target,),
            prefill_min_tokens=8,
            prefill_policy="always",
        ) as decode,
        routed(prefill.target, decode.target, wait_for=1) as router,
    ):
        told = {prefill.target: "it only computes prompts for other servers (role prefill)", decode.target: ""}
        await eventually(lambda: router.states() == told)
        async with router.client() as client:
            for number in range(3):
                output = await client.complete(
                    f"{number} tells a long tale", SamplingParams(max_tokens=9, ignore_eos=True)
                )
                assert len(output.outputs[0].token_ids) == 9
        assert prefill.serving.role_counts.load().num_prefills_for_others == 3


@pytest.mark.long
async def test_a_server_of_other_weights_under_the_same_name_is_set_aside(tmp_path, monkeypatch):
    """One that does not say which it has, as those of before do not, takes part."""
    path = tmp_path / "targets"
    async with AsyncExitStack() as stack:
        servers = []
        for checkpoint in ("aaaa", "", "bbbb", "aaaa"):
            monkeypatch.setattr(harness_module, "CHECKPOINT", checkpoint)
            servers.append(await stack.enter_async_context(server()))
        first, silent, other, same = (one.target for one in servers)
        path.write_text(f"{first}\n{silent}")
        router = await stack.enter_async_context(routed(wait_for=2, targets_file=str(path)))
        path.write_text(f"{first}\n{silent}\n{other}\n{same}")
        await router.until(3)
        await eventually(lambda: "checkpoint is bbbb, not aaaa" in router.states().get(other, ""))
        assert [one.name for one in router.router.fleet.admitted()] == [first, silent, same]
        for i in range(12):
            await collect(router.inference.Generate(request(f"prompt {i}")))
        assert router.router.counts.begun[other] == 0
        path.write_text(other)
        await eventually(lambda: router.states() == {other: ""})
        async with router.client() as client:
            assert (await client.server_info()).checkpoint == "bbbb"
        assert await collect(router.inference.Generate(request()))


async def test_when_the_last_server_of_its_model_is_not_named_any_more_the_fleet_is_of_the_next(tmp_path, monkeypatch):
    path = tmp_path / "targets"
    async with server() as first:
        path.write_text(first.target + "\n")
        async with routed(wait_for=1, targets_file=str(path)) as router, router.client() as client:
            values = {name: getattr(harness_module.MODEL, name) for name in harness_module.MODEL.__slots__}
            monkeypatch.setattr(harness_module, "MODEL", type(harness_module.MODEL)(**values | {"name": "another"}))
            async with running() as second:
                path.write_text(f"{first.target}\n{second.target}\n")
                await eventually(lambda: "another model" in router.states().get(second.target, ""))
                assert (await client.model_info()).name == "fake"
                path.write_text(second.target)
                await eventually(lambda: router.states() == {second.target: ""})
                assert (await client.model_info()).name == "another"


async def test_a_file_of_targets_is_followed_and_a_broken_one_changes_nothing(tmp_path, caplog):
    path = tmp_path / "targets"
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server()) for _ in range(3)]
        path.write_text(f"# ours\n{servers[0].target}  # the first\n\n")
        router = await stack.enter_async_context(routed(wait_for=1, targets_file=str(path)))
        assert set(router.states()) == {servers[0].target}
        servers[0].faults.gate.clear()
        running_ = asyncio.ensure_future(collect(router.inference.Generate(request(max_tokens=30))))
        await eventually(lambda: servers[0].num_open_calls == 1)
        path.write_text("\n".join(one.target for one in servers[1:]))
        await eventually(lambda: router.states() == dict.fromkeys([one.target for one in servers[1:]], ""))
        servers[0].faults.release()
        assert (await running_)[-1].is_last  # it goes on where it was
        with caplog.at_level(logging.ERROR):
            path.write_text("nonsense")
            await eventually(lambda: "were not reloaded" in caplog.text)
        assert len(router.states()) == 2
        assert await collect(router.inference.Generate(request()))


async def test_a_stream_ends_whose_server_is_dropped_between_its_last_message_and_its_status(tmp_path, monkeypatch):
    until, generate = asyncio.Event(), servicer.InferenceServicer.Generate

    async def slow(*args: Any) -> None:
        await generate(*args)
        await until.wait()

    monkeypatch.setattr(servicer.InferenceServicer, "Generate", slow)
    monkeypatch.setattr(fleet, "_CLOSE_GRACE_S", 300.0)
    path = tmp_path / "targets"
    async with server() as first, server() as second:
        path.write_text(first.target)
        async with routed(wait_for=1, targets_file=str(path)) as router:
            call = router.inference.Generate(request(max_tokens=3))
            while not (await call.read()).is_last:
                pass
            channel = router.router.fleet.members[first.target].endpoint.channel
            path.write_text(second.target)
            await eventually(lambda: router.states() == {second.target: ""})
            await eventually(lambda: not router.router.fleet._leaving)
            await asyncio.sleep(5 * fleet.LOOK_S)  # a connection that is closed too early is closed by now
            assert channel.get_state() is grpc.ChannelConnectivity.READY
            until.set()
            async with asyncio.timeout(300):
                assert await call.read() is aio.EOF
                assert await call.code() is grpc.StatusCode.OK
            await eventually(lambda: channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)


async def test_all_addresses_of_a_name_are_targets():
    targets = BackendTargets(["dns:///localhost:1234", "127.0.0.1:9"], None)
    found = await targets.now()
    assert [(one.target, one.name) for one in found] == [("127.0.0.1:1234", "localhost"), ("127.0.0.1:9", None)]
    assert await BackendTargets(["dns:///no-such-name.invalid:1"], None).now() == ()


async def test_addresses_that_are_too_many_are_told_of_when_they_become_more(monkeypatch, caplog):
    monkeypatch.setattr("jpaged.route.targets.MAX_TARGETS", 4)
    monkeypatch.setattr("jpaged.route.targets._RESOLVE_EVERY", 1)
    counts = iter((4, 6, 6, 5, 7))

    async def resolved(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, None, 0, "", (f"10.0.0.{i}", 1)) for i in range(next(counts))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    targets, told = BackendTargets(["dns:///many:1"], None), list[str]()
    for _ in range(5):
        caplog.clear()
        assert len(await targets.now()) == 4
        told.append(caplog.text)
    assert [bool(text) for text in told] == [False, True, False, False, True]
    assert "7 addresses; at most 4 are used; 3 are left out" in told[-1]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "names no target"),
        ("# none\n", "names no target"),
        ("a:1\nb\n", "'b' is not HOST:PORT"),
        ("a:1\na:1", "twice"),
    ],
)
def test_a_file_that_names_no_servers_well_is_refused(tmp_path: Path, content, problem):
    path = tmp_path / "targets"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=problem) as failure:
        read_targets(str(path))
    assert str(path) in failure.value.problem


@pytest.mark.parametrize("named", [[], ["a:1", "a:1"], ["nowhere"], [f"a:{i}" for i in range(1, 5000)]])
def test_targets_are_named_well(named):
    with pytest.raises(InvalidArgument, match="target"):
        BackendTargets(named, None)


async def test_a_drain_lets_calls_end_and_takes_no_more():
    async with server() as harness, routed(harness.target) as router:
        harness.faults.gate.clear()
        running_ = asyncio.ensure_future(collect(router.inference.Generate(request(max_tokens=30))))
        await eventually(lambda: harness.num_open_calls == 1)
        router.router.request_stop()
        await until_health(router, NOT_SERVING)
        with pytest.raises(aio.AioRpcError) as failure:
            await collect(router.inference.Generate(request()))
        assert (failure.value.code().name, failure.value.details()) == ("UNAVAILABLE", "the router is draining")
        harness.faults.release()
        assert (await running_)[-1].is_last
        assert await asyncio.wait_for(router.run, 60) == 0


async def test_a_drain_that_is_cut_short_tells_who_is_left():
    async with server() as harness, routed(harness.target, server={"shutdown_timeout": 0.05}) as router:
        harness.faults.gate.clear()
        call = router.inference.Generate(request(max_tokens=90))
        await eventually(lambda: harness.num_open_calls == 1)
        router.router.request_stop()
        error = await failure_of(call)
        assert (error.code().name, error.details()) == ("UNAVAILABLE", "the router shut down before the call ended")
        assert await asyncio.wait_for(router.run, 60) == 0
        harness.faults.release()
        await eventually(lambda: harness.num_open_calls == 0)


async def test_all_services_are_told_of_by_reflection():
    async with server() as harness, routed(harness.target) as router:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(router.channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        call = stub.ServerReflectionInfo(iter(asked))
        names = {one.name for one in (await call.read()).list_services_response.service}
        assert {"jpaged.v1.InferenceService", "jpaged.v1.ControlService", "grpc.health.v1.Health"} <= names


async def test_a_router_says_what_all_servers_are_together():
    async with (
        server() as first,
        server() as second,
        routed(first.target, second.target, shown_options=[("port", "0", "the command line")]) as router,
    ):
        info = await router.control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert (info.state, info.backend.num_devices) == (control_pb2.SERVER_STATE_SERVING, 2)
        assert info.role == "both"
        told = {option.name: option.value for option in info.options}
        assert told["port"] == "0"
        assert told[f"target {first.target}"] == "accepts calls"
        for i in range(4):
            await collect(router.inference.Generate(request(f"prompt {i}")))
        engines = [one.serving.engine for one in (first, second)]
        await eventually(lambda: sum(engine.load().num_generation_tokens for engine in engines) == 32)
        loads = [await one.control.GetLoad(control_pb2.GetLoadRequest()) for one in (first, second)]
        total = await router.control.GetLoad(control_pb2.GetLoadRequest())
        assert total.num_generation_tokens == sum(one.num_generation_tokens for one in loads) == 32
        assert total.num_blocks == sum(one.num_blocks for one in loads)
        assert list(total.replicas) == [*loads[0].replicas, *loads[1].replicas]
        assert min(one.slot_use for one in loads) <= total.slot_use <= max(one.slot_use for one in loads)


async def test_a_server_that_says_nothing_does_not_keep_the_others_from_saying_how_busy_they_are():
    async def silent(*_: Any, **options: Any) -> bytes:
        raise aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, aio.Metadata(), aio.Metadata(), "silent")

    async with server() as first, server() as second, routed(first.target, second.target) as router:
        methods = router.router.fleet.members[second.target].endpoint.methods
        with patch.dict(methods, {"GetLoad": silent, "ListAdapters": silent}):
            total = await router.control.GetLoad(control_pb2.GetLoadRequest())
            assert await router.control.ListAdapters(control_pb2.ListAdaptersRequest()) is not None
        assert total.num_blocks == (await first.control.GetLoad(control_pb2.GetLoadRequest())).num_blocks


async def test_prefixes_travel_between_servers_and_a_router_says_so():
    async with server() as harness, routed(harness.target) as router:
        stub: Any = prefixes_pb2_grpc.PrefixServiceStub(router.channel)
        for call in (stub.FetchPrefix(prefixes_pb2.FetchPrefixRequest()), stub.LoadPrefix()):
            error = await failure_of(call)
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "call one of its servers directly" in error.details()
        error = await failure_of(stub.SavePrefix(prefixes_pb2.SavePrefixRequest()))
        assert error.details().startswith("SavePrefix: a router does not transfer prefixes")


async def test_without_a_server_everything_says_why(monkeypatch):
    monkeypatch.setattr(relay, "FIRST_WITHIN_S", 0.05)
    async with routed("127.0.0.1:1", wait_for=0) as router:
        await eventually(lambda: "UNAVAILABLE" in router.states().get("127.0.0.1:1", ""))
        info = await router.control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert info.state == control_pb2.SERVER_STATE_STARTING
        assert (info.startup.what, info.startup.done, info.startup.total) == ("servers", 0, 1)
        calls = [
            router.inference.Tokenize(inference_pb2.TokenizeRequest(text="a")),
            router.control.GetLoad(control_pb2.GetLoadRequest()),
            router.control.GetModelInfo(control_pb2.GetModelInfoRequest()),
            router.control.ListAdapters(control_pb2.ListAdaptersRequest()),
            router.control.PinPrefix(control_pb2.PinPrefixRequest(name="p", text="x")),
            router.control.Abort(control_pb2.AbortRequest(request_id="x")),
        ]
        for call in calls:
            with pytest.raises(aio.AioRpcError) as failure:
                await call
            assert failure.value.code().name == "UNAVAILABLE"
            assert "127.0.0.1:1" in str(failure.value.details())


async def test_a_server_that_wants_a_key_is_set_aside_until_the_router_has_one(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(FILE)
    async with running(api_keys=str(keys)) as harness:
        async with routed(harness.target, wait_for=0) as router:
            await eventually(lambda: "authorization" in str(router.states().get(harness.target)))
        async with (
            routed(harness.target, api_key=TOKEN) as router,
            router.client(api_key=TOKEN) as client,
            router.client() as nobody,
        ):
            assert (await client.complete("x", GREEDY)).usage.completion_tokens == 8
            with pytest.raises(PermissionDenied):
                async with router.client(api_key=TOKEN, tenant="another") as liar:
                    await liar.complete("x", GREEDY)
            with pytest.raises(Unauthenticated, match="authorization: is missing"):
                await nobody.complete("x", GREEDY)


async def test_a_server_that_is_not_understood_is_set_aside_until_it_is():
    def odd(address: Any, info: Any) -> None:
        raise ValueError("odd")

    async with server() as first:
        with patch.object(fleet, "resolve_kv_event_endpoints", odd):
            async with routed(first.target, wait_for=0) as router:
                await eventually(lambda: "ValueError: odd" in router.states().get(first.target, ""))
                with patch.object(fleet, "resolve_kv_event_endpoints", lambda address, info: None):
                    await router.until(1)
                    assert await collect(router.inference.Generate(request()))


async def test_a_name_that_takes_long_to_look_up_holds_up_nothing():
    class Slow(BackendTargets):
        """Looks up once, and then for ever."""

        num_looks = 0

        async def now(self) -> Any:
            self.num_looks += 1
            if self.num_looks > 1:
                await asyncio.Event().wait()
            return await super().now()

    made: list[Slow] = []

    def slow(*given: Any) -> Slow:
        made.append(Slow(*given))
        return made[0]

    async with server() as harness:
        with patch.object(router_module, "BackendTargets", slow):
            async with routed(harness.target) as router:
                await eventually(lambda: made[0].num_looks == 2)
                (member,) = router.router.fleet.members.values()
                member.endpoint.load_due_s = 0.0
                await eventually(lambda: member.endpoint.load_due_s > 0)


async def test_a_server_for_which_a_certificate_cannot_be_read_is_tried_again_and_ends_nothing(tmp_path):
    path, missing = tmp_path / "targets", [2]

    def opened(library: Any, target: str, tls: Any, **options: Any) -> Any:
        if target == second.target and missing[0]:
            missing[0] -= 1
            raise InvalidArgument("tls.ca", "cannot be read")
        return open_channel(library, target, tls, **options)

    async with server() as first, server() as second:
        path.write_text(first.target)
        with patch.object(fleet, "open_channel", opened):
            async with routed(wait_for=1, targets_file=str(path)) as router:
                path.write_text(f"{first.target}\n{second.target}")
                await router.until(2)
                assert missing == [0]


@asynccontextmanager
async def routed_to_itself(target: str) -> AsyncIterator[tuple[Routed, str]]:
    """A router with itself as a second target; its port is chosen when the server already has its own."""
    own = free_port()
    async with routed(target, f"127.0.0.1:{own}", wait_for=1, server={"port": own}) as router:
        yield router, f"127.0.0.1:{own}"


async def test_a_router_that_is_its_own_target_is_none_of_its_servers():
    async with server() as one, routed_to_itself(one.target) as (router, mine):
        await eventually(lambda: "leads back to this router" in router.states()[mine])
        await router.control.PinPrefix(control_pb2.PinPrefixRequest(name="p", text="a" * 32), timeout=60)
        assert len(await collect(router.inference.Generate(request()))) > 0
        assert [member.name for member in router.router.fleet.admitted()] == [one.target]


async def test_of_two_routers_that_are_targets_of_each_other_one_refuses_the_other():
    ports = free_port(), free_port()
    first, second = (f"127.0.0.1:{port}" for port in ports)
    async with (
        server() as one,
        server() as another,
        routed(one.target, second, wait_for=1, server={"port": ports[0]}) as router,
        routed(another.target, first, wait_for=1, server={"port": ports[1]}) as other,
    ):
        await eventually(
            lambda: (
                "would be a loop" in router.states()[second] + other.states()[first]
                or "leads back" in router.states()[second] + other.states()[first]
            )
        )
        for number, asked in enumerate((router, other)):
            pin = control_pb2.PinPrefixRequest(name=f"p{number}", text="a" * 32)
            await asked.control.PinPrefix(pin, timeout=60)
            assert len(await collect(asked.inference.Generate(request()))) > 0
        assert len(router.router.fleet.admitted()) + len(other.router.fleet.admitted()) <= 3


async def test_a_call_through_too_many_routers_is_refused():
    async with server() as one, routed(one.target) as router:
        via = ("x-jpaged-via", ",".join("abcdefgh"))
        with pytest.raises(aio.AioRpcError, match="through 8 routers"):
            await router.control.GetModelInfo(control_pb2.GetModelInfoRequest(), metadata=(via,))


async def test_the_first_server_does_not_decide_the_model_where_more_have_another(monkeypatch):
    monkeypatch.setattr(fleet, "_MAX_PAUSE_S", 0.05)
    async with AsyncExitStack() as stack:
        same = [await stack.enter_async_context(server()) for _ in range(3)]
        with monkeypatch.context() as other:
            renamed = dataclasses.replace(harness_module.MODEL, name="another")
            other.setattr(harness_module, "MODEL", renamed)
            odd = await stack.enter_async_context(server())
        router = await stack.enter_async_context(routed(odd.target, wait_for=1))
        members = router.router.fleet
        members._targets = BackendTargets((odd.target, *(one.target for one in same)), None)
        await eventually(lambda: {one.name for one in members.admitted()} == {one.target for one in same})
        assert "another model than the fleet" in router.states()[odd.target]


class Truncating(inference_pb2_grpc.InferenceServiceServicer):
    """A server whose streams end with OK, and without their last message."""

    async def Generate(self, request: Any, context: Any) -> Any:
        yield inference_pb2.GenerateResponse(request_id=request.request_id, text="a", token_ids=[1])


async def test_a_stream_that_ends_without_its_last_message_is_an_error():
    backend = aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Truncating(), backend)
    port = backend.add_insecure_port("127.0.0.1:0")
    await backend.start()
    async with server() as one, routed(one.target) as router:
        channel = aio.insecure_channel(f"127.0.0.1:{port}")
        (member,) = router.router.fleet.admitted()
        member.endpoint.methods = channel_methods(channel)
        with pytest.raises(aio.AioRpcError) as failure:
            await collect(router.inference.Generate(request(temperature=1.0)))
        assert failure.value.code() is grpc.StatusCode.INTERNAL
        assert "without its last message" in str(failure.value.details())
        await channel.close()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(InternalError, match="without its last message"):
            await client.complete("hello", GREEDY)
    await asyncio.to_thread(_complete, f"127.0.0.1:{port}")
    await backend.stop(None)


def _complete(target: str) -> None:
    with Client(target) as client, pytest.raises(InternalError, match="without its last message"):
        client.complete("hello", GREEDY)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])
