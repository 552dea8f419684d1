"""Random lives with a disk beneath: small pools, whose prefixes come back from there, and nothing else does."""

import functools
import random
from collections import Counter
from typing import Any

import pytest

from jpaged.blockstore.store import BlockStore
from jpaged.engine.executor import DeviceRates
from jpaged.engine.kv_cache.connector import EngineStore
from jpaged.testing import SeveralStepsExecutor
from tests.engine.kv_cache.offload.disks import IDENTITY, Inline
from tests.engine.lives import STREAMING, WINDOWS, Life


class Slow(SeveralStepsExecutor):
    """Whatever disk has is worth it."""

    @property
    def rates(self):
        return DeviceRates(swap_out_bytes_per_s=16e6, swap_in_bytes_per_s=16e6, forward_s=((1, 1.0),))


class Slack(Inline):
    """Does what it is given at some later time, in any order."""

    def __init__(self, seed):
        super().__init__()
        self.random = random.Random(seed)
        self.held = []

    def submit(self, fn, /, *args, **kwargs):
        future = super().submit(fn, *args, **kwargs)
        self.do_some()
        return future

    def do_some(self):
        held, self.held = self.held or [], []
        for one in held:
            if self.random.random() < 0.5:
                self._run(*one)
            else:
                self.held.append(one)


def live(seed, path, windows=(None,), **options):
    """Two lives of one server, with a disk that has room for a part of what it computes; the counts of the second's.

    Both live alike, so that the second begins where the first has left prefixes.
    """
    known: dict[Any, Any] = {}
    counts = None
    for _ in range(2):
        workers = Slack(seed), Slack(-seed)
        make_stores = functools.partial(_stores, seed, path, workers)
        life = Life(seed, windows, kind=Slow, make_stores=make_stores, **{"enable_prefix_caching": True, **options})
        for owner, texts in known.items():
            life.texts[owner] += [(None, some) for _, some in texts]
        engine: Any = life.h.engine
        engine.step = functools.partial(_step_and_work, life.h, workers, life.h.engine.step)
        life.run()
        known = life.texts
        counts = next((connector.counts for connector in life.h.engine._loop.memory.connectors), None)
        life.h.engine.stop()
    return counts


def _stores(seed, path, workers, executor):
    blocks = executor.host_blocks
    if executor.geometry.num_host_blocks < 8:
        return ()
    limit = 8192 + random.Random(seed).choice([20, 60, 1000]) * blocks.bytes_per_block
    return (EngineStore(BlockStore(path, IDENTITY, blocks.bytes_per_block, limit), threads=workers),)


def _step_and_work(harness, workers, step):
    harness.clock.advance(1e-5)
    did_something = step()
    for threads in workers:
        threads.do_some()
    return did_something


@pytest.mark.thinned(5)
@pytest.mark.parametrize("windows", [(None,), *WINDOWS[:2], STREAMING[0]])
def test_a_few_lives(tmp_path, windows):
    num_tokens = 0
    for seed in range(2):
        counts = live(seed, tmp_path / str(seed), windows)
        num_tokens += counts.num_tokens if counts is not None else 0
    assert num_tokens


@pytest.mark.long
@pytest.mark.parametrize("windows", [(None,), *WINDOWS, *STREAMING])
def test_many_lives(tmp_path, windows):
    found: Counter[str] = Counter()
    for seed in range(40):
        counts = live(1000 + seed, tmp_path / str(seed), windows, max_loras=2 * (seed % 2))
        if counts is not None:
            found["tokens"] += counts.num_tokens
            found["evicted"] += counts.store.num_evicted
            found["fallbacks"] += counts.num_fallbacks
            assert not counts.store.num_dropped
    assert found["tokens"] and found["evicted"]
