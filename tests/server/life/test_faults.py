"""Each fault of a device ends as docs/health.md says: statuses, states, health, exit code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2

from jpaged._proto.v1 import control_pb2
from jpaged.engine.engine import Engine
from jpaged.errors import ProcessLost
from jpaged.server.health import LIVENESS, READINESS
from jpaged.service.service import Stage
from jpaged.testing import FakeExecutor, Faults
from tests.server.harness import Harness, collect, eventually, request, running
from tests.server.test_lifecycle import NOT_SERVING, SERVING, health_of, health_stub

TABLE = Path(__file__).parents[3] / "docs/health.md"
SHORT_S, NEVER_S = 0.1, 1e6
OPTIONS: dict[str, dict[str, Any]] = {
    "stall": {"stall_timeout": SHORT_S, "step_timeout": NEVER_S},
    "hang": {"stall_timeout": SHORT_S, "step_timeout": 10 * SHORT_S},  # time for both requests to arrive
    "cut": {"shutdown_timeout": 0.0},
}
YES = {"yes": True, "no": False}


def rows() -> dict[str, list[str]]:
    """The rows of the table of faults, by the name of the fault."""
    text = TABLE.read_text().partition("| fault |")[2].partition("\n\n")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {re.findall(r"`(\w+)`", name)[0]: cells for name, *cells in found}


ROWS = rows()


def test_every_fault_that_can_be_put_in_has_its_row() -> None:
    can_be_put_in = {name for name in Faults.__slots__ if not name.startswith("_")} - {"gate"}
    assert can_be_put_in | {"none", "stall", "hang", "lost", "drain", "cut"} == set(ROWS)


async def happen(fault: str, harness: Harness) -> None:
    """Brings a fault about, while two requests wait inside of a step."""
    faults = harness.faults
    match fault:
        case "stall":
            await eventually(lambda: harness.server.state.stage.name == "STALLED")
        case "hang" | "drain" | "cut" | "lost":
            if fault == "lost":
                harness.server.fail(ProcessLost("process 1 of 2 is lost"))
            if fault in ("drain", "cut"):
                harness.server.request_stop()
            await eventually(lambda: harness.server.state.stage.name == ROWS[fault][2].strip("`"))
        case _:
            faults.release()


@pytest.mark.parametrize("fault", ROWS)
async def test_a_fault_ends_as_the_table_says(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, others, state, is_ready, is_live, code = ROWS[fault]
    monkeypatch.setattr("jpaged.server.lifecycle.show_stacks", lambda: None)
    nan_token_ids = frozenset({ord("%")}) if fault == "nan_token_ids" else frozenset[int]()
    fail_at_step = 5 if fault == "fail_at_step" else None  # which is not reached before the fault happens
    executor = FakeExecutor(faults=Faults(nan_token_ids=nan_token_ids, fail_at_step=fail_at_step))
    async with running(executor=executor, http_port=0, probe_port=0, **OPTIONS.get(fault, {})) as harness:
        probes = aio.insecure_channel(f"127.0.0.1:{harness.server.probe_port}")
        harness.faults.gate.clear()
        watched = watch_states(harness, monkeypatch)
        calls = [harness.inference.Generate(request(text, max_tokens=20)) for text in ("good", "50%")]
        engine = harness.serving.engine
        assert isinstance(engine, Engine)
        await eventually(lambda: len(engine._in_flight) == 2 and harness.executor.num_steps > 0)
        await happen(fault, harness)
        if fault in ("stall", "drain"):
            await assert_health(harness, probes, state, YES[is_ready], YES[is_live])
            harness.faults.release()
        ended = [await status_of(call) for call in calls]
        assert ended == [others, own]
        if fault in ("none", "nan_token_ids"):
            await assert_health(harness, probes, state, YES[is_ready], YES[is_live])
        expected = state.strip("`"), YES[is_ready], YES[is_live]
        await eventually(lambda: expected in watched)
        if fault == "cut":
            harness.faults.release()
        if fault == "stall":
            await eventually(lambda: harness.server.state.stage.name == "SERVING")
            assert harness.serving.engine.load().num_stalls >= 1
        harness.server.request_stop()
        assert await harness.run == int(code)
        await probes.close()


def watch_states(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, bool]]:
    """What the server was in turn, and what its health said."""
    state, seen = harness.server.state, [("SERVING", True, True)]
    enter = state.enter

    def noting(stage: Stage) -> None:
        enter(stage)
        seen.append((stage.name, state.is_ready, state.is_live))

    monkeypatch.setattr(state, "enter", noting)
    return seen


async def assert_health(harness: Harness, probes: aio.Channel, state: str, is_ready: bool, is_live: bool) -> None:
    """The same on every port."""
    kinds = {True: SERVING, False: NOT_SERVING}
    watch = health_stub(harness.channel).Watch(health_pb2.HealthCheckRequest(service=READINESS))
    while (await watch.read()).status != kinds[is_ready]:
        """The state is another a moment before the port says so."""
    watch.cancel()
    info = await harness.control.GetServerInfo(control_pb2.GetServerInfoRequest())
    assert control_pb2.ServerState.Name(info.state) == f"SERVER_STATE_{state.strip('`')}"
    for channel in (harness.channel, probes):
        for name, expected in (("", is_ready), (READINESS, is_ready), (LIVENESS, is_live)):
            assert await health_of(channel, name) == kinds[expected], name


async def status_of(call: aio.UnaryStreamCall) -> str:
    """How a call ends."""
    try:
        return "OK" if (await collect(call))[-1].is_last else "no end"
    except aio.AioRpcError as error:
        return error.code().name
