"""Prefixes on disk: found by the next life, read while others run, and never anything but what was computed."""

import os
from typing import Any

import pytest

from jpaged.blockstore.store import BlockStore
from jpaged.config import CacheOptions
from jpaged.engine.executor import DeviceRates
from jpaged.engine.kv_cache.offload import connector_tier
from jpaged.engine.kv_cache.offload.connector_tier import open_stores
from jpaged.errors import InternalError, InvalidArgument
from jpaged.testing import FakeAdapter, FakeExecutor, seeing
from jpaged.types import FinishReason, LoadedAdapter
from tests.engine.kv_cache.offload.disks import PROMPT, Server, second_life


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_a_server_that_starts_again_finds_its_prefixes(tmp_path, ends):
    first = Server(tmp_path)
    assert first.ask("a", PROMPT) == 0
    assert first.load().num_disk_blocks == 7
    getattr(first, ends)()
    second = Server(tmp_path)
    assert second.load().num_disk_hit_tokens == 0
    assert second.ask("a", PROMPT) == 24  # the last token runs
    assert second.ask("b", [*PROMPT, 1, 2, 3]) == 28
    load = second.load()
    assert (load.num_disk_hit_tokens, load.num_disk_fallbacks, load.disk_is_on) == (24, 0, 1)
    assert load.num_disk_blocks_read == 6 and load.disk_bytes_read == 6 * second.store.bytes_per_block
    second.stop()


def test_what_goes_to_disk_and_comes_from_there_is_not_counted_as_swapped(tmp_path):
    server = second_life(tmp_path)
    assert server.ask("a", PROMPT) == 24
    assert server.ask("b", [1, *PROMPT]) == 0
    load = server.load()
    assert load.num_disk_blocks_written == 7 and load.num_disk_blocks_read == 6
    assert (load.num_blocks_swapped_out, load.num_blocks_swapped_in, load.num_host_hit_tokens) == (0, 0, 0)
    server.kill()


def test_what_is_generated_is_kept_too(tmp_path):
    first = Server(tmp_path)
    first.ask("a", PROMPT, max_tokens=12)
    text = [*PROMPT, *first.h.tokens("a")]
    first.kill()
    second = Server(tmp_path)
    assert second.ask("b", text) == 36
    second.kill()


def test_others_run_while_a_prefix_is_read(tmp_path):
    second = second_life(tmp_path)
    second.readers.hold()
    second.submit("away", PROMPT)
    second.submit("here", [5, 4, 3, 2, 1], max_tokens=8)
    second.step(4)
    assert next(iter(second.queues.pending_fetch)).request.request_id == "away"
    assert second.load().num_waiting == 1
    assert second.h.events["here"] and not second.h.events["away"]
    second.readers.release(3)
    second.step(2)
    second.readers.release()
    assert second.finish("away") == 24 and second.h.ended("here")
    second.kill()


def test_who_shares_a_beginning_waits_for_one_reading_of_it(tmp_path):
    second = second_life(tmp_path)
    second.readers.hold()
    for name in "bcd":
        second.submit(name, PROMPT)
    second.step(2)
    assert len(second.queues.pending_fetch) == 3
    second.readers.release()
    second.run()
    assert [second.finish(name) for name in "bcd"] == [24] * 3
    assert second.store.counts.num_read == 6
    second.kill()


def test_a_read_that_takes_longer_than_computing_is_not_waited_for(tmp_path):
    second = second_life(tmp_path)
    second.readers.hold()
    second.submit("a", PROMPT)
    second.step(2)
    second.readers.release(2)
    second.step(2)
    assert not second.h.events["a"]
    second.h.clock.advance(1000.0)
    while not second.h.ended("a"):
        second.step()
    second.readers.release()
    assert second.finish("a") == 8
    assert second.load().num_disk_fallbacks == 1
    second.kill()


def test_nothing_is_read_that_is_computed_sooner(tmp_path):
    second = second_life(tmp_path, kind=FakeExecutor)  # a microsecond a token
    assert second.ask("a", PROMPT) == 0
    assert second.store.counts.num_read == 0
    second.kill()


