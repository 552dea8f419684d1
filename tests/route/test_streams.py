"""Streams through a router are those of the servers: the same messages, and nothing lost with a server."""

import asyncio
import random
import re
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from jpaged._proto.v1 import control_pb2
from jpaged.client import AsyncClient, GenerateChunk
from jpaged.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    QueueFull,
    Unavailable,
)
from jpaged.structured import StructuredOutputs
from jpaged.testing import FakeExecutor
from jpaged.types import SamplingParams
from tests.client.routing.cutting import wire
from tests.client.routing.test_resuming import SHAPES, all_of, folded, server
from tests.route.rig import routed
from tests.server.compat.test_constraints import constrained
from tests.server.connections.raw_http2 import Connection, message
from tests.server.harness import collect, error_details, eventually, failure_of, request

WHOLE = {
    "beams": SamplingParams(max_tokens=20, temperature=0.0, beam_width=3, n=2),
    "best": SamplingParams(max_tokens=20, seed=4, n=2, best_of=4, ignore_eos=True),
}
"""What is told at the end alone."""


async def told(client: AsyncClient, shape: str) -> Any:
    """All that a caller hears of a request."""
    if shape in WHOLE:
        return (await client.complete("hello", WHOLE[shape])).outputs
    return folded(await all_of(client.generate("hello", SHAPES[shape])), SHAPES[shape])


@pytest.mark.long
@pytest.mark.parametrize("shape", [*SHAPES, *WHOLE])
async def test_a_stream_has_the_messages_of_its_server(shape):
    sampling = (SHAPES | WHOLE)[shape]
    async with (
        server() as harness,
        routed(harness.target) as router,
        AsyncClient(harness.target) as direct,
        router.client() as client,
    ):
        assert await told(client, shape) == await told(direct, shape)
        assert (await client.complete("hello", sampling)).outputs == (await direct.complete("hello", sampling)).outputs


async def test_what_goes_ahead_of_a_stream_and_behind_an_error_goes_through():
    async with server() as harness, routed(harness.target) as router:
        harness.faults.gate.clear()
        call = router.inference.Generate(request(request_id="mine"))
        async with asyncio.timeout(300):
            ahead = dict(await call.initial_metadata())
        assert ahead["x-jpaged-request-id"] == "mine"
        harness.faults.release()
        await collect(call)
        error = await failure_of(router.inference.Generate(request(max_tokens=5000)))
        direct = await failure_of(harness.inference.Generate(request(max_tokens=5000)))
        assert (error.code(), error.details()) == (direct.code(), direct.details())
        assert error_details(error) == error_details(direct)
        assert error_details(error)["BadRequest"].field_violations[0].field == "sampling.max_tokens"


async def test_a_request_without_an_id_gets_one_that_is_the_same_everywhere():
    async with server() as harness, routed(harness.target) as router:
        call = router.inference.Generate(request())
        (ahead,) = [value for key, value in await call.initial_metadata() if key == "x-jpaged-request-id"]
        assert {message.request_id for message in await collect(call)} == {ahead}


@pytest.mark.long
@pytest.mark.parametrize("shape", [*SHAPES, *WHOLE])
async def test_a_stream_that_is_cut_again_and_again_is_as_if_it_had_not_been(shape):
    rng = random.Random(shape)
    async with (
        server() as harness,
        wire(harness.port) as cut,
        routed(cut.target) as router,
        AsyncClient(harness.target) as direct,
        router.client(resuming=None) as client,
    ):
        undisturbed = await told(direct, shape)
        harness.faults.hold_after(rng.randrange(1, 5))
        reading = asyncio.ensure_future(told(client, shape))
        for _ in range(3):
            await eventually(lambda: harness.num_open_calls == 1 and not harness.faults.gate.is_set())
            cut.kill()
            harness.faults.release()
            await eventually(lambda: harness.num_open_calls == 0)
            harness.faults.hold_after(rng.randrange(1, 5))
            cut.restart()
        harness.faults.release()
        assert await reading == undisturbed
        assert router.router.counts.ended == {("Generate", "OK"): 1}  # the client has seen nothing of it
        await eventually(lambda: harness.num_open_calls == 0)
        await eventually(lambda: harness.num_blocks_used == 0)


