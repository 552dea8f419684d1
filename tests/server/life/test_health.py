"""Whether an engine gets on, and who may ask: stalls, hangs, probes."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from typing import Any

import grpc
import httpx2
import pytest
from google.protobuf import descriptor_pool
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jpaged._proto.v1 import control_pb2, control_pb2_grpc
from jpaged.config import EngineConfig, TimeoutOptions
from jpaged.errors import EngineHung, InvalidArgument
from jpaged.server.health import Health, ProbeServer
from jpaged.server.lifecycle import EngineState, Watchdog, show_stacks
from jpaged.testing import VirtualClock
from tests.server.harness import collect, error_details, eventually, failure_of, request, running
from tests.server.test_lifecycle import NOT_SERVING, SERVING, Starting, health_of


class Standing:
    """An engine that has made no step since a time of the clock; None is one without work."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.since_s: float | None = clock()

    @property
    def seconds_without(self) -> float:
        return 0.0 if self.since_s is None else self._clock() - self.since_s


def looks(watch: Watchdog, engine: Standing, clock: VirtualClock, seconds: float) -> EngineState:
    """What the last look finds, of one each fifth of a second."""
    found = watch.look(engine.seconds_without)
    for _ in range(round(seconds / 0.2)):
        clock.advance(0.2)
        found = watch.look(engine.seconds_without)
    return found


def test_an_engine_stalls_and_then_hangs() -> None:
    clock = VirtualClock(5.0)
    engine, watch = Standing(clock), Watchdog(TimeoutOptions(stall_timeout=30.0, step_timeout=300.0), clock)
    assert looks(watch, engine, clock, 29.0) is EngineState.GOES_ON
    assert looks(watch, engine, clock, 2.0) is EngineState.STALLS
    assert looks(watch, engine, clock, 260.0) is EngineState.STALLS
    engine.since_s = clock()
    assert looks(watch, engine, clock, 29.0) is EngineState.GOES_ON
    assert looks(watch, engine, clock, 270.0) is EngineState.STALLS
    assert looks(watch, engine, clock, 2.0) is EngineState.HANGS
    assert isinstance(watch.why(), EngineHung)
    assert "300 s (step_timeout)" in str(watch.why())


def test_an_engine_without_work_does_neither() -> None:
    clock = VirtualClock()
    engine, watch = Standing(clock), Watchdog(TimeoutOptions(), clock)
    engine.since_s = None
    assert looks(watch, engine, clock, 1000.0) is EngineState.GOES_ON


def test_time_in_which_the_process_was_stopped_is_not_that_of_a_step() -> None:
    clock = VirtualClock()
    engine, watch = Standing(clock), Watchdog(TimeoutOptions(stall_timeout=30.0, step_timeout=300.0), clock)
    for _ in range(10):
        clock.advance(5000.0)
        assert watch.look(engine.seconds_without) is EngineState.STALLS
    assert looks(watch, engine, clock, 285.0) is EngineState.HANGS  # of which it was awake


def test_no_step_is_too_long_where_there_is_no_limit() -> None:
    clock = VirtualClock()
    engine, watch = Standing(clock), Watchdog(TimeoutOptions(step_timeout=0.0), clock)
    assert looks(watch, engine, clock, 1000.0) is EngineState.STALLS


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"step_timeout: 10 s is below stall_timeout \(30 s\)"):
        EngineConfig.load({"step_timeout": 10})
    with pytest.raises(InvalidArgument, match=r"default_deadline: 9 s is above max_deadline \(8 s\)"):
        EngineConfig.load({"default_deadline": 9, "max_deadline": 8})


def test_the_stacks_of_all_threads_go_to_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    dumped = []
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda *, file, all_threads: dumped.append((file, all_threads)))
    show_stacks()
    assert dumped == [(sys.__stderr__, True)]