@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_torn_block_is_a_miss_and_never_served(tmp_path, place):
    first = Server(tmp_path)
    first.ask("a", PROMPT)
    slot = [*first.store._slots.known.values()][place]
    path, offset = slot.segment.path, slot.segment._slot_begin(slot.number) + 8
    first.kill()
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"\x2a")
    second = Server(tmp_path)
    assert second.ask("a", [*PROMPT, 1]) == 4 * place
    assert second.load().num_disk_blocks_dropped == 1
    second.kill()
    third = Server(tmp_path)  # which finds what the second has computed and written
    assert third.ask("a", [*PROMPT, 1]) == 28
    third.kill()


def test_tenants_salts_and_adapters_share_nothing_on_disk_either(tmp_path):
    one, same, other = (
        LoadedAdapter("x", "", number, FakeAdapter(weight)) for number, weight in ((1, 5), (2, 5), (3, 17))
    )
    first = Server(tmp_path, max_loras=2)
    first.ask("a", PROMPT, cache_tenant="t", cache_salt="s", adapter=one, weight=5)
    first.kill()
    second = Server(tmp_path, max_loras=2)
    whose: dict[str, Any] = {"cache_tenant": "t", "cache_salt": "s", "adapter": same, "weight": 5}
    strangers: list[dict[str, Any]] = [{"cache_tenant": "u"}, {"cache_salt": "r"}, {"adapter": other, "weight": 17}]
    for i, change in enumerate([*strangers, {"adapter": None, "weight": 0}]):
        assert second.ask(f"stranger {i}", PROMPT, **{**whose, **change}) == 0
    assert second.load().num_disk_hit_tokens == 0
    assert second.ask("mine", PROMPT, **whose) == 24  # the same matrices, loaded again
    second.kill()


@pytest.mark.parametrize("windows", [(None, 5), (6,), (None, 3, 3)])
def test_windows_come_back_with_what_the_next_token_sees(tmp_path, windows):
    sizes = {"num_blocks": 128, "num_host_blocks": 32}
    second = second_life(tmp_path, {"windows": windows, "sizes": sizes}, windows=windows, sizes=sizes)
    assert second.ask("a", PROMPT) == 24
    assert second.load().num_disk_hit_tokens == 24 or windows == (6,)
    second.kill()


@pytest.mark.parametrize("sampling", [{"n": 3, "temperature": 1.0, "seed": 5}, {"beam_width": 3}, {"best_of": 2}])
def test_samples_and_beams_begin_from_disk(tmp_path, sampling):
    second = second_life(tmp_path)
    second.submit("a", PROMPT, **{"temperature": 0.0, **sampling})
    second.run()
    assert second.h.last("a").usage.cached_tokens == 24
    second.kill()


def test_a_small_pool_takes_what_it_has_room_for(tmp_path):
    second = second_life(tmp_path, sizes={"num_blocks": 12, "num_host_blocks": 8})
    second.submit("busy", [1, 2, 3, 4, 5] * 3, max_tokens=14)
    second.step(2)
    assert 0 < second.ask("a", PROMPT, max_tokens=2) <= 24
    assert second.h.ended("busy")
    second.kill()


def test_what_the_device_gives_up_before_it_was_written_goes_on_from_host_memory(tmp_path):
    server = Server(tmp_path, sizes={"num_blocks": 12, "num_host_blocks": 32})
    server.disk._allowed_bytes = lambda now_s, is_alone: 0
    for i in range(4):
        server.submit(f"r{i}", [(i * 13 + j) % 60 for j in range(16)], max_tokens=2)
        server.step(8)
    assert server.store.counts.num_written == 0
    del server.disk._allowed_bytes
    server.run()
    assert server.store.counts.num_written >= 16
    server.kill()


def test_what_disk_gave_up_is_written_again_when_it_leaves_the_device(tmp_path):
    server = Server(tmp_path, sizes={"num_blocks": 12})
    server.ask("a", PROMPT)
    keys = [*server.store._slots.known]
    for key in keys:
        server.store.remove(key)
    for i in range(4):
        server.ask(f"{i}", [40 + i, *range(20)])
    assert all(server.store.lookup(key) for key in keys[:7])
    server.kill()


