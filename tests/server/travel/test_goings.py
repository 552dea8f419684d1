"""Prefixes that find no room, and those who go away while they travel."""

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import pytest
from grpc import aio

from jpaged._proto.v1 import inference_pb2, prefixes_pb2, prefixes_pb2_grpc
from jpaged.client import AsyncClient
from jpaged.client.prefixes import MAGIC
from jpaged.engine.kv_cache.offload import transfer as leaving_module
from jpaged.errors import (
    Cancelled,
    DeadlineExceeded,
    Incompatible,
    InvalidArgument,
    NotFound,
    QueueFull,
    Unavailable,
    Unsupported,
)
from jpaged.server import kv_transfer as servicer_module
from jpaged.service import kv_transfer as travelling_module
from jpaged.service.kv_protocol import Receiving
from jpaged.testing import FakeExecutor
from jpaged.types import Prompt, SamplingParams
from tests.server.harness import eventually, running
from tests.server.travel.pairs import GREEDY, NUM_FULL, TEXT, executor, framed, is_at_rest, messages_of, saved_by, two


async def test_where_there_is_no_room_it_is_said_what_was_taken():
    async with two(executor(), executor(num_host_blocks=5)) as (first, a, _, b):
        await a.complete(TEXT, GREEDY)
        arrival = await b.prefixes.load(await saved_by(a))
        assert (arrival.num_tokens, arrival.num_loaded_blocks, arrival.is_short_of_room) == (20, 5, True)
        assert arrival.num_found_tokens == NUM_FULL
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == 20
    async with two(executor(num_host_blocks=5), executor()) as (first, a, _, b):
        await a.complete(TEXT, GREEDY)
        arrival = await b.prefixes.fetch(first.target, TEXT)
        assert (arrival.num_tokens, arrival.num_found_tokens, arrival.is_short_of_room) == (20, NUM_FULL, False)


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"kv_policy": "reserve-max"}, {}])
async def test_where_prefixes_cannot_travel_every_call_says_so(options):
    fake = executor(num_host_blocks=40 if options else 0)
    async with two() as (_, a, _, _), running(executor=fake, **options) as harness:
        await a.complete(TEXT, GREEDY)
        saved = await saved_by(a)
        async with AsyncClient(harness.target) as client:
            for call in (saved_by(client), client.prefixes.load(saved)):
                with pytest.raises(Unsupported, match="prefixes cannot be transferred: "):
                    await call


async def test_a_reader_that_goes_away_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(leaving_module, "MAX_STAGED_BLOCKS", 1)
    async with two() as (_, a, _, b):
        await a.complete(TEXT, GREEDY)
        for num_read in (1, 2, 5):
            async with aclosing(a.prefixes.save(TEXT)) as saved:
                for _ in range(num_read):
                    await anext(saved)
        assert (await b.prefixes.load(await saved_by(a))).num_tokens == NUM_FULL


async def test_a_reader_that_takes_nothing_loses_its_stream(monkeypatch):
    monkeypatch.setattr(servicer_module, "_STALL_S", 0.2)
    monkeypatch.setattr(leaving_module, "MAX_STAGED_BLOCKS", 1)

    class Stuck:
        async def write(self, message):
            await asyncio.Event().wait()

    async with running(executor=executor()) as harness, AsyncClient(harness.target) as client:
        await client.complete(TEXT, GREEDY)
        write_to = servicer_module._write
        stuck: Any = Stuck()
        monkeypatch.setattr(servicer_module, "_write", lambda context, message: write_to(stuck, message))
        with pytest.raises(DeadlineExceeded, match=r"the receiver has read nothing of the prefix for 0.2 s"):
            await saved_by(client)
        await is_at_rest(harness)


async def test_whoever_brings_nothing_more_is_told_so_and_what_came_is_kept(monkeypatch):
    monkeypatch.setattr(travelling_module, "_STALL_S", 0.5)
    async with two() as (_, a, _, b):
        await a.complete(TEXT, GREEDY)
        header, pieces = messages_of(await saved_by(a))
        del pieces.pieces.pieces[7:]

        async def some():
            for chunk in framed([header, pieces]):
                yield chunk
            await asyncio.sleep(600)

        with pytest.raises(DeadlineExceeded, match=r"no part of the prefix arrived for 0.5 s"):
            async with asyncio.timeout(300):
                await b.prefixes.load(some())
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == 28


