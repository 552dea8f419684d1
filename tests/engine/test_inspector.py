"""Who watches a pool sees what is: every block as the tables have it, and everything that happens, once."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged.engine.kv_cache.contiguous import ContiguousKVCacheManager
from jpaged.engine.kv_cache.paged import PagedKVCacheManager
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.inspector.frames import BlockState, FrameReader, FrameWriter, unpack
from jpaged.testing import FakeExecutor
from tests.engine.groups import paged_memory
from tests.engine.harness import Harness
from tests.engine.kv_cache.offload.disks import PROMPT, Server
from tests.engine.lives import WINDOWS, Life

KINDS = {
    *("admission", "resumption", "preemption_swap", "preemption_recompute", "end"),
    *("fork", "copy_on_write", "prefix_copy", "swap_out", "swap_in", "eviction", "prefix_in"),
}


def picture_of(h: Harness) -> Any:
    loop = h.engine._loop
    return loop.snapshotter.snapshot(loop.stats.snapshot(0))


class LimitedLife(Life):
    """One whose pool is made smaller and larger as it goes."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.limits: list[Future[int]] = []

    def step(self) -> None:
        num_blocks = self.h.executor.geometry.num_blocks
        self.limits += self.h.engine.inspector.limit(
            num_blocks - random.Random(len(self.limits)).randint(0, num_blocks)
        )
        super().step()


class Watcher:
    """Looks at an engine after each of its steps, and writes and reads what it sees as frames."""

    def __init__(self, h: Harness, seed: int = 0, *, misses: bool = False) -> None:
        self.h = h
        self.random = random.Random(seed)
        self.misses = misses
        self.writer, self.reader = FrameWriter(), FrameReader()
        self.happened: Counter[str] = Counter()
        self.counted: Counter[str] = Counter()
        self.numbers: set[int] = set()
        step = h.step

        def watched() -> bool:
            did_something = step()
            self.look()
            return did_something

        h.step = watched  # type: ignore[method-assign]
        self.look()

    def look(self) -> None:
        snapshot = picture_of(self.h)
        for one in snapshot.happenings:
            assert one.number not in self.numbers
            self.numbers.add(one.number)
            self.happened[one.kind] += 1
            self.counted[one.kind] += one.count
        frame = self.writer.change([snapshot])
        if self.misses and self.random.random() < 0.3:  # of a frame that is missed the next change says nothing
            return
        if frame.base != self.reader.number:
            frame = self.writer.whole()
        self.reader.take(frame.data)
        self.check()

    def check(self) -> None:
        """Every cell and table that was read is what the engine has."""
        (view,), memory = self.reader.pools, self.h.engine._loop.memory
        assert isinstance(memory, PagedKVCacheManager | ContiguousKVCacheManager)
        groups = list(self.h.engine._loop.scheduler.queues.groups())
        sequences = [(group, sequence) for group in groups for sequence in group.sequences]
        counts = np.zeros(memory.num_blocks + 1, int)
        owners: dict[int, int] = {}
        for group, sequence in sequences:
            for block_id in sequence.kv.block_ids():
                counts[block_id] += 1
                owners[block_id] = min(owners.get(block_id, group.arrival), group.arrival)
        kinds, counted, owned = unpack(view.cells)
        for block_id, number in owners.items():
            assert (kinds[block_id], owned[block_id]) == (BlockState.HELD, number)
        assert set(np.flatnonzero(kinds == BlockState.HELD)) == set(owners)
        use = memory.use()
        if isinstance(memory, PagedKVCacheManager):
            assert counted[1:].tolist() == [
                0 if kinds[block_id] == BlockState.ASIDE else memory._pool.ref_count(block_id)
                for block_id in range(1, memory.num_blocks + 1)
            ]
            assert np.count_nonzero(kinds[1:] == BlockState.FREE) == use.num_free
            assert np.count_nonzero(kinds == BlockState.CACHED) == use.num_cached
            assert np.count_nonzero(kinds == BlockState.ASIDE) == use.num_reserved
            assert use.num_free + use.num_cached + use.num_referenced + use.num_reserved == memory.num_blocks
            host_counts = unpack(view.host_cells)[1]
            assert np.count_nonzero(host_counts) == memory._host.pool.num_used
        tables = {
            (group.arrival, sequence.index, kv_group, is_host): table.ids_m[: table.num_blocks].tolist()
            for group, sequence in sequences
            for is_host, of_one in ((False, sequence.kv.tables), (True, sequence.kv.host_tables))
            for kv_group, table in enumerate(of_one)
            if table.num_blocks
        }
        assert view.tables == tables
        assert {one["number"] for one in view.last["requests"]} == {group.arrival for group in groups}


