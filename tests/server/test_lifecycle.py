"""From the open port to the exit code."""

import asyncio
import threading
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jpaged._proto.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument, Unavailable
from jpaged.server.health import HealthServicer
from jpaged.server.lifecycle import SERVICE_NAMES, Server
from jpaged.service.service import Stage
from jpaged.testing import FakeExecutor, Faults
from tests.server.harness import (
    CHECKPOINT,
    collect,
    error_details,
    eventually,
    failure_of,
    make_serving,
    request,
    running,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
OF_OTHERS = ["inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine"]
NAMES = ["", *SERVICE_NAMES, *OF_OTHERS]


def health_stub(channel: Any) -> Any:
    return health_pb2_grpc.HealthStub(channel)


async def health_of(channel: Any, name: str = "") -> int:
    stub = health_stub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


class Starting:
    """A server whose model loads until `release` is set."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.release = threading.Event()
        self.failure = failure
        self.config = EngineConfig.load({"port": 0})
        self.server = Server(self.config, self._load)

    def _load(self, progress):
        progress("compiling", 3, 12)
        self.release.wait()
        if self.failure is not None:
            raise self.failure
        return make_serving(FakeExecutor(), self.config)


async def end_of(watch: Any) -> aio.AioRpcError:
    """How a watch ends on a server that no longer serves."""
    try:
        while True:
            assert (await watch.read()).status == NOT_SERVING
    except aio.AioRpcError as error:
        return error


async def test_watches_of_health_end_with_the_server(monkeypatch):
    monkeypatch.setattr("jpaged.server.lifecycle._FLUSH_TIMEOUT_S", 120.0)
    async with running() as harness, aio.insecure_channel(harness.target) as channel:
        watches = [health_stub(channel).Watch(health_pb2.HealthCheckRequest(service=name)) for name in NAMES]
        for watch in watches:
            assert (await watch.read()).status == SERVING
        harness.server.request_stop()
        for watch in watches:
            end = await end_of(watch)
            assert (end.code(), end.details()) == (grpc.StatusCode.UNAVAILABLE, "the server has shut down")


class Watching:
    """The context of a watch whose client reads its end when `reads` is set."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()

    async def write(self, message: health_pb2.HealthCheckResponse) -> None:
        """Take a status."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        await self.reads.wait()
        raise aio.AbortError(details)


async def test_the_end_waits_until_watches_have_been_told_and_not_for_those_that_do_not_read():
    health, reader, other = HealthServicer(), Watching(), Watching()
    request = health_pb2.HealthCheckRequest()
    read, left = [asyncio.create_task(health.Watch(request, context)) for context in (reader, other)]
    await asyncio.sleep(0)
    await health.end_watches(timeout_s=0.01)
    assert not read.done() and not left.done()
    end = asyncio.create_task(health.end_watches(timeout_s=120.0))
    reader.reads.set()
    with pytest.raises(aio.AbortError):
        await read
    assert not end.done()
    other.reads.set()
    await end
    with pytest.raises(aio.AbortError):
        await left
    await health.end_watches(timeout_s=120.0)  # nobody watches


async def test_a_server_that_starts_answers_and_refuses():
    starting = Starting()
    port = await starting.server.start()
    run = asyncio.create_task(starting.server.run())
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        control = control_pb2_grpc.ControlServiceStub(channel)
        inference = inference_pb2_grpc.InferenceServiceStub(channel)
        assert [await health_of(channel, name) for name in NAMES] == [NOT_SERVING] * len(NAMES)
        info = await control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert info.state == control_pb2.SERVER_STATE_STARTING
        assert (info.startup.what, info.startup.done, info.startup.total) == ("compiling", 3, 12)
        assert not info.HasField("backend")
        assert not info.checkpoint
        for call in (
            inference.Generate(request()),
            inference.Tokenize(inference_pb2.TokenizeRequest(text="x")),
            inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1])),
            control.GetModelInfo(control_pb2.GetModelInfoRequest()),
            control.GetLoad(control_pb2.GetLoadRequest()),
            control.Abort(control_pb2.AbortRequest(request_id="x")),
        ):
            error = await failure_of(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "compiling, 3 of 12" in error.details()
        starting.release.set()
        watch = health_stub(channel).Watch(health_pb2.HealthCheckRequest())
        async for answer in watch:
            if answer.status == SERVING:
                break
        assert [await health_of(channel, name) for name in NAMES] == [SERVING] * len(NAMES)
        info = await control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert info.state == control_pb2.SERVER_STATE_SERVING
        assert info.backend.platform == "cpu"
        assert info.checkpoint == CHECKPOINT
        assert not info.HasField("startup")
        assert {option.name for option in info.options} >= {"max-num-queued-reqs", "port", "shutdown-timeout"}
    starting.server.request_stop()
    assert await run == 0


async def test_a_model_that_cannot_load_ends_the_server_with_a_failure():
    starting = Starting(InvalidArgument("model", "no such folder"))
    await starting.server.start()
    starting.release.set()
    assert await starting.server.run() == 1


async def test_a_stop_while_the_model_loads_does_not_wait_for_it():
    starting = Starting()
    await starting.server.start()
    starting.server.request_stop()
    assert await asyncio.wait_for(starting.server.run(), 60) == 0
    assert starting.server.leaves_threads
    starting.failure = InvalidArgument("model", "loaded for nobody")
    starting.release.set()


async def test_a_port_in_use_is_an_error(harness):
    config = EngineConfig.load({"port": harness.port})
    second = Server(config, lambda progress: harness.serving)
    with pytest.raises(
        InvalidArgument, match=f"port: 127.0.0.1:{harness.port} cannot be bound: Address already in use$"
    ):
        await second.start()


async def test_a_drain_lets_running_requests_finish_and_refuses_new_ones(harness):
    harness.faults.gate.clear()
    running_call = asyncio.ensure_future(collect(harness.inference.Generate(request(max_tokens=30))))
    await eventually(lambda: harness.executor.num_steps > 0)
    watch = health_stub(harness.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    harness.server.request_stop()
    assert (await watch.read()).status == NOT_SERVING
    error = await failure_of(harness.inference.Generate(request()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    info = await harness.control.GetServerInfo(control_pb2.GetServerInfoRequest())
    assert info.state == control_pb2.SERVER_STATE_DRAINING
    harness.faults.release()
    messages = await running_call
    assert messages[-1].usage.completion_tokens == 30
    assert messages[-1].HasField("finish")
    assert await harness.run == 0
    watch.cancel()


@pytest.mark.parametrize("how", ["the timeout passes", "a second signal comes"])
async def test_requests_that_do_not_finish_in_time_are_told(how):
    async with running(shutdown_timeout=0.0 if how == "the timeout passes" else 60.0) as harness:
        harness.faults.gate.clear()
        call = asyncio.ensure_future(failure_of(harness.inference.Generate(request())))
        await eventually(lambda: harness.executor.num_steps > 0)
        harness.server.request_stop()
        if how == "a second signal comes":
            harness.server.request_stop()
        error = await call
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "shut down before" in error.details()
        harness.faults.release()
        assert await harness.run == 0


async def test_an_engine_that_dies_fails_its_requests_and_the_process():
    executor = FakeExecutor(faults=Faults(fail_at_step=5))
    async with running(executor=executor) as harness:
        calls = [harness.inference.Generate(request(max_tokens=60)) for _ in range(3)]
        errors = await asyncio.gather(*(failure_of(call) for call in calls))
        assert {error.code() for error in errors} <= {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE}
        internal = [error for error in errors if error.code() is grpc.StatusCode.INTERNAL]
        assert internal
        assert "injected fault at step 5" in internal[0].details()
        assert error_details(internal[0])["ErrorInfo"].reason == "INTERNAL_ERROR"
        assert await asyncio.wait_for(harness.run, 60) == 1


async def test_watch_stays_open_and_unknown_services_are_told_apart(harness):
    stub = health_stub(harness.channel)
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="other"))
    assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    assert (await failure_of(stub.Check(health_pb2.HealthCheckRequest(service="other")))).code() is (
        grpc.StatusCode.NOT_FOUND
    )
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAMES[0]))
    assert (await watch.read()).status == SERVING
    await collect(harness.inference.Generate(request()))
    assert not watch.done()
    assert not unknown.done()
    harness.server.request_stop()
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()
    unknown.cancel()


async def services_by_reflection(channel: Any) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    await call.done_writing()
    return {service.name for service in answer.list_services_response.service}


async def test_reflection_lists_the_services(harness):
    names = await services_by_reflection(harness.channel)
    assert names == {*SERVICE_NAMES, *OF_OTHERS, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_services_of_others_that_are_left_out_are_neither_listed_nor_known_to_health():
    async with running(enable_open_inference=False, enable_vllm_engine=False) as harness:
        assert not set(OF_OTHERS) & await services_by_reflection(harness.channel)
        for name in OF_OTHERS:
            check = health_stub(harness.channel).Check(health_pb2.HealthCheckRequest(service=name))
            assert (await failure_of(check)).code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_can_be_left_out():
    async with running(enable_reflection=False) as harness:
        with pytest.raises(aio.AioRpcError, match="UNIMPLEMENTED"):
            await services_by_reflection(harness.channel)


async def test_a_failure_from_outside_ends_all_calls_though_the_engine_hangs(harness):
    """As when another process is lost: the engine's thread may be in a collective that never ends."""
    harness.faults.gate.clear()
    calls = [harness.inference.Generate(request(max_tokens=60)) for _ in range(3)]
    await eventually(lambda: harness.num_open_calls == 3 and harness.executor.num_steps > 0)
    harness.server.fail(Unavailable("process 1 of 2 is lost"))
    errors = await asyncio.gather(*(failure_of(call) for call in calls))
    assert {(error.code(), error.details()) for error in errors} == {
        (grpc.StatusCode.UNAVAILABLE, "process 1 of 2 is lost")
    }
    assert await asyncio.wait_for(harness.run, 60) == 1
    harness.faults.release()


async def test_a_wish_to_drain_that_comes_twice_hurries_nobody(harness):
    harness.faults.hold_after(3)
    call = harness.inference.Generate(request(max_tokens=60))
    first = await call.read()
    harness.server.drain()
    harness.server.drain()
    await eventually(lambda: harness.server.state.stage is Stage.DRAINING)
    harness.faults.release()
    messages = [first, *await collect(call)]
    assert messages[-1].usage.completion_tokens == 60
    assert await harness.run == 0