async def test_whoever_goes_away_in_the_middle_of_bringing_leaves_what_was_whole():
    async with two() as (_, a, second, b):
        output = await a.complete(TEXT, GREEDY)
        messages = messages_of(await saved_by(a))
        last = messages[1].pieces.pieces[7]
        last.contents = last.contents[:30]
        del messages[1].pieces.pieces[8:]
        stub = prefixes_pb2_grpc.PrefixServiceStub(second.channel)
        call = stub.LoadPrefix()
        for message in messages:
            await call.write(message)
        memory = second.serving.engine._loop.memory
        await eventually(lambda: len(memory.host.blocks) == 7)
        call.cancel()
        await is_at_rest(second)
        again = await b.complete(TEXT, GREEDY)
        assert again.usage.cached_tokens == 28
        assert again.outputs[0].token_ids == output.outputs[0].token_ids


async def test_whoever_goes_away_at_the_end_while_all_threads_are_busy_leaves_nothing_held():
    async with two() as (_, a, second, b):
        await a.complete(TEXT, GREEDY)
        saved, travelling, may_go_on = await saved_by(a), second.server._travelling, threading.Event()
        finish, is_at_end = Receiving.finish, []

        def finished(receiving):
            finish(receiving)
            for _ in range(travelling_module._NUM_THREADS):
                travelling._threads.submit(may_go_on.wait)
            is_at_end.append(True)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Receiving, "finish", finished)
            loading = asyncio.create_task(b.prefixes.load(saved))
            await eventually(lambda: bool(is_at_end))
            loading.cancel()
            await eventually(lambda: travelling._num_open == 0)
        may_go_on.set()
        await is_at_rest(second)
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == NUM_FULL - 4


@pytest.mark.parametrize("num_messages", [0, 1, 2, 4])
async def test_a_server_that_ends_in_the_middle_fails_the_fetch_alone(monkeypatch, num_messages):
    monkeypatch.setattr(leaving_module, "MAX_STAGED_BLOCKS", 3)
    async with two() as (first, a, second, b):
        output = await a.complete(TEXT, GREEDY)
        save = first.server._travelling.save

        async def breaking_off(*words):
            async with aclosing(save(*words)) as parts:
                for _ in range(num_messages):
                    yield await anext(parts)
            raise Unavailable("the server is gone")

        with monkeypatch.context() as patch:
            patch.setattr(first.server._travelling, "save", breaking_off)
            request = prefixes_pb2.FetchPrefixRequest(source=first.target, text=TEXT)
            with pytest.raises(aio.AioRpcError, match="the server is gone"):  # a client would try again
                await prefixes_pb2_grpc.PrefixServiceStub(second.channel).FetchPrefix(request)
        again = await b.complete(TEXT, GREEDY)
        assert again.usage.cached_tokens == max(0, num_messages - 1) * 12
        assert again.outputs[0].token_ids == output.outputs[0].token_ids


async def test_a_peer_that_is_not_there_fails_the_fetch_alone():
    async with (
        running(executor=executor(), prefix_peers=["127.0.0.1:9"]) as harness,
        AsyncClient(harness.target) as client,
    ):
        with pytest.raises(Unavailable):
            await client.prefixes.fetch("127.0.0.1:9", TEXT)
        await is_at_rest(harness)
        assert (await client.complete(TEXT, GREEDY)).usage.cached_tokens == 0


async def test_a_few_travel_at_one_time(monkeypatch):
    monkeypatch.setattr(travelling_module, "MAX_TRAVELLING", 2)
    async with two() as (first, a, _, _b):
        await a.complete(TEXT, GREEDY)
        stub = prefixes_pb2_grpc.PrefixServiceStub(first.channel)
        message = messages_of(await saved_by(a))[0]
        open_calls = [stub.LoadPrefix() for _ in range(2)]
        for call in open_calls:
            await call.write(message)
        travelling = first.server._travelling
        await eventually(lambda: travelling._num_open == 2)
        with pytest.raises(QueueFull, match="2 prefix transfers are in progress, the limit is 2"):
            await saved_by(a)
        for call in open_calls:
            call.cancel()
        await eventually(lambda: travelling._num_open == 0)
        assert len(await saved_by(a)) == 3


@pytest.mark.long
async def test_running_streams_go_on_while_prefixes_come_and_go():
    async with two() as (first, a, _, b):
        await a.complete(TEXT, GREEDY)
        sampling = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
        running_a = asyncio.create_task(a.complete("one", sampling))
        running_b = asyncio.create_task(b.complete("one", sampling))
        for i in range(5):
            assert (await b.prefixes.fetch(first.target, TEXT)).num_tokens == NUM_FULL
            assert (await a.prefixes.load(await saved_by(b))).num_tokens == NUM_FULL
            await a.complete(f"{TEXT} {i}", GREEDY)
        assert (await running_a).outputs[0].token_ids == (await running_b).outputs[0].token_ids


