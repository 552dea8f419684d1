"""Prefixes that are pinned: by a call, and by an option before the first request."""

import asyncio
import threading

import pytest

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.client import AsyncClient, Client
from jpaged.config import EngineConfig
from jpaged.errors import AlreadyExists, InvalidArgument, NotFound, Unsupported
from jpaged.server.lifecycle import PIN_NAME, Server
from jpaged.service.service import Stage
from jpaged.testing import FakeExecutor
from jpaged.types import SamplingParams
from tests.server.harness import error_details, eventually, failure_of, make_serving, running

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PREFIX = "you are a story teller"  # 22 tokens: 5 blocks of 4, and 2 more


async def test_a_pinned_prefix_is_found_until_it_is_unpinned():
    async with running() as harness, AsyncClient(harness.target) as client:
        assert await client.pin_prefix("system", PREFIX) == 20
        await eventually(lambda: harness.num_blocks_used == 5)
        output = await client.complete(f"{PREFIX}, begin", GREEDY)
        assert output.usage.cached_tokens == 20
        salted = await client.complete(f"{PREFIX}, begin", SamplingParams(max_tokens=4, cache_salt="other"))
        assert salted.usage.cached_tokens == 0
        await client.unpin_prefix("system")
        await client.complete("x", GREEDY)
        await eventually(lambda: harness.num_blocks_used == 0)


async def test_a_salted_prefix_is_for_its_salt_and_ids_are_kept_as_they_are():
    async with running() as harness, AsyncClient(harness.target) as client:
        token_ids = list(PREFIX.encode())
        assert await client.pin_prefix("salted", prompt_token_ids=token_ids, cache_salt="s") == 20
        plain = await client.complete(PREFIX, GREEDY)
        salted = await client.complete(PREFIX, SamplingParams(max_tokens=4, cache_salt="s"))
        assert (plain.usage.cached_tokens, salted.usage.cached_tokens) == (0, 20)


async def test_a_long_prefix_is_pinned_off_the_event_loop(monkeypatch):
    async with running(executor=FakeExecutor(num_blocks=4096, max_model_len=4096)) as harness:
        pin, threads = harness.serving.engine.pin_prefix, []

        def noting(*words):
            threads.append(threading.current_thread() is threading.main_thread())
            return pin(*words)

        monkeypatch.setattr(harness.serving.engine, "pin_prefix", noting)
        for size in (3000, 30):
            token_ids = inference_pb2.TokenIds(ids=[1] * size)
            await harness.control.PinPrefix(control_pb2.PinPrefixRequest(name=f"p{size}", token_ids=token_ids))
        assert threads == [False, True]


async def test_what_cannot_be_pinned_says_why():
    async with running() as harness, AsyncClient(harness.target) as client:
        await client.pin_prefix("system", PREFIX)
        with pytest.raises(AlreadyExists, match="'system' is pinned"):
            await client.pin_prefix("system", PREFIX)
        with pytest.raises(InvalidArgument, match="3 tokens do not fill a block of 4"):
            await client.pin_prefix("short", "abc")
        with pytest.raises(InvalidArgument, match="not a token id"):
            await client.pin_prefix("ids", prompt_token_ids=[999] * 8)
        with pytest.raises(InvalidArgument, match="name: '' is not 1 to 128"):
            await client.pin_prefix("", PREFIX)
        with pytest.raises(InvalidArgument, match="exactly one"):
            await client.pin_prefix("both", PREFIX, prompt_token_ids=[1])
        error = await failure_of(harness.control.PinPrefix(control_pb2.PinPrefixRequest(name="x")))
        assert error_details(error)["BadRequest"].field_violations[0].field == "prefix"
        with pytest.raises(NotFound, match="'nobody'"):
            await client.unpin_prefix("nobody")
    async with running(enable_prefix_caching=False) as harness, AsyncClient(harness.target) as client:
        with pytest.raises(Unsupported, match="prefix cache is off"):
            await client.pin_prefix("system", PREFIX)


async def test_the_threaded_client_pins_too():
    async with running() as harness:

        def pin() -> int:
            with Client(harness.target) as client:
                num_tokens = client.pin_prefix("system", PREFIX)
                client.unpin_prefix("system")
                return num_tokens

        assert await asyncio.to_thread(pin) == 20


async def test_the_option_pins_before_the_first_request(tmp_path):
    (tmp_path / "prefix.txt").write_text(PREFIX)
    async with running(pin_prefix=str(tmp_path / "prefix.txt")) as harness, AsyncClient(harness.target) as client:
        assert (await client.complete(PREFIX, GREEDY)).usage.cached_tokens == 20
        await client.unpin_prefix(PIN_NAME)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"])
async def test_a_prefix_that_cannot_be_read_stops_the_start(tmp_path, content):
    path = tmp_path / "prefix.txt"
    if content is not None:
        path.write_bytes(content)
    config = EngineConfig.load({"port": 0, "pin_prefix": str(path)})
    server = Server(config, lambda progress: make_serving(FakeExecutor(), config))
    with pytest.raises(InvalidArgument, match=r"pin_prefix: .* cannot be read"):
        await server.start()


async def test_a_prefix_that_cannot_be_pinned_ends_the_server(tmp_path):
    path = tmp_path / "prefix.txt"
    path.write_text("abc")
    config = EngineConfig.load({"port": 0, "pin_prefix": str(path)})
    server = Server(config, lambda progress: make_serving(FakeExecutor(), config))
    await server.start()
    assert await server.run() == 1
    assert server.state.stage is Stage.FAILED
