"""Replicas over the fake executor, stepped by hand, that remember every event and say where a request went."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from jpaged.config import EngineConfig
from jpaged.engine.data_parallel import DataParallelEngine, shares
from jpaged.engine.engine import Engine
from jpaged.service.input_processor import InputProcessor
from jpaged.testing import ByteTokenizer, FakeExecutor, Faults, VirtualClock
from jpaged.types import Prompt, SamplingParams

PREFIX = list(range(20, 33))
"""Three blocks of four, and a token of the fourth."""


class Fleet:
    """Replicas and every event of theirs."""

    def __init__(
        self, count=2, *, max_num_queued_reqs=64, faults=None, engine_options=None, kind=FakeExecutor, **executor
    ):
        sizes = {"max_num_batched_tokens": 16, "num_blocks": 64, "max_num_seqs": 8, **executor}
        faults = faults or [Faults() for _ in range(count)]
        executors = [kind(**sizes, faults=one) for one in faults]
        self.clock = VirtualClock()
        self.engines = []
        for one, queue in zip(executors, shares(max_num_queued_reqs, count), strict=True):
            config = EngineConfig().replace(
                max_num_queued_reqs=queue, preemption_mode="recompute", **(engine_options or {})
            )
            self.engines.append(Engine(one, ByteTokenizer(), config, clock=self.clock))
        self.replicas = DataParallelEngine(self.engines)
        self.input_processor = InputProcessor(ByteTokenizer(), self.replicas.geometry)
        self.events = defaultdict(list)

    def submit(self, name, prompt, *, cache_tenant="", adapter=None, **sampling):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **sampling})
        request = self.input_processor.make_request(request_id=name, sampling=params, prompt=Prompt(token_ids=prompt))
        request = dataclasses.replace(request, cache_tenant=cache_tenant, adapter=adapter)
        self.replicas.submit(request, self.events[name].append)
        return request

    def where(self, name):
        (replica,) = [i for i, engine in enumerate(self.engines) if name in engine.in_flight]
        return replica

    def place(self, name, prompt, **sampling):
        """Where a request goes that is submitted now."""
        self.submit(name, prompt, **sampling)
        return self.where(name)

    def ask(self, name, prompt, **sampling):
        """Where a request goes; it has ended on return."""
        replica = self.place(name, prompt, **sampling)
        self.run()
        return replica

    def run(self, limit=5000):
        for _ in range(limit):
            if not self.replicas.step():
                return
            self.replicas.check()
        raise AssertionError(f"still busy: {self.replicas.load()}")

    def tokens(self, name, index=0):
        return [token for event in self.events[name] if event.index == index for token in event.token_ids]

    def last(self, name):
        assert [event.is_last for event in self.events[name]].count(True) == 1
        assert self.events[name][-1].is_last
        return self.events[name][-1]

    def is_at_rest(self):
        load = self.replicas.load()
        return (load.num_running, load.num_waiting, load.num_blocks_used) == (0, 0, 0)