async def test_an_adapters_prefix_is_known_by_what_the_adapter_is(tmp_path):
    (tmp_path / "a").write_text("3")
    (tmp_path / "b").write_text("4")

    class Adapted(FakeExecutor):
        max_loras = 2

    def adapted():
        return Adapted(num_host_blocks=40, num_blocks=96)

    async with two(adapted(), adapted()) as (first, a, _, b):
        await a.load_adapter("x", str(tmp_path / "a"))
        await a.complete(TEXT, GREEDY, adapter="x")
        with pytest.raises(NotFound):
            await b.prefixes.fetch(first.target, TEXT, adapter="x")
        await b.load_adapter("x", str(tmp_path / "b"))
        with pytest.raises(Incompatible, match="adapter: 'x' differs here from the adapter of the prefix"):
            await b.prefixes.fetch(first.target, TEXT, adapter="x")
        await b.unload_adapter("x")
        await b.load_adapter("x", str(tmp_path / "a"))
        assert (await b.prefixes.fetch(first.target, TEXT, adapter="x")).num_tokens == NUM_FULL
        again = await b.complete(TEXT, GREEDY, adapter="x")
        assert again.usage.cached_tokens == NUM_FULL - 4
        assert (await b.complete(TEXT, GREEDY)).usage.cached_tokens == 0


async def test_ids_that_no_prompt_can_have_are_refused():
    async with two() as (first, _, _, b):
        for ids, what in (([300], "token_ids"), ([1] * 300, "token_ids: 300 tokens are not below max_model_len")):
            with pytest.raises(InvalidArgument, match=what):
                await b.prefixes.fetch(first.target, prompt_token_ids=ids)
        request = prefixes_pb2.SavePrefixRequest(token_ids=inference_pb2.TokenIds(ids=[1] * 10), num_known_tokens=9999)
        call = prefixes_pb2_grpc.PrefixServiceStub(first.channel).SavePrefix(request)
        message = await call.read()
        assert message.header.num_blocks == 0


async def test_closed_clients_ask_nobody():
    client = AsyncClient("127.0.0.1:1")
    await client.close()
    for call in (saved_by(client), client.prefixes.load([MAGIC])):
        with pytest.raises(Cancelled, match="the client was closed"):
            await call


async def test_whoever_brings_little_at_a_time_is_not_waited_for_for_ever(monkeypatch):
    class Impatient(travelling_module._Pace):
        """Bears little; the engine is waited for as ever."""

        def __init__(self):
            super().__init__()
            self._left_s = 2.0

    monkeypatch.setattr(travelling_module, "_Pace", Impatient)
    async with two() as (_, a, second, b):
        await a.complete(TEXT, GREEDY)
        header, pieces = messages_of(await saved_by(a))

        async def little_by_little():
            for chunk in framed([header]):
                yield chunk
            for piece in pieces.pieces.pieces:
                message = prefixes_pb2.LoadPrefixRequest()
                message.pieces.pieces.append(piece)
                yield framed([message])[1]
                await asyncio.sleep(0.5)

        with pytest.raises(DeadlineExceeded, match=r"arrived for 30 s, or less than 64 KiB per second"):
            await b.prefixes.load(little_by_little())
        await eventually(lambda: second.server._travelling._num_open == 0)


@pytest.mark.parametrize("way", ["load", "save"])
async def test_an_engine_that_has_failed_is_not_waited_for(monkeypatch, way):
    monkeypatch.setattr(travelling_module, "_STALL_S", 3600.0)
    async with running(executor=executor()) as source, AsyncClient(source.target) as a:
        await a.complete(TEXT, GREEDY)
        prefix = travelling_module.Prefix(prompt=Prompt(text=TEXT))
        saved = [part async for part in source.server._travelling.save(prefix)]
    async with running(executor=executor()) as harness:
        travelling = harness.server._travelling
        engine: Any = harness.serving.engine
        monkeypatch.setattr(harness.server._service.state, "note_failure", lambda error=None: None)

        async def fail():
            engine.fail(RuntimeError("of a test"))
            await eventually(lambda: engine.failure is not None and not engine._thread._thread.is_alive())

        async def parts():
            yield saved[0]
            await fail()
            for part in saved[1:]:
                yield part

        async def travel():
            if way == "load":
                await travelling.load(parts())
            else:
                await fail()
                monkeypatch.setattr(travelling._service, "controlled", lambda *_: harness.serving)
                [part async for part in travelling.save(prefix)]

        with pytest.raises(Unavailable, match="the engine has failed"):
            await asyncio.wait_for(travel(), 60.0)
