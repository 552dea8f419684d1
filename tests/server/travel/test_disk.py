"""Prefixes that disk alone has leave for other servers as those of memory do."""

import asyncio

import pytest

from jpaged.blockstore.store import BlockStore
from jpaged.client import AsyncClient
from jpaged.engine.engine import Engine
from jpaged.engine.kv_cache.connector import EngineStore
from jpaged.testing import seeing
from tests.engine.kv_cache.offload.disks import Slow
from tests.server import harness as harness_module
from tests.server.harness import eventually, running
from tests.server.travel.pairs import GREEDY, NUM_FULL, TEXT, executor, is_at_rest, messages_of, saved_by

OPTIONS = {"num_host_blocks": 96}


@pytest.fixture
def with_disk(tmp_path, monkeypatch):
    """Every engine keeps its prefixes in one folder, which one server has at a time, its replicas together."""
    stores: list[BlockStore] = []

    def make(executor, *words, **rest):
        blocks = executor.host_blocks
        if stores and stores[-1].is_on:
            store = stores[-1].share()
        else:
            store = BlockStore(tmp_path, blocks.kv_identity(), blocks.bytes_per_block, 1 << 20)
            stores.append(store)
        return Engine(executor, *words, stores=(EngineStore(store),), **rest)

    monkeypatch.setattr(harness_module, "Engine", make)
    return tmp_path


def disk_of(harness):
    return harness.serving.engine._loop.memory.connectors[0]


async def lived(num_blocks, of=None):
    """A life of a server that has computed a prompt, and written it; what it answered."""
    async with running(executor=of or executor(**OPTIONS)) as harness, AsyncClient(harness.target) as client:
        output = await client.complete(TEXT, GREEDY)
        await eventually(lambda: disk_of(harness).counts.store.num_blocks >= num_blocks)
    return output


async def test_what_was_written_in_an_earlier_life_leaves_and_arrives_elsewhere(with_disk, monkeypatch):
    output = await lived(NUM_FULL // 4)
    async with running(executor=executor(**OPTIONS)) as first, AsyncClient(first.target) as a:
        saved = await saved_by(a)
        header = messages_of(saved)[0].header
        assert (header.num_found_tokens, header.num_blocks) == (NUM_FULL, NUM_FULL // 4)
        known = messages_of(await saved_by(a, num_known_tokens=40))[0].header
        assert known.num_blocks == NUM_FULL // 4 - 10
        first.serving.engine.check()
    monkeypatch.setattr(harness_module, "Engine", Engine)
    async with running(executor=executor()) as second, AsyncClient(second.target) as b:
        assert (await b.prefixes.load(saved)).num_tokens == NUM_FULL
        again = await b.complete(TEXT, GREEDY)
        assert again.usage.cached_tokens == NUM_FULL - 4
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
        await is_at_rest(second)


async def test_where_there_is_no_room_for_what_disk_has_it_is_said(with_disk):
    await lived(NUM_FULL // 4)
    async with running(executor=executor(num_host_blocks=16)) as first, AsyncClient(first.target) as a:
        header = messages_of(await saved_by(a))[0].header
        assert header.num_found_tokens == NUM_FULL
        assert 0 < header.num_blocks < NUM_FULL // 4


async def test_a_block_that_is_not_what_was_written_does_not_leave(with_disk, monkeypatch):
    await lived(NUM_FULL // 4)
    damaged = []
    read = BlockStore.load

    def torn(store, key, into):
        is_sound = read(store, key, into)
        damaged.append(key)
        return is_sound and len(damaged) != 6

    monkeypatch.setattr(BlockStore, "load", torn)
    async with running(executor=executor(**OPTIONS)) as first, AsyncClient(first.target) as a:
        header = messages_of(await saved_by(a))[0].header
        assert header.num_blocks == len(header.token_ids) // 4 < NUM_FULL // 4
        first.serving.engine.check()


async def test_a_server_that_ends_while_disk_is_read_ends(with_disk, monkeypatch):
    await lived(NUM_FULL // 4)
    begun = asyncio.Event()
    loop, read = asyncio.get_running_loop(), BlockStore.load

    def noted(store, key, into):
        loop.call_soon_threadsafe(begun.set)
        return read(store, key, into)

    monkeypatch.setattr(BlockStore, "load", noted)
    async with running(executor=executor(**OPTIONS)) as first, AsyncClient(first.target) as a:
        saving = asyncio.create_task(saved_by(a))
        await begun.wait()
    await asyncio.gather(saving, return_exceptions=True)


async def test_of_a_window_what_is_seen_leaves_from_disk(with_disk, monkeypatch):
    def windowed():
        return seeing((None, 6))(num_host_blocks=96, max_model_len=256, num_blocks=96)

    output = await lived(2 * (NUM_FULL // 4), windowed())
    async with running(executor=windowed()) as first, AsyncClient(first.target) as a:
        saved = await saved_by(a)
        header = messages_of(saved)[0].header
        assert header.num_found_tokens == NUM_FULL
        assert NUM_FULL // 4 < header.num_blocks < 2 * (NUM_FULL // 4)
        first.serving.engine.check()
    monkeypatch.setattr(harness_module, "Engine", Engine)
    async with running(executor=windowed()) as second, AsyncClient(second.target) as b:
        assert (await b.prefixes.load(saved)).num_tokens == NUM_FULL
        again = await b.complete(TEXT, GREEDY)
        assert again.usage.cached_tokens == NUM_FULL - 4
        assert again.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("place", [0, 1])
async def test_of_replicas_the_one_that_reads_a_prefix_from_disk_sends_it(with_disk, monkeypatch, place):
    await lived(NUM_FULL // 4)
    others = [executor(**OPTIONS)]
    async with running(executor=executor(**OPTIONS), others=others) as first, AsyncClient(first.target) as a:
        monkeypatch.setattr(first.serving.engine.kv_transfer, "_choose_replica", lambda keys: place)
        header = messages_of(await saved_by(a))[0].header
        assert (header.num_found_tokens, header.num_blocks) == (NUM_FULL, NUM_FULL // 4)
        first.serving.engine.check()


async def test_what_disk_has_is_not_fetched_from_another_server(with_disk, monkeypatch):
    def slow():
        return Slow(num_host_blocks=96, max_model_len=256, num_blocks=96)

    longer = f"{TEXT}, and more of it than there was"
    on_disk = vars(harness_module)["Engine"]
    await lived(NUM_FULL // 4, slow())
    monkeypatch.setattr(harness_module, "Engine", Engine)
    async with running(executor=slow()) as first, AsyncClient(first.target) as a:
        output = await a.complete(longer, GREEDY)
        monkeypatch.setattr(harness_module, "Engine", on_disk)
        async with (
            running(executor=slow(), prefix_peers=[first.target]) as second,
            AsyncClient(second.target) as b,
        ):
            arrival = await b.prefixes.fetch(first.target, TEXT)
            assert (arrival.num_tokens, arrival.num_loaded_blocks) == (NUM_FULL, 0)
            num_full = len(longer) // 4
            arrival = await b.prefixes.fetch(first.target, longer)
            assert (arrival.num_tokens, arrival.num_loaded_blocks) == (4 * num_full, num_full - NUM_FULL // 4)
            again = await b.complete(longer, GREEDY)
            assert again.usage.cached_tokens >= 4 * (num_full - 1)
            assert again.outputs[0].token_ids == output.outputs[0].token_ids
            second.serving.engine.check()
