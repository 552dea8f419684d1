"""GenerateMultiplexed: many requests on one call, each as Generate runs it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from grpc import aio

from jpaged._proto.v1 import inference_pb2
from jpaged.errors import Unavailable
from jpaged.server.grpc_server import MessagesInHand
from jpaged.server.servicer import MultiplexedCall
from jpaged.testing import ByteTokenizer, expected_tokens
from tests.access.test_keys import FILE, TOKEN
from tests.server.harness import Harness, collect, eventually, request, running

Asked = inference_pb2.GenerateRequest
Parts = dict[int, list[inference_pb2.MultiplexedResponse]]


def starts(*requests: Asked, first: int = 0, **options: Any) -> inference_pb2.GenerateMultiplexedRequest:
    """A message that starts requests, numbered from `first`."""
    made = [inference_pb2.MultiplexedStart(number=first + i, request=one, **options) for i, one in enumerate(requests)]
    return inference_pb2.GenerateMultiplexedRequest(starts=made)


def cancels(*numbers: int) -> inference_pb2.GenerateMultiplexedRequest:
    return inference_pb2.GenerateMultiplexedRequest(cancels=numbers)


async def read(call: Any, parts: Parts | None = None, *, until: int | None = None) -> Parts:
    """The parts by number, to the end of the call or until the first part of request `until`."""
    parts = {} if parts is None else parts
    async with asyncio.timeout(300):
        while (message := await call.read()) is not aio.EOF:
            assert message.responses
            for one in message.responses:
                parts.setdefault(one.number, []).append(one)
            if until is not None and until in parts:
                return parts
    return parts


async def run(harness: Harness, *messages: inference_pb2.GenerateMultiplexedRequest, **options: Any) -> Parts:
    """Sends messages, closes the client's side and reads to the end."""
    call = harness.inference.GenerateMultiplexed(**options)
    for message in messages:
        await call.write(message)
    await call.done_writing()
    parts = await read(call)
    assert await call.code() is grpc.StatusCode.OK
    return parts


def tokens(parts: list[inference_pb2.MultiplexedResponse]) -> list[int]:
    assert [one.WhichOneof("content") for one in parts] == ["accepted", *["response"] * (len(parts) - 1)]
    assert [one.response.is_last for one in parts[1:]] == [False] * (len(parts) - 2) + [True]
    return [token_id for one in parts[1:] for token_id in one.response.token_ids]


def status(parts: list[inference_pb2.MultiplexedResponse]) -> status_pb2.Status:
    return status_pb2.Status.FromString(parts[-1].status)


def expected(text: str, num_tokens: int = 8) -> list[int]:
    return expected_tokens(ByteTokenizer().encode(text), num_tokens)


async def test_each_request_has_its_own_tokens_and_headers(harness):
    texts = [f"prompt {i}" for i in range(12)]
    asked = [request(text, request_id=f"id {i}") for i, text in enumerate(texts)]
    asked[3].return_prompt_token_ids = asked[4].whole = True
    parts = await run(harness, starts(*asked[:7]), starts(*asked[7:], first=7))
    assert [tokens(parts[i]) for i in range(12)] == [expected(text) for text in texts]
    assert [dict(parts[i][0].accepted.metadata) for i in range(12)] == [
        {"x-jpaged-request-id": f"id {i}"} for i in range(12)
    ]
    assert list(parts[3][1].response.prompt_token_ids) == ByteTokenizer().encode(texts[3])
    assert len(parts[4]) == 2


async def test_an_error_ends_its_request_alone(harness):
    wrong = request("b", top_p=2.0)
    parts = await run(harness, starts(request("a"), wrong, request("c", request_id="c")), starts(Asked(), first=3))
    assert tokens(parts[0]) == expected("a")
    assert tokens(parts[2]) == expected("c")
    assert [status(parts[i]).code for i in (1, 3)] == [grpc.StatusCode.INVALID_ARGUMENT.value[0]] * 2
    assert "top_p" in status(parts[1]).message
    assert [one.TypeName() for one in status(parts[1]).details] == ["google.rpc.ErrorInfo", "google.rpc.BadRequest"]