async def test_a_stream_that_follows_a_grammar_goes_on_within_it():
    """It is cut three times, within words that the grammar is in the middle of."""
    pattern = "[0-9]{30}(-[0-9]{4}){2}"
    sampling = SamplingParams(max_tokens=80, seed=3, structured_outputs=StructuredOutputs(regex=pattern))
    async with (
        constrained(max_messages_per_second=1_000_000) as harness,
        wire(harness.port) as cut,
        routed(cut.target) as router,
        AsyncClient(harness.target) as direct,
        router.client(resuming=None) as client,
    ):
        undisturbed = folded(await all_of(direct.generate("once", sampling)), sampling)
        harness.faults.hold_after(4)
        reading = asyncio.ensure_future(all_of(client.generate("once", sampling)))
        for _ in range(3):
            await eventually(lambda: harness.num_open_calls == 1 and not harness.faults.gate.is_set())
            cut.kill()
            harness.faults.release()
            await eventually(lambda: harness.num_open_calls == 0)
            harness.faults.hold_after(4)
            cut.restart()
        harness.faults.release()
        assert folded(await reading, sampling) == undisturbed
        (output,) = undisturbed.outputs
        assert re.fullmatch(pattern, output.text)
        assert output.finish_reason == "stop"
        assert router.router.counts.resumed.total() >= 1


@pytest.mark.long
@pytest.mark.parametrize("end", ["kill", "drain", "die"])
async def test_a_stream_goes_on_at_the_other_server_when_its_own_goes(end):
    sampling = SHAPES["three"]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server(shutdown_timeout=0.05)) for _ in range(2)]
        wires = [await stack.enter_async_context(wire(one.port)) for one in servers]
        router = await stack.enter_async_context(routed(*(one.target for one in wires)))
        client = await stack.enter_async_context(router.client(resuming=None))
        for one in servers:
            one.faults.hold_after(20)
        stream = client.generate("hello", sampling)
        chunks: list[GenerateChunk] = [await anext(aiter(stream))]
        await eventually(lambda: any(one.num_open_calls for one in servers))
        index = next(i for i, one in enumerate(servers) if one.num_open_calls)
        mine, other = servers[index], servers[1 - index]
        if end == "kill":
            wires[index].kill()
        elif end == "drain":
            mine.server.request_stop()
        else:
            mine.faults.fail_at_step = mine.executor.num_steps + 2
            mine.faults.release()
        other.faults.release()
        chunks += await all_of(stream)
        mine.faults.release()
        assert router.router.counts.resumed[wires[1 - index].target] == 1
        async with AsyncClient(other.target) as direct:
            undisturbed = await all_of(direct.generate("hello", sampling))
        assert folded(chunks, sampling) == folded(undisturbed, sampling)
        await eventually(lambda: other.num_open_calls == 0)


@pytest.mark.long
async def test_a_stream_waits_for_its_only_server_to_come_again():
    sampling = SHAPES["three"]
    async with server() as harness, wire(harness.port) as cut, routed(cut.target) as router:
        async with AsyncClient(harness.target) as direct:
            undisturbed = await all_of(direct.generate("hello", sampling))
        async with router.client(resuming=None) as client:
            harness.faults.hold_after(20)
            stream = client.generate("hello", sampling)
            chunks = [await anext(aiter(stream))]
            cut.kill()
            rest = asyncio.ensure_future(all_of(stream))
            await eventually(lambda: harness.num_open_calls == 0)
            await router.until(0)
            harness.faults.release()
            cut.restart()
            assert folded([*chunks, *await rest], sampling) == folded(undisturbed, sampling)