@pytest.mark.parametrize(
    "misses", [pytest.param(False, marks=pytest.mark.long), True], ids=["every frame", "frames are missed"]
)
def test_every_cell_and_table_is_what_the_engine_has(misses: bool) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(60, 66):
        life = Life(seed, WINDOWS[seed % 3] if seed % 2 else (None,))
        watcher = Watcher(life.h, seed, misses=misses)
        life.run()
        load = life.h.engine.load()
        assert watcher.counted["swap_out"] + watcher.counted["eviction"] == load.num_blocks_swapped_out
        assert watcher.counted["swap_in"] + watcher.counted["prefix_in"] == load.num_blocks_swapped_in
        assert watcher.happened["copy_on_write"] >= load.num_copies_on_write
        preemptions = watcher.happened["preemption_swap"] + watcher.happened["preemption_recompute"]
        assert preemptions == load.num_preemptions
        kinds += watcher.happened
        assert (unpack(watcher.reader.pools[0].cells)[0] != BlockState.HELD).all() or misses
    assert kinds.keys() >= KINDS


def test_lives_in_a_pool_whose_limit_changes_sample_every_token_and_lose_no_block() -> None:
    limits: list[Future[int]] = []
    for seed in range(70, 76):
        life = LimitedLife(seed)
        Watcher(life.h, seed)
        life.run()
        (whole,) = life.h.engine.inspector.limit(None)
        life.h.step()
        assert whole.result(0) == 0
        assert life.h.engine._loop.memory.use().num_reserved == 0
        limits += life.limits
    reached = [one.result() for one in limits if one.exception() is None]
    assert min(reached) == 0 < max(reached)  # some were in use, and are set aside when they come free
    assert len(reached) < len(limits)  # and some would have left too few


def test_samples_beams_and_their_ends_are_seen_as_they_happen() -> None:
    h = Harness(executor=FakeExecutor(num_blocks=64, block_size=4, max_model_len=64), overlap=False)
    watcher = Watcher(h)
    h.submit("samples", [1] * 6, n=4, temperature=1.0, seed=1, max_tokens=8)
    h.submit("beams", [2] * 6, beam_width=3, max_tokens=8)
    shared = 0
    while h.step():
        counts = unpack(watcher.reader.pools[0].cells)[1]
        shared = max(shared, int(counts.max()))
    assert shared == 4
    assert watcher.happened["admission"] == watcher.happened["end"] == 2
    assert watcher.counted["fork"] >= 3 + 2
    assert watcher.happened["copy_on_write"] == h.engine.load().num_copies_on_write > 0
    assert watcher.reader.pools[0].last["totals"]["num_forks"] == watcher.counted["fork"]


def test_a_fork_is_seen_with_the_blocks_that_its_sequences_share() -> None:
    h = Harness(executor=FakeExecutor(num_blocks=64, block_size=4, max_model_len=64), overlap=False)
    picture_of(h)
    h.submit("samples", [1] * 6, n=3, temperature=1.0, seed=1, max_tokens=8)
    forks: list[Any] = []
    while not forks:
        h.step()
        snapshot = picture_of(h)
        forks = [one for one in snapshot.happenings if one.kind == "fork"]
    tables = [tuple(chain.tables[0].tolist()) for chain in snapshot.occupants[0].chains]
    assert (forks[0].count, [forks[0].blocks] * 3) == (2, tables)
    assert len(tables[0]) == 2