async def test_a_start_needs_a_request_and_a_valid_timeout(harness):
    message = inference_pb2.GenerateMultiplexedRequest(starts=[inference_pb2.MultiplexedStart(number=5)])
    parts = await run(harness, message, starts(request(), first=6, timeout_s=float("nan")))
    assert status(parts[5]).message == "request: is missing"
    assert status(parts[6]).message == "timeout_s: nan is not a number of at least 0"


async def test_a_trace_has_no_other_metadata(harness):
    trace = {"x-jpaged-tenant": "no\nname", "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    parts = await run(harness, starts(request("a"), trace=trace))
    assert tokens(parts[0]) == expected("a")


async def test_a_cancelled_request_frees_its_blocks_and_says_no_more(harness):
    harness.faults.hold_after(4)
    call = harness.inference.GenerateMultiplexed()
    await call.write(starts(request("a", max_tokens=100), request("b", max_tokens=30)))
    await eventually(lambda: harness.num_open_calls == 2)
    await call.write(cancels(0, 7))
    await eventually(lambda: harness.num_open_calls == 1)
    harness.faults.release()
    await call.done_writing()
    parts = await read(call)
    assert tokens(parts[1]) == expected("b", 30)
    assert not any(one.response.is_last for one in parts.get(0, []))
    await eventually(lambda: harness.num_blocks_used == 0)


async def test_the_deadline_of_a_request_ends_it_alone(harness):
    parts = await run(harness, starts(request("a", max_tokens=100), timeout_s=1e-9), starts(request("b"), first=1))
    assert status(parts[0]).code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert tokens(parts[1]) == expected("b")


async def test_the_deadline_of_the_call_ends_all_requests(harness):
    harness.faults.hold_after(2)

    async def messages() -> AsyncIterator[Any]:
        yield starts(request(max_tokens=100), timeout_s=20)

    async def read_all() -> int:
        return sum([1 async for _ in harness.inference.GenerateMultiplexed(messages(), timeout=0.2)])

    with pytest.raises(aio.AioRpcError, match="DEADLINE_EXCEEDED"):
        await read_all()
    harness.faults.release()
    await eventually(lambda: harness.num_open_calls == harness.num_blocks_used == 0)


@pytest.mark.parametrize("problem", ["number", "many", "bytes"])
async def test_a_broken_message_ends_the_call_and_its_requests(harness, problem):
    harness.faults.hold_after(2)
    method = harness.channel.stream_stream("/jpaged.v1.InferenceService/GenerateMultiplexed")
    call = method()
    await call.write(starts(request(max_tokens=100)).SerializeToString())
    await eventually(lambda: harness.num_open_calls == 1)
    many = starts(*[request()] * 257, first=1).SerializeToString()
    await call.write({"number": starts(request()).SerializeToString(), "many": many, "bytes": b"\xff"}[problem])
    with pytest.raises(aio.AioRpcError) as failed:
        await collect(call)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    message = {"number": "starts.number: 0 is not above 0", "many": "starts: 257 requests", "bytes": "request: 1 bytes"}
    assert message[problem] in (failed.value.details() or "")
    harness.faults.release()
    await eventually(lambda: harness.num_open_calls == harness.num_blocks_used == 0)


async def test_a_client_that_goes_away_ends_all_requests(harness):
    harness.faults.hold_after(2)
    call = harness.inference.GenerateMultiplexed()
    await call.write(starts(request("a", max_tokens=100), request("b", max_tokens=100)))
    await eventually(lambda: harness.num_open_calls == 2)
    call.cancel()
    harness.faults.release()
    await eventually(lambda: harness.num_open_calls == harness.num_blocks_used == 0)


async def test_a_draining_server_refuses_requests_and_ends_idle_calls():
    async with running() as harness:
        idle = harness.inference.GenerateMultiplexed()
        await idle.write(starts(request("a")))
        await read(idle, until=0)
        harness.server.drain()
        with pytest.raises(aio.AioRpcError) as failed:
            await read(idle)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await harness.run == 0


async def test_quotas_and_tenants_count_each_request(tmp_path: Path):
    (tmp_path / "keys.toml").write_text(FILE)
    audit = tmp_path / "audit.jsonl"
    options: dict[str, Any] = {"api_keys": str(tmp_path / "keys.toml"), "audit_log": str(audit)}
    async with running(**options) as harness:
        harness.faults.hold_after(2)
        call = harness.inference.GenerateMultiplexed(metadata=(("authorization", f"Bearer {TOKEN}"),))
        await call.write(starts(request("a", request_id="one"), request("b", request_id="two")))
        await eventually(lambda: harness.num_open_calls == 2)
        await call.write(starts(request("c", request_id="three"), first=2))
        parts = await read(call, until=2)
        assert status(parts[2]).code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        harness.faults.release()
        await call.done_writing()
        assert [tokens(one) for number, one in (await read(call, parts)).items() if number < 2] == [
            expected("a"),
            expected("b"),
        ]
        with pytest.raises(aio.AioRpcError) as failed:
            await read(harness.inference.GenerateMultiplexed())
        assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    told = [(line["method"].rpartition("/")[2], line["tenant"], line["request_id"], line["status"]) for line in lines]
    name = "GenerateMultiplexed"
    assert sorted(told) == sorted(
        [
            (name, "acme", "one", "OK"),
            (name, "acme", "two", "OK"),
            (name, "acme", "", "RESOURCE_EXHAUSTED"),
            (name, "acme", "", "OK"),
            (name, "", "", "UNAUTHENTICATED"),
        ]
    )
    assert [line["completion_tokens"] for line in lines if line["request_id"]] == [8, 8]


class Context:
    """What a call needs of gRPC's context."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "test"

    def time_remaining(self) -> float | None:
        return None


def called(harness: Harness, messages: AsyncIterator[Any]) -> MultiplexedCall:
    """A call without a wire: the test is its reader."""
    context: Any = Context()
    return MultiplexedCall(harness.server._service, messages, MessagesInHand(1 << 20), context)


async def test_output_is_merged_for_a_reader_that_is_slow():
    async with running(max_messages_per_second=1_000_000) as harness:
        is_over = asyncio.Event()

        async def messages() -> AsyncIterator[Any]:
            yield starts(request("a", max_tokens=100), request("b", max_tokens=100))
            await is_over.wait()

        responses = called(harness, messages()).responses()
        first = await anext(responses)  # it is being written until the next one is read
        await eventually(lambda: harness.serving.engine.load().num_generation_tokens == 200)
        await eventually(lambda: harness.num_blocks_used == 0)
        is_over.set()
        later = [one async for one in responses]
        parts: Parts = {}
        for message in (first, *later):
            for one in message.responses:
                parts.setdefault(one.number, []).append(one)
        assert [tokens(parts[i]) for i in (0, 1)] == [expected("a", 100), expected("b", 100)]
        assert max(map(len, parts.values())) <= 5


async def test_a_message_has_about_a_mebibyte_at_most(harness, monkeypatch):
    monkeypatch.setattr("jpaged.server.servicer._MAX_RESPONSES_BYTES", 200)

    async def messages() -> AsyncIterator[Any]:
        yield starts(*(request(f"prompt {i}", request_id="x" * 50 + f"{i}") for i in range(8)))

    sizes = []
    async for message in called(harness, messages()).responses():
        sizes.append((len(message.responses), message.ByteSize()))
    assert all(count == 1 or size < 260 for count, size in sizes)
    assert any(count > 1 for count, _ in sizes)


async def test_a_call_that_is_ended_finishes_its_requests(harness):
    harness.faults.hold_after(2)
    is_over = asyncio.Event()

    async def messages() -> AsyncIterator[Any]:
        yield starts(request("a"))
        await is_over.wait()

    call = called(harness, messages())
    responses = call.responses()
    parts = [*(await anext(responses)).responses]
    call.end(Unavailable("it ends"))
    harness.faults.release()

    async def take() -> None:
        async for message in responses:
            parts.extend(message.responses)

    with pytest.raises(Unavailable, match="it ends"):
        await take()
    assert tokens(parts) == expected("a")
