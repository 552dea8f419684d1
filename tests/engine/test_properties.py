"""Random lives of many requests against what a pool may do and what every token must be."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.engine.admission import POLICIES
from jpaged.engine.preemption import PREEMPTION_MODES
from jpaged.errors import DeadlineExceeded, InvalidArgument, RequestTooLong
from jpaged.testing import FakeExecutor
from jpaged.types import FinishReason
from tests.engine.harness import Harness
from tests.engine.oracle import expected_outputs

SHAPES = st.one_of(
    st.just({"temperature": 0.0}),
    st.builds(lambda seed: {"temperature": 1.0, "seed": seed}, st.integers(0, 2**64 - 1)),
    st.builds(lambda n, seed: {"temperature": 1.0, "seed": seed, "n": n}, st.integers(2, 4), st.integers(0, 99)),
    st.builds(lambda n: {"temperature": 1.0, "seed": n, "n": 1, "best_of": n}, st.integers(2, 3)),
    st.builds(
        lambda width, early, penalty: {
            "temperature": 0.0,
            "beam_width": width,
            "n": width,
            "early_stopping": early,
            "length_penalty": penalty,
        },
        st.integers(1, 4),
        st.sampled_from([True, False, "never"]),
        st.sampled_from([0.0, 1.0, 2.0]),
    ),
)
# Prompts that often begin alike, so that prefixes are shared.
PROMPTS = st.builds(
    lambda kind, shared, own: [kind * 7 + i for i in range(shared)] + own,
    st.integers(0, 1),
    st.integers(0, 14),
    st.lists(st.integers(0, 256), min_size=1, max_size=6),
)


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts, drops and passing time in any order, under pools from two blocks up."""

    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(8, 24),
        num_host_blocks=st.sampled_from([0, 3, 24]),
        overlap=st.booleans(),
        preemption_mode=st.sampled_from(PREEMPTION_MODES),
        policy=st.sampled_from(POLICIES),
        enable_prefix_caching=st.booleans(),
    )
    def start(self, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, num_host_blocks, **options):
        executor = FakeExecutor(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=40,
            num_host_blocks=num_host_blocks,
        )
        self.h = Harness(executor=executor, **options)
        self.requests = {}
        self.gone = {}

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        shape=SHAPES,
        lifetime_s=st.none() | st.floats(0.5, 20.0),
        sharing=st.sampled_from([{}, {}, {"cache_salt": "x"}, {"use_prefix_cache": False}, {"priority": -1}]),
        tenant=st.sampled_from(["a", "b"]),
    )
    def arrive(self, prompt, max_tokens, shape, lifetime_s, sharing, tenant):
        name = f"r{len(self.requests) + len(self.gone)}"
        geometry = self.h.engine.geometry
        deadline_s = None if lifetime_s is None else self.h.clock() + lifetime_s
        num_rows = shape.get("beam_width") or shape.get("best_of") or shape.get("n", 1)
        block_size, total = geometry.block_size, len(prompt) + max_tokens
        num_shared = len(prompt) // block_size
        num_blocks = num_shared + num_rows * (-(-total // block_size) - num_shared)
        fits = total <= geometry.max_model_len and num_blocks <= geometry.num_blocks
        try:
            request = self.h.submit(
                name, prompt, max_tokens=max_tokens, deadline_s=deadline_s, tenant=tenant, **shape, **sharing
            )
        except RequestTooLong:
            assert not fits
        except InvalidArgument:
            assert num_rows > geometry.max_num_seqs
        else:
            assert fits
            self.requests[name] = (request.sampling, expected_outputs(prompt, request.sampling))

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
        for name, (sampling, expected) in {**self.requests, **self.gone}.items():
            if sampling.best_of is None:
                for index, tokens in enumerate(expected):
                    shown = self.h.tokens(name, index)
                    assert shown == tokens[: len(shown)]

    def teardown(self):
        if not hasattr(self, "h"):
            return
        self.h.run()
        load = self.h.engine.load()
        assert load.num_blocks_free == load.num_blocks and load.num_running == load.num_waiting == 0
        for name, (sampling, expected) in self.requests.items():
            last = self.h.last(name)
            if last.error is not None:
                assert isinstance(last.error, DeadlineExceeded)
            elif last.finish.reason is FinishReason.ABORT:
                continue
            elif sampling.best_of is None:
                assert [self.h.tokens(name, index) for index in range(sampling.n)] == expected
            else:
                assert self.h.tokens(name) in expected


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


class LongEngineMachine(EngineMachine):
    """The same, for longer."""


TestLongEngineMachine = pytest.mark.long(LongEngineMachine.TestCase)
TestLongEngineMachine.settings = settings(
    max_examples=1500, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