def test_what_disk_keeps_is_cheaper_to_lose(tmp_path):
    first = Server(tmp_path, eviction_policy="worth")
    first.ask("a", PROMPT)
    first.kill()
    second = Server(tmp_path, eviction_policy="worth", sizes={"num_blocks": 20})
    assert second.ask("a", PROMPT) > 0
    assert min(bucket.cost for bucket in second.memory.prefixes._ranked._policy._buckets if bucket) < 0
    second.memory.limiter.leave(0)
    assert min(bucket.cost for bucket in second.memory.host._ranked._policy._buckets if bucket) < 0
    second.memory.limiter.leave(20)
    second.kill()


@pytest.mark.parametrize("when", ["due", "written", "known", "being read", "read"])
def test_a_reset_reaches_what_is_on_its_way(tmp_path, when):
    server = Server(tmp_path)
    if when in ("due", "written"):
        server.writers.hold()
    if when == "due":
        server.disk._allowed_bytes = lambda now_s, is_alone: 0
    server.submit("a", PROMPT)
    server.step(12)
    if when in ("being read", "read"):
        server.run()
        server.kill()
        server = Server(tmp_path)
        server.readers.hold()
        server.submit("b", PROMPT)
        server.step(2)
        assert server.readers.held
    if when == "read":
        server.readers.release()
    future = server.h.engine.reset_prefix_cache()
    server.step(1)
    assert future.result(0) >= (0 if when in ("due", "written") else 7)
    assert not server.store.counts.num_blocks
    if when == "due":
        del server.disk._allowed_bytes
    for threads in (server.readers, server.writers):
        threads.release()
    server.run()
    assert server.load().num_disk_hit_tokens == 0
    if when not in ("being read", "read"):
        assert server.store.counts.num_blocks == 0
        assert server.ask("c", PROMPT) == 0
    server.kill()


@pytest.mark.parametrize("when", ["due", "landing", "written", "known"])
def test_what_is_forgotten_is_not_written_whatever_is_on_its_way(tmp_path, when):
    server = Server(tmp_path)
    if when == "due":
        server.disk._allowed_bytes = lambda now_s, is_alone: 0
    elif when == "landing":
        server.memory.host.is_settled = lambda block_ids, since: since == 0  # what was reserved at the start
    elif when == "written":
        server.writers.hold()
    server.submit("a", PROMPT)
    server.step(12)
    assert server.h.ended("a")
    for key in [*server.memory.prefixes.cache._blocks]:
        server.disk.remove(key)
    if when == "due":
        del server.disk._allowed_bytes
    elif when == "landing":
        assert server.disk._writer._under_way and not server.store.counts.num_written
        del server.memory.host.is_settled
    server.writers.release()
    server.run()
    assert not server.store.counts.num_blocks
    server.kill()


def test_a_block_that_is_written_is_nobody_elses(tmp_path):
    server = Server(tmp_path)
    server.writers.hold()
    server.submit("a", PROMPT)
    server.step(12)
    assert len(server.writers.held or ()) == server.disk._stagings[0].num_out == server.disk._stagings[0].num_blocks
    server.writers.release()
    server.run()
    server.kill()
    assert Server(tmp_path).ask("a", [*PROMPT, 1]) == 28


def test_a_block_is_lent_when_no_move_reads_it_any_more(tmp_path):
    server = Server(tmp_path)
    staging = server.disk._stagings[1]
    server.step(1)
    block_id = staging.take()
    staging.give_back(block_id)
    others = []
    while (other := staging.take()) is not None:
        others.append(other)
    assert block_id not in others and len(others) == staging.num_blocks - 1
    server.memory.take_ops()
    assert staging.take() == block_id
    server.kill()