@pytest.mark.parametrize("resume_within_s", [0.0, 0.2])
async def test_a_stream_ends_with_unavailable_where_nobody_comes_again(resume_within_s):
    async with (
        server() as harness,
        wire(harness.port) as cut,
        routed(cut.target, resume_within_s=resume_within_s) as router,
    ):
        async with router.client(resuming=None) as client:
            harness.faults.hold_after(20)
            stream = client.generate("hello", SHAPES["greedy"])
            assert (await anext(aiter(stream))).token_ids
            cut.kill()
            with pytest.raises(Unavailable):
                await all_of(stream)
            harness.faults.release()
        assert router.router._relay.flights == {}


async def test_a_caller_that_goes_away_ends_its_request():
    async with server() as harness, routed(harness.target) as router:
        harness.faults.hold_after(5)
        call = router.inference.Generate(request(max_tokens=100))
        await call.read()
        call.cancel()
        await eventually(lambda: harness.num_open_calls == 0)
        harness.faults.release()
        await eventually(lambda: harness.num_blocks_used == 0)
        await eventually(lambda: not router.router._relay.flights and router.router.counts.open == 0)
        assert [one.endpoint.num_open for one in router.router.fleet.members.values()] == [0]


async def test_a_deadline_is_that_of_the_server_too():
    async with server() as harness, routed(harness.target) as router:
        harness.faults.gate.clear()
        async with router.client(timeout_s=1.0, resuming=None) as client:
            with pytest.raises(DeadlineExceeded):
                await all_of(client.generate("hello", SHAPES["greedy"]))
        await eventually(lambda: harness.num_open_calls == 0)
        harness.faults.release()


async def test_an_id_is_in_flight_once_and_an_abort_finds_its_server():
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server()) for _ in range(3)]
        router = await stack.enter_async_context(routed(*(one.target for one in servers)))
        client = await stack.enter_async_context(router.client(resuming=None))
        for one in servers:
            one.faults.gate.clear()
        streams = [client.generate(f"prompt {i}", SHAPES["greedy"], request_id=f"r{i}") for i in range(6)]
        reading = [asyncio.ensure_future(all_of(stream)) for stream in streams]
        await eventually(lambda: sum(one.num_open_calls for one in servers) == 6)
        assert len({one.port for one in servers if one.num_open_calls}) > 1
        with pytest.raises(AlreadyExists, match="'r3' is in flight"):
            await all_of(client.generate("another", SHAPES["greedy"], request_id="r3"))
        await client.abort("r3")
        with pytest.raises(NotFound):
            await client.abort("nobody")
        for one in servers:
            one.faults.release()
        found = await asyncio.gather(*reading)
        assert [chunks[-1].finish_reason for chunks in found] == ["length"] * 3 + ["abort"] + ["length"] * 2
        assert all(chunks[0].request_id == f"r{i}" for i, chunks in enumerate(found))
        assert len(await all_of(client.generate("again", SHAPES["greedy"], request_id="r3"))) > 1


async def test_a_full_server_is_left_for_another_and_a_full_fleet_says_when():
    async with AsyncExitStack() as stack:
        small: dict[str, Any] = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
        servers = [
            await stack.enter_async_context(server(executor=FakeExecutor(max_num_seqs=1), **small)) for _ in range(2)
        ]
        router = await stack.enter_async_context(routed(*(one.target for one in servers)))
        client = await stack.enter_async_context(router.client(resuming=None))
        for one in servers:
            one.faults.gate.clear()
        same = "the same beginning " * 5  # all belong to one server
        greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        streams = [asyncio.ensure_future(all_of(client.generate(same, greedy))) for _ in range(4)]
        # A call is open before its server has a place for it, so only the places tell that both servers are full.
        await eventually(lambda: all(one.serving.engine.is_full for one in servers))
        with pytest.raises(QueueFull) as failure:
            await all_of(client.generate(same, greedy))
        assert failure.value.retry_after_s > 0
        for one in servers:
            one.faults.release()
        found = await asyncio.gather(*streams)
        assert [sum(len(chunk.token_ids) for chunk in chunks) for chunks in found] == [4] * 4


