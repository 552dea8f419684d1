"""A decode server whose own disk has a prompt: it is read there, and not asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jpaged.blockstore.store import BlockStore
from jpaged.engine.engine import Engine
from jpaged.engine.kv_cache.connector import EngineStore
from jpaged.testing import FakeExecutor
from tests.engine.kv_cache.offload.disks import Slow
from tests.server import harness as harness_module
from tests.server.harness import Harness, collect, eventually, request, running
from tests.server.roles.test_roles import LONG, fake, folded, pair


@pytest.fixture
def with_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FakeExecutor]:
    """Executors whose engines keep their prefixes in one folder, one at a time."""
    kept: list[FakeExecutor] = []

    def make(executor: FakeExecutor, *words: Any, **rest: Any) -> Engine:
        blocks = executor.host_blocks
        assert blocks is not None
        if executor not in kept:
            return Engine(executor, *words, **rest)
        store = BlockStore(tmp_path, blocks.kv_identity(), blocks.bytes_per_block, 1 << 20)
        return Engine(executor, *words, stores=(EngineStore(store),), **rest)

    monkeypatch.setattr(harness_module, "Engine", make)
    return kept


def disk_of(harness: Harness) -> Any:
    engine: Any = harness.serving.engine
    return engine._loop.memory.connectors[0]


async def test_what_its_disk_has_is_read_there_and_the_rest_alone_is_asked_for(with_disk: list[FakeExecutor]) -> None:
    num_blocks, longer = len(LONG) // 4, LONG + " And it was good at it."
    first, second = fake(Slow), fake(Slow)
    with_disk += [first, second]
    async with running(executor=first) as harness:
        told = await collect(harness.inference.Generate(request(LONG)))
        disk = disk_of(harness)
        await eventually(lambda: disk.counts.store.num_blocks >= num_blocks)
    async with pair(executors=(fake(Slow), second)) as both:
        assert folded(await both.generate(request(LONG))) == folded(told)
        assert (both.here["cached"], both.received.num_asked) == (1, 0)
        assert disk_of(both.decode).counts.num_tokens == 4 * num_blocks
    third = fake(Slow)
    with_disk.append(third)
    async with pair(executors=(fake(Slow), third)) as both:
        answer = await both.generate(request(longer))
        assert both.received.num_asked == 1
        assert both.received.num_blocks_received == len(longer) // 4 - num_blocks
        assert both.decode.serving.engine.load().num_prefix_hit_tokens == len(longer) // 4 * 4
        async with running(executor=fake(Slow)) as alone:
            assert folded(answer) == folded(await collect(alone.inference.Generate(request(longer))))
