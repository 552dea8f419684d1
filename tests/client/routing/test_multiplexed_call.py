"""Concurrent requests of an AsyncClient on shared calls: as if each had a call of its own."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from jpaged.client import AsyncClient, GenerateChunk
from jpaged.client.routing.servers import MultiplexedGenerate
from jpaged.errors import Cancelled, DeadlineExceeded, InternalError, InvalidArgument, Unavailable, Unsupported
from jpaged.server.servicer import InferenceServicer
from jpaged.testing import FakeExecutor, expected_tokens
from jpaged.types import SamplingParams
from tests.client.routing.cutting import wire
from tests.server.harness import eventually, running

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls that servers get, by method."""
    counted: Counter[str] = Counter()
    single, shared = InferenceServicer.Generate, InferenceServicer.GenerateMultiplexed

    async def generate(self: Any, message: Any, context: Any) -> None:
        counted["single"] += 1
        await single(self, message, context)

    async def multiplexed(self: Any, messages: Any, context: Any) -> Any:
        counted["shared"] += 1
        async for one in shared(self, messages, context):
            yield one

    monkeypatch.setattr(InferenceServicer, "Generate", generate)
    monkeypatch.setattr(InferenceServicer, "GenerateMultiplexed", multiplexed)
    return counted


def expected(text: str, num_tokens: int) -> list[int]:
    return expected_tokens(list(text.encode()), num_tokens)


async def tokens(stream: Any) -> list[int]:
    async with asyncio.timeout(300):
        return [token_id async for chunk in stream for token_id in chunk.token_ids]


def texts(count: int) -> Iterator[str]:
    return (f"prompt {i}" for i in range(count))


async def test_requests_that_run_alone_have_calls_of_their_own(calls):
    async with running() as harness, AsyncClient(harness.target) as client:
        for text in texts(3):
            assert await tokens(client.generate(text, GREEDY)) == expected(text, 12)
    assert calls == {"single": 3}


@pytest.mark.parametrize(("limit", "num_shared"), [(1, 0), (4, 3), (64, 1)])
async def test_concurrent_requests_share_calls_up_to_the_limit(calls, limit, num_shared):
    async with running(max_num_seqs=16) as harness:
        harness.faults.hold_after(2)
        async with AsyncClient(harness.target, max_requests_per_call=limit) as client:
            reading = [asyncio.create_task(tokens(client.generate(text, GREEDY))) for text in texts(13)]
            await eventually(lambda: harness.num_open_calls == 13)
            harness.faults.release()
            assert await asyncio.gather(*reading) == [expected(text, 12) for text in texts(13)]
    assert +calls == +Counter({"single": 13 if limit == 1 else 1, "shared": num_shared})


async def test_whole_requests_and_later_rounds_share_calls_too(calls):
    async with running() as harness, AsyncClient(harness.target) as client:
        for _ in range(2):
            outputs = await asyncio.gather(*(client.complete(text, GREEDY) for text in texts(6)))
            assert [list(one.outputs[0].token_ids) for one in outputs] == [expected(text, 12) for text in texts(6)]
            assert [one.prompt_token_ids for one in outputs] == [tuple(text.encode()) for text in texts(6)]
    assert calls == {"single": 2, "shared": 2}


async def test_the_limit_is_at_least_one():
    with pytest.raises(InvalidArgument, match="max_requests_per_call: 0 is below the limit of 1"):
        AsyncClient("localhost:1", max_requests_per_call=0)


async def test_errors_are_those_of_single_calls_with_their_fields():
    async with running() as harness, AsyncClient(harness.target) as client:
        reading = asyncio.gather(
            *(client.complete(text, GREEDY) for text in texts(3)),
            client.complete("x", SamplingParams(max_tokens=1000)),
            client.complete("x", GREEDY, adapter="none"),
            client.complete("x", GREEDY),
            return_exceptions=True,
        )
        found: list[Any] = await reading
        *outputs, too_long, no_adapter, last = found
        assert isinstance(too_long, InvalidArgument)
        assert too_long.field == "sampling.max_tokens"
        assert isinstance(no_adapter, Unsupported)
        assert [list(one.outputs[0].token_ids) for one in (*outputs, last)] == [
            expected(text, 12) for text in (*texts(3), "x")
        ]


async def test_closing_a_stream_cancels_its_request_alone():
    async with running() as harness, AsyncClient(harness.target) as client:
        harness.faults.hold_after(3)
        streams = [client.generate(text, LONG) for text in texts(4)]
        await eventually(lambda: harness.num_open_calls == 4)
        streams[2].close()
        await eventually(lambda: harness.num_open_calls == 3)
        harness.faults.release()
        assert await tokens(streams[2]) == []
        for i in (0, 1, 3):
            assert await tokens(streams[i]) == expected(f"prompt {i}", 100)