async def test_a_step_that_hangs_tells_the_clients_to_go_elsewhere_and_shows_the_stacks() -> None:
    async with running(stall_timeout=0.1, step_timeout=0.2) as harness:
        shown = []
        harness.server._on_hang = lambda: shown.append(harness.server.state.stage.name)
        harness.faults.gate.clear()
        error = await failure_of(harness.inference.Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error_details(error)["ErrorInfo"].reason == "ENGINE_HUNG"
        assert "no step has completed for 0.2 s (step_timeout)" in error.details()
        assert await harness.run == 3
        assert shown in (["SERVING"], ["STALLED"])
        assert harness.server.leaves_threads


async def test_a_hang_ends_a_drain_as_well() -> None:
    async with running(stall_timeout=0.1, step_timeout=0.2) as harness:
        harness.server._on_hang = lambda: None
        harness.faults.gate.clear()
        call = harness.inference.Generate(request())
        await eventually(lambda: harness.executor.num_steps > 0)
        harness.server.request_stop()
        assert (await failure_of(call)).code() is grpc.StatusCode.UNAVAILABLE
        assert await harness.run == 3


async def test_a_hang_ends_a_server_that_has_cut_its_drain_short() -> None:
    async with running(stall_timeout=0.1, step_timeout=0.5, shutdown_timeout=0.0) as harness:
        harness.server._on_hang = lambda: None
        harness.faults.gate.clear()
        call = harness.inference.Generate(request())
        await eventually(lambda: harness.executor.num_steps > 0)
        harness.server.request_stop()
        error = await failure_of(call)
        assert error_details(error)["ErrorInfo"].reason in ("UNAVAILABLE", "ENGINE_HUNG")
        assert await harness.run == 3


async def test_a_stall_and_its_end_are_told_over_http_and_counted() -> None:
    async with (
        running(http_port=0, stall_timeout=0.1) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        harness.faults.gate.clear()
        call = harness.inference.Generate(request())
        await eventually(lambda: harness.server.state.stage.name == "STALLED")
        for path in ("/health", "/ping", "/readyz"):
            assert (await client.get(path)).status_code == 503, path
        live = await client.get("/livez")
        assert (live.status_code, live.text) == (200, "stalled\n")
        metrics = (await client.get("/metrics")).text
        num_stalls = value_of("jpaged:stalls_total", metrics)
        assert num_stalls >= 1
        assert value_of("jpaged:seconds_since_progress", metrics) >= 0.1
        harness.faults.release()
        await collect(call)
        await eventually(lambda: harness.server.state.stage.name == "SERVING")
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.text) == (200, "serving\n")
        metrics = (await client.get("/metrics")).text
        assert 'jpaged:seconds_since_progress{model_name="fake"} 0.0' in metrics
        assert value_of("jpaged:stalls_total", metrics) >= num_stalls


def value_of(name: str, metrics: str) -> float:
    (line,) = [line for line in metrics.splitlines() if line.startswith(f"{name}{{")]
    return float(line.split()[-1])


async def test_a_server_that_starts_is_live_and_not_ready() -> None:
    starting = Starting()
    port = await starting.server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await health_of(channel, "readiness") == NOT_SERVING
        assert await health_of(channel, "liveness") == SERVING
    starting.server.request_stop()
    assert await starting.server.run() == 0
    starting.release.set()


async def test_the_port_of_probes_answers_for_health_and_nothing_else() -> None:
    now = [Health(is_live=True, is_ready=False)]
    probes = ProbeServer(lambda: now[0], "127.0.0.1", 0)
    try:
        async with aio.insecure_channel(f"127.0.0.1:{probes.port}") as channel:
            assert [await health_of(channel, name) for name in ("", "readiness", "liveness")] == [
                NOT_SERVING,
                NOT_SERVING,
                SERVING,
            ]
            now[0] = Health(is_live=False, is_ready=True)
            assert [await health_of(channel, name) for name in ("", "liveness")] == [SERVING, NOT_SERVING]
            with pytest.raises(aio.AioRpcError) as missing:
                await health_of(channel, "another")
            assert missing.value.code() is grpc.StatusCode.NOT_FOUND
            control: Any = control_pb2_grpc.ControlServiceStub(channel)
            call = control.GetServerInfo(control_pb2.GetServerInfoRequest())
            assert (await failure_of(call)).code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(InvalidArgument, match=rf"probe_port: 127.0.0.1:{probes.port} cannot be bound"):
            ProbeServer(lambda: now[0], "127.0.0.1", probes.port)
    finally:
        probes.stop()


async def test_the_health_of_all_names_is_listed() -> None:
    async with running(probe_port=0) as harness:
        of_all: Any = health_pb2_grpc.HealthStub(harness.channel)
        statuses = (await of_all.List(health_pb2.__dict__["HealthListRequest"]())).statuses
        assert {"", "liveness", "readiness", "jpaged.v1.InferenceService"} <= statuses.keys()
        assert {one.status for one in statuses.values()} == {SERVING}
        async with aio.insecure_channel(f"127.0.0.1:{harness.server.probe_port}") as channel:
            of_probes: Any = health_pb2_grpc.HealthStub(channel)
            statuses = (await of_probes.List(health_pb2.__dict__["HealthListRequest"]())).statuses
            assert {name: one.status for name, one in statuses.items()} == dict.fromkeys(
                ("", "liveness", "readiness"), SERVING
            )
            with pytest.raises(aio.AioRpcError) as refused:
                await anext(aiter(of_probes.Watch(health_pb2.HealthCheckRequest())))
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_no_method_leaves_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    pool: Any = descriptor_pool.Default()
    async with running(enable_reflection=True) as harness:
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(harness.channel)
        reflecting = stub.ServerReflectionInfo(iter([asked]))
        names = [one.name async for answer in reflecting for one in answer.list_services_response.service]
        assert len(names) >= 5
        services = [pool.FindServiceByName(name) for name in names if not name.startswith("inference.")]
        for service in services:
            for method in service.methods:
                call = harness.channel.unary_stream(f"/{service.full_name}/{method.name}")(b"")
                with contextlib.suppress(aio.AioRpcError):
                    await call.read()
                call.cancel()
    assert [one.getMessage() for one in caplog.records if one.levelname == "ERROR"] == []
