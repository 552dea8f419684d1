"""Random lives of many requests against what a pool may do and what every token must be."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.errors import DeadlineExceeded, RequestTooLong
from jpaged.testing import FakeExecutor, expected_tokens
from jpaged.types import FinishReason
from tests.engine.harness import Harness


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts, drops and passing time in any order, under pools from two blocks up."""

    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(8, 24),
        overlap=st.booleans(),
    )
    def start(self, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, overlap):
        executor = FakeExecutor(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=40,
        )
        self.h = Harness(executor=executor, overlap=overlap)
        self.requests = {}
        self.gone = {}

    @rule(
        prompt=st.lists(st.integers(0, 256), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        seed=st.none() | st.integers(0, 2**64 - 1),
        lifetime_s=st.none() | st.floats(0.5, 20.0),
    )
    def arrive(self, prompt, max_tokens, seed, lifetime_s):
        name = f"r{len(self.requests) + len(self.gone)}"
        geometry = self.h.engine.geometry
        total = len(prompt) + max_tokens
        fits = total <= min(geometry.max_model_len, geometry.num_blocks * geometry.block_size)
        deadline_s = None if lifetime_s is None else self.h.clock() + lifetime_s
        sampling = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
        try:
            self.h.submit(name, prompt, max_tokens=max_tokens, deadline_s=deadline_s, **sampling)
        except RequestTooLong:
            assert not fits
            return
        assert fits
        self.requests[name] = expected_tokens(prompt, max_tokens, seed=seed)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.h.step()

    @rule(seconds=st.floats(0.0, 8.0))
    def time_passes(self, seconds):
        self.h.clock.advance(seconds)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), quietly=st.booleans())
    def cancel(self, data, quietly):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if quietly:
            self.h.engine.drop(name)
            self.h.step()
            self.gone[name] = self.requests.pop(name)
        else:
            self.h.engine.abort(name)

    @invariant()
    def blocks_and_tokens_are_right(self):
        if not hasattr(self, "h"):
            return
        self.h.engine.check()
        for name, expected in {**self.requests, **self.gone}.items():
            tokens = self.h.tokens(name)
            assert tokens == expected[: len(tokens)]

    def teardown(self):
        if not hasattr(self, "h"):
            return
        self.h.run()
        load = self.h.engine.load()
        assert load.num_blocks_free == load.num_blocks and load.num_running == load.num_waiting == 0
        for name, expected in self.requests.items():
            last = self.h.last(name)
            if last.error is not None:
                assert isinstance(last.error, DeadlineExceeded)
            elif last.finish.reason is not FinishReason.ABORT:
                assert self.h.tokens(name) == expected


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class LongEngineMachine(EngineMachine):
    """The same, for longer."""


TestLongEngineMachine = pytest.mark.long(LongEngineMachine.TestCase)
TestLongEngineMachine.settings = settings(
    max_examples=1500, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