async def test_a_reader_that_is_cancelled_cancels_its_request():
    async with running() as harness, AsyncClient(harness.target) as client:
        harness.faults.hold_after(3)
        reading = [asyncio.create_task(tokens(client.generate(text, LONG))) for text in texts(3)]
        await eventually(lambda: harness.num_open_calls == 3)
        reading[1].cancel()
        harness.faults.release()
        with pytest.raises(asyncio.CancelledError):
            await reading[1]
        others = [await reading[0], await reading[2]]
        assert others == [expected(f"prompt {i}", 100) for i in (0, 2)]
        await eventually(lambda: harness.num_open_calls == harness.num_blocks_used == 0)


async def test_a_timeout_ends_its_request_although_the_server_hangs():
    async with running() as harness, AsyncClient(harness.target) as client:
        harness.faults.hold_after(2)
        others = [client.generate(text, GREEDY) for text in texts(2)]
        with pytest.raises(DeadlineExceeded):
            await tokens(client.generate("late", LONG, timeout_s=0.05))
        harness.faults.release()
        assert [await tokens(one) for one in others] == [expected(text, 12) for text in texts(2)]
        await eventually(lambda: harness.num_open_calls == harness.num_blocks_used == 0)


async def test_a_closed_client_ends_its_streams():
    async with running() as harness:
        harness.faults.hold_after(2)
        client = AsyncClient(harness.target)
        reading = [asyncio.create_task(tokens(client.generate(text, LONG))) for text in texts(3)]
        await eventually(lambda: harness.num_open_calls == 3)
        await client.close()
        for one in await asyncio.gather(*reading, return_exceptions=True):
            assert isinstance(one, Cancelled)
        harness.faults.release()
        await eventually(lambda: harness.num_open_calls == harness.num_blocks_used == 0)


async def test_a_server_without_the_method_gets_single_calls(calls, monkeypatch):
    made: list[MultiplexedGenerate] = []
    init = MultiplexedGenerate.__init__

    def older(self: MultiplexedGenerate, endpoint: Any, max_requests: int) -> None:
        init(self, endpoint, max_requests)
        self._shared = endpoint.channel.stream_stream("/jpaged.v1.InferenceService/Missing")
        made.append(self)

    monkeypatch.setattr(MultiplexedGenerate, "__init__", older)
    async with running() as harness, AsyncClient(harness.target) as client:
        for _ in range(2):
            reading = [tokens(client.generate(text, GREEDY)) for text in texts(5)]
            assert await asyncio.gather(*reading) == [expected(text, 12) for text in texts(5)]
    assert calls == {"single": 10}
    assert not made[0]._is_supported


async def test_a_call_that_ends_before_its_requests_is_an_internal_error(monkeypatch):
    async def nothing(self: Any, messages: Any, context: Any) -> Any:
        async for _ in messages:
            return
        yield

    monkeypatch.setattr(InferenceServicer, "GenerateMultiplexed", nothing)
    async with running() as harness, AsyncClient(harness.target, resuming=None) as client:
        harness.faults.hold_after(2)
        first = client.generate("a", GREEDY)
        with pytest.raises(InternalError, match="ended the call before its requests"):
            await tokens(client.generate("b", GREEDY))
        harness.faults.release()
        assert await tokens(first) == expected("a", 12)


async def test_streams_of_a_lost_call_resume_each_after_its_tokens():
    server = running(executor=FakeExecutor(num_blocks=512), max_messages_per_second=1_000_000)
    lengths = iter([800, 1200, 2000])
    async with (
        server as harness,
        wire(harness.port, lambda: next(lengths, None)) as cut,
        AsyncClient(cut.target) as client,
    ):
        streams = [client.generate(text, LONG) for text in texts(8)]
        assert await asyncio.gather(*map(tokens, streams)) == [expected(text, 100) for text in texts(8)]
        assert max(one.num_tries for one in streams) > 1
        assert cut.num_cuts >= 1
        await eventually(lambda: harness.num_open_calls == 0)


async def test_requests_move_to_another_server_when_one_drains():
    async with running() as one, running() as other, AsyncClient([one.target, other.target]) as client:
        reading = [asyncio.create_task(tokens(client.generate(text, GREEDY))) for text in texts(12)]
        one.server.drain()
        assert await asyncio.gather(*reading) == [expected(text, 12) for text in texts(12)]


async def test_a_lost_server_is_unavailable_without_resuming():
    server = running()
    async with (
        server as harness,
        wire(harness.port, lambda: 600) as cut,
        AsyncClient(cut.target, resuming=None) as client,
    ):
        reading = [tokens(client.generate(text, LONG)) for text in texts(6)]
        found = await asyncio.gather(*reading, return_exceptions=True)
    assert {type(one) for one in found} <= {Unavailable, list}
    assert Unavailable in map(type, found)


async def test_streams_are_read_in_any_order():
    async with running(max_messages_per_second=1_000_000) as harness, AsyncClient(harness.target) as client:
        streams = [client.generate(text, LONG) for text in texts(3)]
        first: list[GenerateChunk] = [await anext(stream) for stream in reversed(streams)][::-1]
        rest = [await tokens(stream) for stream in streams]
        assert [[*chunk.token_ids, *more] for chunk, more in zip(first, rest, strict=True)] == [
            expected(text, 100) for text in texts(3)
        ]
