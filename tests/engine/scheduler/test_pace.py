"""What prompts add to the steps of streams, under a bound of the time between two tokens."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.engine.executor import BucketTable, DeviceRates
from jpaged.engine.observers import StepTiming
from jpaged.engine.scheduler.multi_step import (
    LEAST_SHARE,
    LEAST_TOKENS,
    RecentSteps,
    StepTimeEstimator,
    choose_bound_s,
)
from jpaged.engine.scheduler.scheduler import _within
from jpaged.hardware import HARDWARE
from jpaged.plan.simulator.deployment import MODELS, deploy
from jpaged.plan.simulator.simulation import simulate
from jpaged.plan.simulator.trace import TraceRequest
from jpaged.testing import expected_tokens
from tests.engine.groups import group_of
from tests.engine.timed import TimedExecutor

SHAPE = {"num_blocks": 400, "max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 256}


def cost_s(num_padded, num_pairs):
    return 0.001 + 0.0001 * num_padded + 1e-7 * num_pairs


def rates(scale=1.0):
    """Those of steps that take `cost_s`, when it is this times as much."""
    forward_s = tuple((size, scale * cost_s(size, 0)) for size in (8, 32, 128))
    return DeviceRates(1e9, 1e9, forward_s, scale * 1e-7)


def make(bound_s, *, overlap=True, scale=1.0, **options):
    executor = TimedExecutor(cost_s, rates(scale), **SHAPE)
    options = {"enable_prefix_caching": False, "overlap": overlap} | options
    return executor.harness(max_inter_token_latency=bound_s, **options)


@pytest.mark.parametrize(("num_rounds", "num_kept"), [(0, 8), (1, 0)])
def test_the_newest_steps_of_each_size_are_kept_with_the_rows_in_use(num_rounds, num_kept):
    buckets = BucketTable.build(max_num_batched_tokens=64, max_num_seqs=8)
    steps = RecentSteps(buckets)
    kv_lens_s, query_starts_s1 = np.array([5, 6, 0, 0], np.int32), np.array([0, 1, 3, 0, 0], np.int32)
    inputs: Any = SimpleNamespace(num_rows=2, query_starts_s1=query_starts_s1, kv_lens_s=kv_lens_s)
    schedule: Any = SimpleNamespace(decodes=SimpleNamespace(num_rounds=num_rounds))
    outputs: Any = None
    for number in range(10):
        steps.on_results(schedule, outputs, StepTiming(inputs, 3, 8, 2, 0.0, 1.0, float(number)))
    inputs.query_starts_s1[:], inputs.kv_lens_s[:] = 0, 0  # the arrays are used again
    ran = steps.take()
    assert [one.seconds for one in ran] == [number / 2 for number in range(10 - num_kept, 10)]
    assert all((one.query_starts.tolist(), one.kv_lens.tolist()) == ([0, 1, 3], [5, 6]) for one in ran)
    assert steps.take() == []


def stream_and_prompts(h, num_prompts=4):
    """Three streams, and prompts beside them, one after another."""
    names = [f"stream {i}" for i in range(3)]
    for i, name in enumerate(names):
        h.submit(name, [i, 3], max_tokens=200)
    for _ in range(10):
        h.step()
    for i in range(num_prompts):
        h.submit(f"prompt {i}", [i] * 200, max_tokens=1)
        while not h.events[f"prompt {i}"]:
            h.step()
    for name in names:
        h.engine.abort(name)
    h.run()
    return names


# --- streams and prompts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_streams_wait_no_longer_than_the_bound_and_without_one_for_the_largest_step(overlap):
    longest_s = {}
    for bound_s in (0.0, 0.006):
        h = make(bound_s, overlap=overlap)
        names = stream_and_prompts(h)
        longest_s[bound_s] = max(h.gaps_s(*names))
        for i in range(4):
            assert h.tokens(f"prompt {i}") == expected_tokens([i] * 200, 1)
        assert h.tokens("stream 1") == expected_tokens([1, 3], len(h.tokens("stream 1")))
    assert longest_s[0.0] > cost_s(128, 0)
    assert longest_s[0.006] <= 0.006


def test_a_prompt_fills_the_largest_step_that_the_bound_allows():
    h = make(0.006)
    stream_and_prompts(h, num_prompts=1)
    # 32 tokens take 4.2 ms, and 64 take 7.4: the three rows, and 29 tokens of the prompt seven times.
    assert h.executor.sizes.count(32) == 7
    assert set(h.executor.sizes) == {8, 32}


def test_where_no_stream_decodes_a_prompt_gets_the_whole_step():
    h = make(0.003)
    h.submit("first", [1] * 250, max_tokens=1)
    h.submit("second", [2] * 6, max_tokens=1)
    h.run()
    assert h.executor.sizes == [128, 128]


def test_a_bound_below_what_a_step_takes_leaves_prompts_their_least_part():
    h = make(1e-6)
    stream_and_prompts(h, num_prompts=1)
    assert LEAST_TOKENS == 16
    # 16 tokens have room for 13 beside the rows; 32 have room for 29, and take twice what 8 do.
    assert h.executor.sizes.count(32) == 7


def test_prompts_always_get_what_makes_a_step_half_as_long_again():
    executor = TimedExecutor(
        lambda size, _: 0.01 + 1e-5 * size, DeviceRates(1e9, 1e9, ((8, 0.01008), (128, 0.01128))), **SHAPE
    )
    h = executor.harness(max_inter_token_latency=0.001, enable_prefix_caching=False)
    stream_and_prompts(h, num_prompts=1)
    assert LEAST_SHARE == 0.5
    assert executor.sizes.count(128) == 2  # 125 tokens of 200, and the others
    assert set(executor.sizes) == {8, 128}


def test_a_prompt_gets_smaller_parts_where_it_looks_back_at_more():
    pair_s = 1e-6
    executor = TimedExecutor(
        lambda size, num_pairs: cost_s(size, 0) + pair_s * num_pairs,
        dataclasses.replace(rates(), pair_s=pair_s),
        **SHAPE,
    )
    h = executor.harness(max_inter_token_latency=0.016, enable_prefix_caching=False)
    names = stream_and_prompts(h, num_prompts=1)
    assert [size for size in executor.sizes if size > 8] == [64, 64, 32, 32, 32]
    assert max(h.gaps_s(*names)) <= 0.016


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_steps_that_ran_correct_what_was_measured_at_the_start(scale):
    h = make(0.006, scale=scale)
    names = stream_and_prompts(h, num_prompts=12)
    late = [gap_s for gap_s in h.gaps_s(*names) if gap_s > 0.006]
    assert len(late) <= 3 * 2 * 2  # at most two of each size that is too large, for each of the streams
    assert h.executor.sizes[-40:].count(32) > 10


@pytest.mark.parametrize(
    "shape",
    [{"beam_width": 2, "n": 2}, {"best_of": 2, "temperature": 1.0, "seed": 3}, {"is_whole": True}],
    ids=["beams", "best of", "whole"],
)
def test_nobody_waits_for_the_next_token_of_a_request_that_is_told_at_its_end(shape):
    h = make(0.006)
    h.submit("whole", [1, 3], max_tokens=40, **shape)
    h.step()
    h.submit("prompt", [1] * 200, max_tokens=1)
    h.run()
    assert h.executor.sizes.count(128) == 2
    assert h.last("whole").finish is not None


@pytest.mark.long
def test_a_bound_holds_in_simulated_time():
    deployment = deploy(MODELS["opt-13b"], HARDWARE["a100-40gb"])
    trace = [TraceRequest(0.0, 10, 200)] + [TraceRequest(0.5 + 0.1 * i, 1500, 2) for i in range(10)]
    longest_s = {}
    for bound_s in (0.0, 0.1):
        options = EngineConfig().replace(
            max_num_seqs=8, max_num_batched_tokens=2048, overlap=False, max_inter_token_latency=bound_s
        )
        result = simulate(trace, deployment, options)
        longest_s[bound_s] = max(step.seconds for step in result.steps if step.begin_s > 0.2)
        assert len(result.served) == len(trace)
    assert longest_s[0.1] <= 0.1 < longest_s[0.0] / 2


def test_a_part_of_what_beams_want_leaves_all_of_them_a_token_and_some_of_them_fewer():
    group = group_of(4, beam_width=3, n=3)
    leader = group.sequences[0]
    wanted = [(leader, 1), (leader, 1), (leader, 3)]
    assert _within(5, group, wanted) == wanted
    for budget in (1, 2):  # the first two want one token each, which they may only compute together with the third
        assert _within(budget, group, wanted) == [(leader, budget)]
    assert _within(4, group, wanted) == [(leader, 2)]


# --- what a step takes ------------------------------------------------------------------------------------------------


def test_between_sizes_that_were_timed_lie_straight_lines_and_beyond_them_it_is_in_proportion():
    times = StepTimeEstimator(DeviceRates(1.0, 1.0, ((16, 1.0), (64, 4.0)), pair_s=0.5))
    assert [times.seconds(size, 0) for size in (8, 16, 40, 64, 128)] == [0.5, 1.0, 2.5, 4.0, 8.0]
    assert times.seconds(16, 4) == 3.0


def test_one_slow_step_in_eight_says_nothing_and_two_do():
    times = StepTimeEstimator(DeviceRates(1.0, 1.0, ((1, 1.0),)))
    times.observe(64, 0, 640.0)
    assert times.seconds(64, 0) == 64.0
    times.observe(64, 0, 128.0)
    assert times.seconds(64, 0) == 128.0
    for _ in range(32):
        times.observe(64, 0, 32.0)
    for _ in range(4):
        times.observe(64, 0, 640.0)
    assert times.seconds(64, 0) == 32.0
    times.observe(64, 0, 640.0)
    assert times.seconds(64, 0) == 640.0


def test_a_size_that_was_not_seen_is_like_the_nearest_that_was():
    times = StepTimeEstimator(DeviceRates(1.0, 1.0, ((1, 1.0),)))
    for _ in range(40):
        times.observe(8, 0, 16.0)
        times.observe(128, 0, 512.0)
    assert [times.seconds(size, 0) / size for size in (8, 16, 32, 64, 128)] == [2.0, 2.0, 2.0, 4.0, 4.0]
    times.observe(64, 0, 64.0)
    assert times.seconds(64, 0) / 64 == 4.0  # as many as make seven think so


@pytest.mark.parametrize("again_s", [256.0, 1280.0])
def test_what_was_not_seen_for_long_is_tried_again_and_the_first_step_says_how_it_goes_on(again_s):
    times = StepTimeEstimator(DeviceRates(1.0, 1.0, ((1, 1.0),)))
    for _ in range(2):
        times.observe(128, 0, 1280.0)
    for _ in range(256):
        times.observe(8, 0, 8.0)
    assert times.seconds(128, 0) == 1280.0
    times.observe(8, 0, 8.0)
    assert times.seconds(128, 0) == 128.0
    times.observe(128, 0, again_s)
    assert times.seconds(128, 0) == again_s


def test_a_step_that_took_no_time_says_nothing():
    times = StepTimeEstimator(DeviceRates(1.0, 1.0, ((1, 1.0),)))
    for _ in range(40):
        times.observe(8, 0, 0.0)
    assert times.seconds(8, 0) == 8.0


def test_a_step_is_as_long_as_what_it_is_padded_to_and_that_is_what_was_compiled_by_now():
    h = make(0.006)
    h.submit("stream", [1], max_tokens=20)
    h.step()
    h.executor._geometry = dataclasses.replace(h.executor.geometry, buckets=BucketTable((128,), (8,)))
    h.step()
    h.submit("prompt", [1] * 120, max_tokens=1)
    h.run()
    assert h.executor.sizes == [8] + [128] * 19
    assert len(h.events["prompt"]) == 1
    assert h.executor.num_tokens[2:4] == [121, 1]


# --- the default bound ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward_s", "want_s"),
    [
        (((8, 0.003), (1024, 0.12)), 0.1),  # a small model: messages wait as long
        (((8, 0.04), (1024, 4.0)), 0.176),  # 8.8 ms do not depend on the tokens
        (((8, 0.035), (1024, 0.3)), 0.658),
        (((8, 0.01), (2048, 0.048)), 0.197),  # an accelerator: nearly all of a small step
        (((8, 2.0), (1024, 250.0)), 0.945),
        (((8, 2.0), (1024, 100.0)), 1.0),
        (((8, 0.05),), 1.0),
        (((8, 0.01), (1024, 9.0)), 0.1),  # by its noise less than nothing
    ],
)
def test_the_default_bound_is_twenty_times_what_a_step_takes_without_its_tokens(forward_s, want_s):
    assert choose_bound_s(DeviceRates(1.0, 1.0, forward_s)) == want_s


def test_unless_a_bound_is_set_the_measured_rates_choose_it():
    budgets = {}
    for bound_s in (None, 0.0, 0.3):
        h = make(bound_s)
        budget = h.engine._loop.scheduler.prefill_budget
        budgets[bound_s] = budget and budget.bound_s
    assert budgets == {None: 0.1, 0.0: None, 0.3: 0.3}
