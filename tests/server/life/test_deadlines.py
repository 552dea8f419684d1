"""How much time a request gets, whatever its caller says, on every face."""

from __future__ import annotations

import grpc
import pytest

from jpaged._proto.v1 import inference_pb2
from jpaged.engine.engine import Engine
from tests.server.harness import Harness, collect, eventually, failure_of, request, running


def noted(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The seconds that each request has left when the engine gets it."""
    left: list[float | None] = []
    engine = harness.serving.engine
    submit = engine.submit

    def noting(what, sink):
        left.append(None if what.deadline_s is None else what.deadline_s - engine.clock())
        submit(what, sink)

    monkeypatch.setattr(engine, "submit", noting)
    return left


@pytest.mark.parametrize(
    ("options", "asked_s", "given_s"),
    [
        ({}, None, None),
        ({"default_deadline": 5000}, None, 5000),
        ({"default_deadline": 5000}, 9000, 9000),
        ({"max_deadline": 5000}, None, 5000),
        ({"max_deadline": 5000}, 9000, 5000),
        ({"max_deadline": 9000}, 5000, 5000),
        ({"default_deadline": 5000, "max_deadline": 9000}, None, 5000),
    ],
)
async def test_a_request_gets_the_time_that_it_asks_for_within_the_limits(options, asked_s, given_s, monkeypatch):
    async with running(**options) as harness:
        left = noted(harness, monkeypatch)
        await collect(harness.inference.Generate(request(), timeout=asked_s))
        score = inference_pb2.ScoreRequest(
            token_ids=inference_pb2.TokenIds(ids=[1, 2]),
            continuations=[inference_pb2.Continuation(token_ids=inference_pb2.TokenIds(ids=[3]))],
        )
        await harness.inference.Score(score, timeout=asked_s)
        assert len(left) == 2
        for one_s in left:
            if given_s is None:
                assert one_s is None
            else:
                assert one_s == pytest.approx(given_s, abs=100)


async def test_a_caller_who_names_no_time_is_told_when_the_servers_own_is_over():
    async with running(default_deadline=0.5) as harness:
        engine = harness.serving.engine
        harness.faults.gate.clear()
        call = harness.inference.Generate(request(max_tokens=120))
        await eventually(lambda: harness.executor.num_steps > 0 or engine.num_ended_by_reason()["deadline"] > 0)
        await eventually(lambda: engine.clock() > engine_deadline(harness))
        harness.faults.release()
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "the deadline passed" in error.details()


def engine_deadline(harness: Harness) -> float:
    """When the next request has to end; long ago where there is none left."""
    engine = harness.serving.engine
    assert isinstance(engine, Engine)
    deadlines = engine._loop._deadlines
    return deadlines.next_s if deadlines._open else 0.0