def test_beside_others_a_step_moves_little(tmp_path, monkeypatch):
    """Blocks that go to disk, and blocks that come back."""
    size = 64
    monkeypatch.setattr(connector_tier, "_OUT_BYTES", size)
    monkeypatch.setattr(connector_tier, "_IN_BYTES", size)
    sizes = {"num_blocks": 128, "num_host_blocks": 64}
    second = second_life(tmp_path, sizes=sizes)
    assert second.store.bytes_per_block == size
    second.submit("busy", [9, 8, 7], max_tokens=60)
    second.step(2)
    second.submit("a", PROMPT, max_tokens=1)
    counted = []
    while not second.h.ended("busy"):
        before = second.load().num_disk_hit_tokens, len(second.disk._writer._under_way)
        second.step()
        counted.append((second.load().num_disk_hit_tokens - before[0], len(second.disk._writer._under_way)))
    assert [tokens for tokens, _ in counted if tokens] == [4] * 6
    assert max(num_out for _, num_out in counted) <= 2  # one begins as one ends
    second.kill()


def test_blocks_of_what_computes_otherwise_are_not_found(tmp_path):
    options = CacheOptions(kv_disk_space=1e-3, kv_disk_dir=str(tmp_path))
    for windows, num_found in (((None,), 0), ((None, 5), 0), ((None,), 1)):
        executor = seeing(windows)(num_blocks=64, num_host_blocks=16, vocab_size=61)
        ((opened,),) = open_stores(options, executor.host_blocks, executor.geometry, 1)
        assert isinstance(opened.store, BlockStore)
        assert opened.store.counts.num_blocks == num_found
        opened.store.save(bytes(32), memoryview(bytes(opened.store.bytes_per_block)))
        opened.store.close()


def test_a_request_that_goes_away_leaves_no_block_behind(tmp_path):
    second = second_life(tmp_path)
    second.readers.hold()
    second.submit("a", PROMPT)
    second.step(2)
    num_reads = len(second.disk._reader.under_way)
    second.h.engine.abort("a")
    second.step(2)
    assert len(second.disk._reader.under_way) == second.disk._stagings[1].num_out == num_reads > 0
    assert second.h.last("a").finish.reason is FinishReason.ABORT
    assert not second.queues.pending_fetch
    second.readers.release()
    second.run()
    assert not second.disk.is_busy
    assert {staging.num_out for staging in second.disk._stagings} == {0}
    second.kill()


def no_disk(*_):
    raise OSError(5, "Input/output error")


def test_a_disk_that_fails_goes_off_and_requests_go_on(tmp_path, monkeypatch):
    server = Server(tmp_path)
    server.ask("a", PROMPT)
    monkeypatch.setattr(os, "pwrite", no_disk)
    assert server.ask("b", [9, *PROMPT]) == 0
    assert server.ask("c", PROMPT) == 27  # the device has it still
    load = server.load()
    assert (load.disk_is_on, load.num_disk_blocks) == (0, 0) and load.num_disk_failures
    server.stop()


def test_a_file_that_is_cut_short_is_a_miss(tmp_path):
    second = second_life(tmp_path)
    for path in tmp_path.rglob("*.blocks"):
        os.truncate(path, 0)
    assert second.ask("a", PROMPT) == 0
    assert second.load().num_disk_fallbacks == 1
    second.kill()


def test_a_drain_writes_what_memory_has(tmp_path):
    first = Server(tmp_path)
    first.disk._allowed_bytes = lambda now_s, is_alone: 0
    first.submit("a", PROMPT)
    first.step(12)
    assert first.h.ended("a") and not first.store.counts.num_written
    assert not first.h.engine.drain(0.05)
    del first.disk._allowed_bytes
    first.h.clock.advance(1.0)
    assert first.h.engine.drain(60.0)
    first.stop()
    second = Server(tmp_path)
    assert second.ask("a", PROMPT) == 24
    second.stop()


def test_a_prefix_can_be_pinned_from_disk(tmp_path):
    second = second_life(tmp_path)
    future = second.h.engine.pin_prefix("p", PROMPT)
    second.run()
    assert future.result(0) == 28
    assert second.load().num_disk_hit_tokens == 24
    second.kill()


def test_host_memory_has_to_have_room_for_others_to_pass(tmp_path):
    with pytest.raises(InvalidArgument, match="swap_space: host memory has 7 blocks of 64 bytes; a store"):
        Server(tmp_path, sizes={"num_host_blocks": 7})


