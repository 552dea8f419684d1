"""Engines with a disk beneath them, whose threads are the test's own."""

from concurrent.futures import Executor, Future
from typing import Any

from jpaged.blockstore.store import BlockStore
from jpaged.config import KVTransferOptions
from jpaged.engine.executor import DeviceRates
from jpaged.engine.kv_cache.connector import ConnectorGuard, EngineStore
from jpaged.testing import FakeExecutor, seeing, with_adapters
from jpaged.types import SamplingParams
from tests.engine.harness import CheckedHarness
from tests.engine.kv_cache.oracle import expected_outputs

VOCAB_SIZE = 61
LIMIT = 1 << 20
IDENTITY = b"of every fake".ljust(32)
PROMPT = [i % 60 for i in range(7, 35)]
"""Seven blocks of four."""


class Inline(Executor):
    """Runs what it is given at once, or when it is told to.

    Attributes:
        held: what waits; None runs at once.
    """

    def __init__(self):
        self.held: list[tuple[Future[Any], Any, tuple[Any, ...]]] | None = None
        self.num_run = 0

    def submit(self, fn, /, *args, **kwargs):
        future: Future[Any] = Future()
        if self.held is None:
            self._run(future, fn, args)
        else:
            self.held.append((future, fn, args))
        return future

    def hold(self):
        self.held = []

    def release(self, count=None):
        """Runs what was held: all of it, and what comes, or so many."""
        held = self.held or []
        done, rest = (held, None) if count is None else (held[:count], held[count:])
        self.held = rest
        for one in done:
            self._run(*one)

    def _run(self, future, fn, args):
        self.num_run += 1
        future.set_result(fn(*args))


class Slow(FakeExecutor):
    """A fake whose prompts take a second a token, so that whatever disk has is worth it."""

    @property
    def rates(self):
        return DeviceRates(swap_out_bytes_per_s=16e6, swap_in_bytes_per_s=16e6, forward_s=((1, 1.0),))


class Server:
    """One life of a server: an engine, and the disk or the connector that it found."""

    def __init__(self, path, *, windows=(None,), max_loras=0, kind=Slow, limit=LIMIT, connector=None, **options):
        executor = with_adapters(max_loras, seeing(windows, kind))(
            **{"num_blocks": 64, "num_host_blocks": 16, "vocab_size": VOCAB_SIZE, **options.pop("sizes", {})}
        )
        blocks = executor.host_blocks
        assert blocks is not None
        self.windows = windows
        self.tier: Any = "disk" if connector is None else "external"
        self.store: Any
        self.lookups = Inline()
        if connector is None:
            self.store = BlockStore(path, IDENTITY, blocks.bytes_per_block, limit)
        else:
            transfer = KVTransferOptions("Tested", "tests", {"name": str(path)})
            self.store = ConnectorGuard(connector, transfer, blocks, self.lookups)
        self.readers, self.writers = Inline(), Inline()
        self.h = CheckedHarness(executor=executor, make_stores=self._stores, **options)
        self.memory: Any = self.h.engine._loop.memory
        self.disk: Any = self.memory.connectors[0]
        self.queues = self.h.engine._loop.scheduler.queues

    def _stores(self, executor):
        return (EngineStore(self.store, self.tier, threads=(self.readers, self.writers)),)

    def submit(self, name, prompt, *, weight=0, **sampling):
        sampling = {"max_tokens": 3, "temperature": 0.0, **sampling}
        named = {key: sampling.pop(key) for key in ("cache_tenant", "adapter") if key in sampling}
        params = SamplingParams(**sampling)
        self.h.expected[name] = expected_outputs(
            prompt, params, vocab_size=VOCAB_SIZE, windows=self.windows, weight=weight
        )
        self.h.submit(name, prompt, **named, **sampling)

    def ask(self, name, prompt, **sampling):
        """Runs a request to its end; the tokens that it found."""
        self.submit(name, prompt, **sampling)
        return self.finish(name)

    def finish(self, name):
        self.run()
        assert self.h.tokens(name) == self.h.expected[name][0]
        return self.h.last(name).usage.cached_tokens

    def run(self):
        """Steps to the end, in time that passes."""
        while self.h.step():
            self.h.clock.advance(0.001)

    def step(self, count=1):
        for _ in range(count):
            self.h.clock.advance(0.001)
            self.h.step()

    def load(self):
        return self.h.engine.load()

    def stop(self):
        """An orderly end."""
        self.h.engine.stop()

    def kill(self):
        """An end without any order: what is on disk stays, and nothing else."""
        self.store.close()


def second_life(path, first_options=None, **options):
    """A server that starts where another has computed `PROMPT`, and was killed."""
    first = Server(path, **(first_options or {}))
    first.ask("a", PROMPT)
    first.kill()
    return Server(path, **options)
