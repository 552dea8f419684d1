"""Random lives of many requests against what a pool may do and what every token must be."""

from typing import get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from jpaged.config import Policy, PreemptionMode
from jpaged.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, RequestTooLong, Unsupported
from jpaged.testing import SeveralStepsExecutor
from jpaged.types import FinishReason
from tests.engine.harness import CheckedHarness
from tests.engine.kv_cache.oracle import expected_outputs

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


def prompt(kind, num_shared, own):
    """Prompts of one kind begin alike, so that prefixes are shared."""
    return [kind * 7 + i for i in range(num_shared)] + own


PROMPTS = st.builds(
    prompt,
    st.integers(0, 1),
    st.integers(0, 14),
    st.lists(st.integers(0, 256), min_size=1, max_size=6),
)


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, steps, pins, aborts, drops and passing time in any order, under pools from two blocks up.

    The harness checks blocks after every step, and every token when it comes.
    """

    num_steps = 0
    steps_per_count = 1

    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(8, 24),
        num_host_blocks=st.sampled_from([0, 3, 24]),
        overlap=st.booleans(),
        preemption_mode=st.sampled_from(get_args(PreemptionMode)),
        policy=st.sampled_from(get_args(Policy)),
        batching=st.sampled_from(["continuous", "continuous", "static"]),
        enable_prefix_caching=st.booleans(),
        max_cached_tokens=st.sampled_from([None, None, 7]),
        num_scheduler_steps=st.sampled_from([1, 2, 3, 8]),
        long_prefill_token_threshold=st.sampled_from([0, 0, 1, 3]),
        num_speculative_tokens=st.sampled_from([0, 1, 3, 7]),
    )
    def start(self, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, num_host_blocks, **options):
        executor = SeveralStepsExecutor(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=40,
            num_host_blocks=num_host_blocks,
        )
        self.h = CheckedHarness(executor=executor, **options)
        self.sampling = {}
        self.refusable = set()
        self.pins = {}
        self.num_arrivals = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        shape=SHAPES,
        lifetime_s=st.none() | st.floats(0.5, 20.0),
        sharing=st.sampled_from([{}, {}, {"cache_salt": "x"}, {"use_prefix_cache": False}, {"priority": -1}]),
        tenant=st.sampled_from(["a", "b"]),
    )
    def arrive(self, prompt, max_tokens, shape, lifetime_s, sharing, tenant):
        name = f"r{self.num_arrivals}"
        self.num_arrivals += 1
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
            self.sampling[name] = request.sampling
            self.h.expected[name] = expected_outputs(prompt, request.sampling)
            if self.pins:
                self.refusable.add(name)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count * self.steps_per_count):
            self.h.step()

    @rule(seconds=st.floats(0.0, 8.0))
    def time_passes(self, seconds):
        self.h.clock.advance(seconds)

    @rule(name=st.sampled_from(["p", "q"]), prefix=PROMPTS, salt=st.sampled_from(["", "x"]))
    def pin(self, name, prefix, salt):
        future = self.h.engine.pin_prefix(name, prefix, salt)
        if not self.h.enable_prefix_caching:
            assert isinstance(future.exception(), Unsupported)
        elif name in self.pins and (not self.pins[name].done() or self.pins[name].exception() is None):
            assert isinstance(future.exception(timeout=0), AlreadyExists | InvalidArgument)
        else:
            self.pins[name] = future

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 1))
    def unpin(self, which):
        name = sorted(self.pins)[which % len(self.pins)]
        future = self.pins[name]
        is_pinned = future.done() and future.exception() is None
        assert self.h.engine.unpin_prefix(name) == is_pinned
        if is_pinned:
            del self.pins[name]

    @precondition(lambda self: self.sampling)
    @rule(which=st.integers(0, 7), quietly=st.booleans())
    def cancel(self, which, quietly):
        name = list(self.sampling)[-1 - which % len(self.sampling)]
        if quietly:
            self.h.engine.drop(name)
            self.h.step()  # an abort that was asked for before may still be told
            del self.sampling[name], self.h.expected[name]
        else:
            self.h.engine.abort(name)

    def teardown(self):
        if not hasattr(self, "h"):
            return
        self.h.run()
        for name, future in self.pins.items():
            if future.exception(timeout=0) is None:
                assert future.result() % self.h.engine.geometry.block_size == 0 < future.result()
                assert self.h.engine.unpin_prefix(name)
            else:
                assert isinstance(future.exception(), InvalidArgument)
        self.h.step()
        load = self.h.engine.load()
        assert load.num_blocks_free == load.num_blocks and load.num_running == load.num_waiting == 0
        assert self.h.guesses.num_sequences == 0
        for name, sampling in self.sampling.items():
            self.check_end(name, sampling)
        type(self).num_steps += self.h.num_steps

    def check_end(self, name, sampling):
        last = self.h.last(name)
        if last.error is not None:
            assert isinstance(last.error, DeadlineExceeded) or (
                isinstance(last.error, RequestTooLong) and name in self.refusable
            )
        elif last.finish.reason is FinishReason.ABORT:
            return
        else:
            assert [self.h.tokens(name, index) for index in range(sampling.n)] == self.h.expected[name]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=100, stateful_step_count=40)


class LongEngineMachine(EngineMachine):
    """The same, with more steps between two events."""

    num_steps = 0
    steps_per_count = 4


@pytest.mark.parametrize(
    ("num_lives", "least_steps"),
    [pytest.param(250, 20_000, marks=pytest.mark.long), pytest.param(1100, 100_000, marks=pytest.mark.deep)],
)
def test_many_thousand_steps_of_random_lives(num_lives, least_steps):
    LongEngineMachine.num_steps = 0
    run_state_machine_as_test(
        LongEngineMachine,
        settings=settings(
            max_examples=num_lives,
            stateful_step_count=60,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    assert LongEngineMachine.num_steps >= least_steps