@pytest.mark.parametrize("fault", ["lost", "twice", "given back"])
def test_a_check_sees_a_block_that_is_freed_while_it_travels(tmp_path, fault):
    server = Server(tmp_path)
    server.writers.hold()
    server.submit("a", PROMPT)
    server.step(4)
    staging = server.disk._stagings[0]
    (block_id, *_) = staging._out
    if fault == "lost":
        staging._out.clear()
    elif fault == "twice":
        staging._ready.append(block_id)
    else:
        staging.give_back(block_id)
    with pytest.raises(InternalError, match=r"are staging buffers|are in flight"):
        server.memory.check([])
    if fault == "given back":
        server.writers.release()
        with pytest.raises(InternalError, match=f"host block {block_id} is released but not held"):
            server.step(3)
    server.kill()


def test_a_check_sees_a_block_that_is_freed_while_it_is_read(tmp_path):
    server = second_life(tmp_path)
    server.readers.hold()
    server.submit("a", PROMPT)
    server.step(2)
    server.memory.check([])
    server.disk._stagings[1].give_back(next(iter(server.disk._stagings[1]._out)))
    with pytest.raises(InternalError, match="are in flight"):
        server.memory.check([])
    server.kill()


def test_the_rates_decide_by_attention_too(tmp_path):
    class Attentive(FakeExecutor):
        @property
        def rates(self):
            return DeviceRates(16e6, 16e6, ((1, 1e-9),), pair_s=1.0)

    second = second_life(tmp_path, kind=Attentive)
    assert second.ask("a", PROMPT) == 24
    second.kill()


@pytest.mark.parametrize(("pair_s", "num_cached"), [(1e-4, 24), (2e-6, 0)])
def test_pairs_of_tokens_are_what_attention_takes_time_for(tmp_path, pair_s, num_cached):
    class Attentive(FakeExecutor):
        @property
        def rates(self):
            return DeviceRates(16e6, 16e6, ((1, 1e-9),), pair_s=pair_s)

    second = second_life(tmp_path, kind=Attentive)
    assert second.ask("a", PROMPT) == num_cached
    second.kill()


def test_what_a_prompt_has_on_the_device_is_no_room_for_the_rest_of_it(tmp_path):
    second = second_life(tmp_path, sizes={"num_blocks": 12, "num_host_blocks": 16})
    prefixes = second.memory.prefixes
    second.ask("own", PROMPT[:13], max_tokens=1)
    own = [*prefixes.cache._blocks]
    second.submit("busy", [50] * 29, max_tokens=3)
    second.step(2)
    assert prefixes.pool.num_free == len(own) + 1 == 4
    second.submit("a", PROMPT)
    num_before = second.disk.counts.num_tokens
    while second.disk.counts.num_tokens == num_before:
        second.step()
    second.step()
    assert all(prefixes.cache.find(key) is not None for key in own)
    assert second.disk.counts.num_tokens == num_before + 4  # the next would have pushed out the first
    assert second.finish("a") == 16
    second.kill()


def test_who_waits_for_a_key_that_is_forgotten_is_found_without_looking_at_all_others(tmp_path):
    class Unseen(list[Any]):
        def __iter__(self):
            raise AssertionError("every place is looked at")

    first = Server(tmp_path)
    prompts = [[start, *range(20, 40)] for start in range(3)]
    for prompt in prompts:
        first.ask(f"{prompt[0]}", prompt)
    first.kill()
    second = Server(tmp_path)
    second.readers.hold()
    for prompt in prompts:
        second.submit(f"{prompt[0]}", prompt)
    second.step()
    fetches = [*second.disk._reader._fetches.values()]
    assert len(fetches) == 3
    places = [fetch.blocks for fetch in fetches]
    for fetch in fetches:
        fetch.blocks = Unseen(fetch.blocks)
    second.disk.remove(places[1][2].key)
    assert [fetch.is_over for fetch in fetches] == [False, True, False]
    for fetch, before in zip(fetches, places, strict=True):
        fetch.blocks = before
    second.readers.release()
    for prompt in prompts:
        second.finish(f"{prompt[0]}")
    assert not second.disk._reader._wanting
    second.kill()
