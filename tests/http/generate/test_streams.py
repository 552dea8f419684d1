"""Streams on the wire: server-sent events, silence, clients that leave or do not read, the end of a server."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from jpaged._proto.v1 import control_pb2
from jpaged.testing import FakeExecutor
from tests.http.generate.asking import GREEDY, PAST_THE_END, asking
from tests.server.harness import Harness, eventually, running

HELLO: dict[str, Any] = {"prompt": "hello", "temperature": 0, "ignore_eos": True, "max_tokens": 8}


@asynccontextmanager
async def posting(**options: Any) -> AsyncIterator[tuple[Harness, httpx2.AsyncClient]]:
    async with (
        running(http_port=0, **options) as harness,
        httpx2.AsyncClient(base_url=harness.http_url, timeout=60) as client,
    ):
        yield harness, client


def streamed(client: httpx2.AsyncClient, **body: Any) -> Any:
    return client.stream("POST", "/v1/completions", json={**HELLO, "stream": True, **body})


async def test_a_stream_is_server_sent_events_to_the_last() -> None:
    async with posting() as (_, client), streamed(client) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["x-request-id"]
        events = (await answer.aread()).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}
        assert {chunk["id"] for chunk in chunks} == {f"cmpl-{answer.headers['x-request-id']}"}


async def test_silence_is_broken_by_comments_which_clients_pass_over() -> None:
    async with asking(http_keep_alive=0.05) as (harness, client):
        harness.faults.gate.clear()
        async with httpx2.AsyncClient(base_url=harness.http_url, timeout=60) as raw, streamed(raw) as answer:
            lines = answer.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": keep-alive", ""] * 2  # nothing has been computed
            whole = client.completions.create(prompt="x", max_tokens=4, stream=True, extra_body=PAST_THE_END, **GREEDY)
            asking_too = asyncio.create_task(whole)
            harness.faults.release()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
            assert len([chunk async for chunk in await asking_too]) > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello", ["hello", "other"]])
async def test_a_client_that_leaves_ends_its_requests(stream: bool, prompt: Any) -> None:
    async with posting() as (harness, client):
        harness.faults.hold_after(3)
        asking_for = {**HELLO, "prompt": prompt, "max_tokens": 100, "stream": stream}
        call = asyncio.create_task(client.post("/v1/completions", json=asking_for))
        await eventually(lambda: harness.num_blocks_used > 0)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        await eventually(lambda: harness.num_open_calls == 0)
        harness.faults.release()
        await eventually(lambda: harness.num_blocks_used == 0)
        assert harness.serving.engine.load().num_generation_tokens < 150
        assert harness.server._service.is_idle.is_set()


async def test_a_stream_that_is_closed_by_openais_client_ends_its_request() -> None:
    async with asking() as (harness, client):
        harness.faults.hold_after(3)
        stream = await client.completions.create(
            prompt="hello", max_tokens=100, stream=True, extra_body=PAST_THE_END, **GREEDY
        )
        await anext(aiter(stream))
        await stream.close()
        await eventually(lambda: harness.num_open_calls == 0)
        harness.faults.release()
        await eventually(lambda: harness.num_blocks_used == 0)


@pytest.mark.long
async def test_one_who_does_not_read_holds_up_nobody_and_is_cut_off_at_the_end() -> None:
    executor = FakeExecutor(num_blocks=5000, max_model_len=2048)
    async with posting(executor=executor, max_messages_per_second=1_000_000) as (harness, client):
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.setblocking(False)
        http = harness.server._http
        assert http is not None
        http._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what it accepts has the same
        await asyncio.get_running_loop().sock_connect(small, ("127.0.0.1", http.port))
        reader, writer = await asyncio.open_connection(sock=small, limit=256)
        body = json.dumps({**HELLO, "stream": True, "logprobs": 20, "max_tokens": 1000}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        writer.write(head % len(body) + body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await eventually(lambda: harness.serving.engine.num_ended_by_reason()["length"] == 1)
        assert harness.num_open_calls == 1  # it has ended, and is not told
        answer = await client.post("/v1/completions", json=HELLO)
        assert answer.json()["usage"]["completion_tokens"] == 8
        harness.server.request_stop()
        harness.server.request_stop()  # and do not wait for the one who does not read
        async with asyncio.timeout(300):
            assert await asyncio.shield(harness.run) == 0
        writer.close()


async def test_an_error_in_the_middle_of_a_stream_is_an_event_and_its_last() -> None:
    async with posting() as (harness, client):
        harness.faults.fail_at_step = 4
        async with streamed(client, max_tokens=100) as answer:
            assert answer.status_code == 200
            events = (await answer.aread()).decode().split("\n\n")
        assert events[-1] == "" and "choices" in json.loads(events[0].removeprefix("data: "))
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == ("INTERNAL_ERROR", "server_error")


async def test_openais_client_raises_the_error_in_the_middle() -> None:
    async with asking() as (harness, client):
        harness.faults.fail_at_step = 4
        stream = await client.completions.create(
            prompt="hello", max_tokens=100, stream=True, extra_body=PAST_THE_END, **GREEDY
        )
        with pytest.raises(openai.APIError, match=r"the engine has died|injected fault") as raised:
            async for _ in stream:
                pass
        assert raised.value.code == "INTERNAL_ERROR"


@pytest.mark.parametrize("stream", [False, True])
async def test_time_that_runs_out_before_anything_was_said_is_a_status(stream: bool) -> None:
    async with posting() as (harness, client):
        harness.faults.gate.clear()
        body = {**HELLO, "max_tokens": 100, "stream": stream}
        answer = await client.post("/v1/completions", json=body, headers={"X-Request-Timeout": "0.2"})
        harness.faults.release()
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "DEADLINE_EXCEEDED"
        assert answer.headers["x-should-retry"] == "false"
        await eventually(lambda: harness.num_blocks_used == 0)


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "soon", "1e9", ""])
async def test_a_limit_of_time_that_is_none_is_refused(given: str) -> None:
    async with posting() as (_, client):
        answer = await client.post("/v1/completions", json=HELLO, headers={"X-Request-Timeout": given})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout")


async def test_a_request_has_the_id_that_its_caller_gave_it() -> None:
    async with posting() as (harness, client):
        harness.faults.hold_after(3)
        named = {"X-Request-Id": "mine"}
        async with client.stream(
            "POST", "/v1/completions", json={**HELLO, "max_tokens": 100, "stream": True}, headers=named
        ) as answer:
            assert answer.headers["x-request-id"] == "mine"
            again = await client.post("/v1/completions", json=HELLO, headers=named)
            assert (again.status_code, again.json()["error"]["code"]) == (409, "ALREADY_EXISTS")
            elsewhere = {**named, "x-jpaged-tenant": "other"}
            other = asyncio.create_task(client.post("/v1/completions", json=HELLO, headers=elsewhere))
            await harness.control.Abort(control_pb2.AbortRequest(request_id="mine"))
            harness.faults.release()
            events = (await answer.aread()).decode().split("\n\n")
            assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
            assert (await other).status_code == 200
        for bad in ("x" * 200, "\x80"):
            refused = await client.post("/v1/completions", json=HELLO, headers={b"X-Request-Id": bad.encode("latin-1")})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-request-id")
            assert refused.headers["x-request-id"] not in ("", bad)


async def test_a_drain_waits_for_streams_and_takes_nothing_new() -> None:
    async with posting() as (harness, client):
        harness.faults.hold_after(3)
        async with streamed(client, max_tokens=40) as answer:
            harness.server.request_stop()
            await eventually(lambda: harness.server.state.stage.value == "draining")
            refused = await client.post("/v1/completions", json=HELLO)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert (await client.get("/health")).status_code == 503
            harness.faults.release()
            assert (await answer.aread()).decode().endswith("data: [DONE]\n\n")
        assert await asyncio.shield(harness.run) == 0