async def test_calls_of_one_server_go_to_the_least_busy_and_come_back_as_they_are():
    async with (
        server() as first,
        server() as second,
        routed(first.target, second.target) as router,
        AsyncClient(first.target) as direct,
        router.client() as client,
    ):
        assert await client.tokenize("hello") == await direct.tokenize("hello")
        assert await client.detokenize((104, 105)) == "hi"
        assert [one.tokens for one in await client.score("a", ["b", "c"])] == [
            one.tokens for one in await direct.score("a", ["b", "c"])
        ]
        assert list(await client.embed(["a", "b"])) == list(await direct.embed(["a", "b"]))
        assert await client.model_info() == await direct.model_info()
        with pytest.raises(InvalidArgument) as failure:
            await client.score("a", [])
        assert failure.value.field == "continuations"


async def test_a_call_of_one_server_is_asked_elsewhere_when_its_server_is_killed():
    async with (
        server() as first,
        server() as second,
        wire(first.port) as one,
        wire(second.port) as two,
        routed(one.target, two.target) as router,
        router.client() as client,
    ):
        for harness in (first, second):
            harness.faults.gate.clear()
        asked = asyncio.ensure_future(client.score("a", ["b"]))
        pairs = [(one, first), (two, second)]
        await eventually(lambda: any(pair[1].server._service._num_several for pair in pairs))
        cut, harness = next(pair for pair in pairs if pair[1].server._service._num_several)
        cut.kill()
        for each in (first, second):
            each.faults.release()
        assert len(await asked) == 1


async def test_who_calls_goes_along():
    seen: list[dict[str, Any]] = []
    async with server(enable_log_requests=True) as harness, routed(harness.target) as router:
        begin = harness.server._service.generate

        def spy(call: Any) -> Any:
            seen.append({"tenant": call.tenant, **call.caller.trace})
            return begin(call)

        harness.server._service.generate = spy
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        metadata = (("x-jpaged-tenant", "acme"), ("traceparent", trace), ("tracestate", "a=b"))
        await collect(router.inference.Generate(request(), metadata=metadata))
        assert seen == [{"tenant": "acme", "traceparent": trace, "tracestate": "a=b"}]


@pytest.mark.parametrize(
    ("key", "code"), [("x-jpaged-tenant", "INVALID_ARGUMENT"), ("authorization", "UNAUTHENTICATED"), ("x-other", "OK")]
)
async def test_metadata_that_is_no_text_is_refused_by_name_or_left_out(key, code):
    async with server() as harness, routed(harness.target) as router:
        async with Connection(router.router.port) as connection:
            sent = message(request().SerializeToString())
            path = b"/jpaged.v1.InferenceService/Generate"
            status, _ = await connection.status(connection.begin(path, sent, ((key.encode(), b"\xff\xfe"),)))
        assert status == grpc.StatusCode[code].value[0]
        assert router.states() == {harness.target: ""}


async def test_calls_beyond_the_bound_are_told_so():
    async with server() as harness, routed(harness.target, max_calls=3) as router:
        harness.faults.gate.clear()
        calls = [router.inference.Generate(request(max_tokens=30)) for _ in range(3)]
        await eventually(lambda: harness.num_open_calls == 3)
        error = await failure_of(router.inference.Generate(request()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_calls" in error.details()
        assert error_details(error)["RetryInfo"].retry_delay.ToNanoseconds() > 0
        harness.faults.release()
        for call in calls:
            await collect(call)
        await eventually(lambda: harness.serving.engine.load().num_running == 0)
        assert (await router.control.GetLoad(control_pb2.GetLoadRequest())).num_running == 0