def test_marks_name_no_block_where_none_is_set_aside() -> None:
    marks = paged_memory(8).marks()
    assert [len(ids) for ids in (marks.pinned, marks.withheld, marks.reserved)] == [0, 0, 0]
    assert marks.cached.tolist() == [0] * 9 and not marks.host_cached.any()


def test_regions_that_are_reserved_are_seen_apart_from_what_is_written() -> None:
    h = Harness(executor=FakeExecutor(num_blocks=32, block_size=4, max_model_len=32), kv_policy="reserve-max")
    watcher = Watcher(h)
    h.submit("a", [1, 2, 3], max_tokens=4)
    h.step()
    kinds = unpack(watcher.reader.pools[0].cells)[0]
    assert np.count_nonzero(kinds == BlockState.HELD) == 1
    assert np.count_nonzero(kinds == BlockState.RESERVED) == 7
    (limited,) = h.engine.inspector.limit(8)
    h.run()
    assert isinstance(limited.exception(), Unsupported)


def test_a_limit_leaves_room_for_what_is_in_flight_and_refuses_what_it_leaves_none_for() -> None:
    h = Harness(executor=FakeExecutor(num_blocks=32, block_size=4, max_model_len=64))
    h.submit("needs four", [1] * 8, max_tokens=8)
    h.step()
    for num_blocks, problem in ((3, "3 blocks are fewer than the 4"), (0, "from 1 to 32"), (33, "from 1 to 32")):
        (limited,) = h.engine.inspector.limit(num_blocks)
        h.step()
        assert isinstance(limited.exception(), InvalidArgument)
        assert problem in str(limited.exception())
    (limited,) = h.engine.inspector.limit(4)
    h.step()
    assert limited.result(0) == 0
    h.submit("needs eight", [1] * 8, max_tokens=24)
    h.run()
    assert len(h.tokens("needs four")) == 8
    assert "4 blocks" in str(h.last("needs eight").error)
    (seen,) = h.engine.inspector.snapshots()
    assert not seen.cancel()  # the engine thread will set it
    h.engine.inspector.limit(None)
    h.submit("needs eight again", [1] * 8, max_tokens=24)
    h.run()
    assert len(h.tokens("needs eight again")) == 24


def test_nothing_is_noted_while_nobody_watches() -> None:
    h = Harness(executor=FakeExecutor(num_blocks=32, block_size=4))
    watch = h.engine._loop.snapshotter
    h.submit("a", [1, 2, 3], max_tokens=4)
    h.run()
    assert not watch.is_on
    picture_of(h)
    assert watch.is_on
    h.submit("b", [1, 2, 3], max_tokens=4)
    h.step()
    assert [one.kind for one in picture_of(h).happenings][:1] == ["admission"]
    watch._until_s = -1.0
    h.run()
    assert not watch.is_on and not watch._notes and not watch._known


def test_what_is_copied_to_disk_and_stays_is_no_eviction_and_what_comes_from_there_no_swap(tmp_path: Path) -> None:
    first = Server(tmp_path)
    picture_of(first.h)
    first.ask("a", PROMPT)
    out = [one for one in picture_of(first.h).happenings if one.kind in ("prefix_out", "eviction", "swap_out")]
    assert {one.kind for one in out} == {"prefix_out"}
    assert sum(one.count for one in out) == first.store.counts.num_written == 7
    first.kill()
    second = Server(tmp_path)
    picture_of(second.h)
    assert second.ask("a", PROMPT) == 24
    came = [one for one in picture_of(second.h).happenings if one.kind in ("prefix_in", "swap_in")]
    assert {one.kind for one in came} == {"prefix_in"}
    assert sum(one.count for one in came) == 6
    second.kill()
