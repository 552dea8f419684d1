"""Servers with OpenAI's API: what they are sent, and what is made of their events."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from jpaged.bench.backends import ENDPOINTS, OpenAIBackend, first_model
from jpaged.bench.datasets import Sample
from jpaged.bench.load_generator import drive, warm_up
from jpaged.bench.metrics import Trace
from jpaged.errors import InvalidArgument, JpagedError, Unavailable
from tests.bench.sse_server import DONE, SseServer, completion, running, usage

SAMPLE = Sample((5, 6, 7), 3, 4)


def backend_of(server: SseServer, api: Any = "openai", **options: Any) -> OpenAIBackend:
    given = {"ignore_eos": True, "temperature": 0.0, **options}
    return OpenAIBackend(server.url + ENDPOINTS[api], api, "m", **given)


async def sent(server: SseServer, sample: Sample = SAMPLE, **options: Any) -> Trace:
    async with running(server):
        backend = backend_of(server, **options)
        driven = await drive(backend, [sample], np.zeros(1))
        await backend.close()
    return driven.traces[0]


async def test_a_stream_of_completions_is_timed_and_counted():
    events = [
        ": ping\n\n",
        completion("a"),
        completion(""),
        completion("b"),
        completion("", "length"),
        usage(3, 4),
        DONE,
    ]
    server = SseServer(events)
    trace = await sent(server)
    assert (trace.text, trace.error, trace.prompt_len, trace.output_len) == ("ab", "", 3, 4)
    assert len(trace.itls_s) == 2  # the end's own message brings no token
    assert trace.start_s < trace.first_s <= trace.end_s
    assert trace.e2el_s == pytest.approx(trace.ttft_s + sum(trace.itls_s))
    assert server.requests == [
        (
            "/v1/completions",
            {
                "model": "m",
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
                "prompt": [5, 6, 7],
                "max_tokens": 4,
            },
        )
    ]


async def test_a_chat_is_one_turn_of_a_user():
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [{"delta": {"content": "b"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        DONE,
    ]
    server = SseServer(events)
    trace = await sent(server, Sample("hello", 5, 9), api="openai-chat", ignore_eos=False, extra={"seed": 3})
    assert (trace.text, trace.error, trace.output_len, len(trace.itls_s)) == ("ab", "", 2, 1)
    ((path, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["max_tokens"], body["seed"]) == (9, 3)
    assert "ignore_eos" not in body


@pytest.mark.parametrize(
    ("server", "error"),
    [
        (SseServer(["no such model"], "404 Not Found"), "the server answered 404: no such model"),
        (SseServer([DONE]), "the stream ended without a token"),
        (
            SseServer([completion("a"), {"error": {"message": "out of memory"}}]),
            "ended the stream: {'message': 'out of",
        ),
        (SseServer(["data: {\n\n"]), "an event that is not JSON: {"),
        (SseServer(["data: []\n\n"]), "an event that is no object"),
    ],
)
async def test_a_failure_is_one_requests_own(server, error):
    assert error in (await sent(server)).error


async def test_a_server_that_is_not_there_is_named():
    server = SseServer()
    async with running(server):
        backend = backend_of(server)
    trace = (await drive(backend, [SAMPLE], np.zeros(1))).traces[0]
    assert f"{server.url}/v1/completions: ConnectError" in trace.error
    with pytest.raises(Unavailable, match="names no model"):
        await first_model(server.url, {})
    await backend.close()


async def test_ids_are_no_chat():
    with pytest.raises(InvalidArgument, match="--prompt-format: ids cannot be sent as a chat"):
        await backend_of(SseServer(), "openai-chat").send(SAMPLE, Trace(3))


async def test_the_first_model_is_that_of_the_list():
    server = SseServer(['{"data": [{"id": "first"}, {"id": "second"}]}'])
    async with running(server):
        assert await first_model(server.url, {}) == "first"
    assert server.requests[0][0] == "/v1/models"


async def test_no_more_requests_are_open_than_allowed_and_the_others_wait_in_the_client():
    server = SseServer([completion("a"), DONE], gate=asyncio.Event())
    async with running(server):
        backend = backend_of(server)
        running_drive = asyncio.create_task(drive(backend, [SAMPLE] * 7, np.zeros(7), max_concurrency=3))
        for _ in range(3):
            await server.opened.acquire()
        assert server.gate is not None
        server.gate.set()
        driven = await running_drive
        await backend.close()
    assert server.most_open == 3
    assert len(server.requests) == 7
    first_end_s = min(trace.end_s for trace in driven.traces[:3])
    assert [trace.start_s > first_end_s for trace in driven.traces] == [False] * 3 + [True] * 4
    assert min(trace.queue_s for trace in driven.traces[3:]) > max(trace.queue_s for trace in driven.traces[:3])


async def test_requests_leave_at_their_times_and_every_end_is_told():
    server = SseServer([completion("a"), DONE])
    ended: list[Trace] = []
    async with running(server):
        backend = backend_of(server)
        times, begin_s = np.array([0.0, 0.05, 0.2]), time.perf_counter()
        driven = await drive(backend, [SAMPLE] * 3, times, on_end=ended.append)
        await backend.close()
    assert all(trace.start_s - begin_s >= due_s for trace, due_s in zip(driven.traces, times, strict=True))
    assert driven.duration_s >= 0.2
    assert {id(trace) for trace in ended} == {id(trace) for trace in driven.traces}


async def test_a_warm_up_that_fails_ends_the_run():
    server = SseServer([completion("a"), DONE])
    async with running(server):
        backend = backend_of(server)
        await warm_up(backend, SAMPLE, 3, 2)
        assert len(server.requests) == 3
        server.status = "500 Internal Server Error"
        with pytest.raises(JpagedError, match="the server answered 500"):
            await warm_up(backend, SAMPLE, 1, None)
        await backend.close()
