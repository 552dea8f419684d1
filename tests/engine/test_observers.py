"""The features that observe steps: only those that are on, in a fixed order, with one timing for each dispatch."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from jpaged.engine.executor import ExpertStats
from jpaged.engine.scheduler.output import SchedulerOutput, build_step_inputs
from jpaged.engine.stats import Histogram, HistogramSnapshot, SpeculationStats, StallDetector, StepStats, StepTimer
from jpaged.server_load import DISTRIBUTIONS
from jpaged.testing import FakeExecutor, VirtualClock
from jpaged.types import Request, SamplingParams
from tests.engine.harness import Harness


def owners(callbacks):
    return [type(callback.__self__).__name__ for callback in callbacks]


def test_what_is_off_observes_nothing():
    h = Harness(executor=FakeExecutor(), num_scheduler_steps=1, refuse_late=False)
    observers = h.engine._loop.observers
    assert not any((observers.on_begin, observers.on_scheduled, observers.on_dispatched, observers.on_results))
    assert not (observers.on_end or observers.on_request_finished)


def test_features_observe_results_in_a_fixed_order():
    h = Harness(
        executor=FakeExecutor(),
        max_inter_token_latency=0.02,
        num_scheduler_steps=0,
        num_speculative_tokens=2,
        queue_timeout=9,
    )
    observers = h.engine._loop.observers
    assert owners(observers.on_results) == ["RecentSteps", "MultiStepPolicy", "StepTimeFloor", "SpecDecodeController"]
    assert owners(observers.on_request_finished) == ["SpecDecodeController", "Deadlines"]


def test_an_inspector_observes_only_while_it_is_on():
    h = Harness()
    loop = h.engine._loop
    loop.snapshotter.snapshot(loop.stats.snapshot(0))
    assert owners(loop.observers.on_scheduled) == ["PoolSnapshotter"]
    loop.snapshotter._until_s = -1.0
    h.submit("a", [1, 2, 3], max_tokens=2)
    h.run()
    assert loop.observers.on_scheduled == []


def test_a_request_is_counted_and_its_id_is_free_when_its_last_event_comes():
    h, seen = Harness(), list[object]()

    def sink(event):
        if event.is_last:
            seen.append((h.engine.num_ended_by_reason()["length"], "a" in h.engine.in_flight))

    h.engine._loop.observers.on_request_finished.append(lambda group: seen.append(group.request.request_id))
    h.engine.submit(Request("a", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=3)), sink)
    h.run()
    assert seen == [(1, False), "a"]


def test_results_are_observed_when_their_tokens_were_processed():
    h, seen = Harness(num_scheduler_steps=1), []
    h.engine._loop.observers.on_results.append(lambda *_: seen.append(len(h.tokens("a"))))
    h.submit("a", [1, 2, 3], max_tokens=3)
    h.run()
    assert seen == [1, 2, 3]


def test_a_dispatch_takes_time_from_the_end_of_the_one_before():
    now_s = 0.0

    def clock():
        return now_s

    timer, schedule = StepTimer(FakeExecutor(), clock, StallDetector(clock, 9.0)), SchedulerOutput()
    inputs = build_step_inputs(schedule, FakeExecutor().geometry)
    found = []
    for begin_s, wait_s, end_s in [(1.0, 2.0, 4.0), (3.0, 5.0, 6.0), (7.0, 8.0, 9.5)]:
        now_s = wait_s
        timer.begin_wait()
        now_s = end_s
        found.append(timer.end_wait(schedule, inputs, begin_s, None).seconds)
    assert found == [3.0, 2.0, 2.5]


def test_the_host_time_of_a_step_excludes_its_waits_and_idle_time_ends_with_a_dispatch():
    now_s = 1.0

    def clock():
        return now_s

    timer = StepTimer(FakeExecutor(), clock, StallDetector(clock, 9.0))
    timer.begin_step()
    now_s = 2.0
    timer.begin_wait()
    now_s = 5.0
    timer.end_wait(SchedulerOutput(), build_step_inputs(SchedulerOutput(), FakeExecutor().geometry), 1.0, None)
    now_s = 7.0
    timer.end_idle()
    now_s = 8.0
    assert timer.end_step() == pytest.approx((4.0, 2.0))


def test_steps_that_were_not_executed_are_not_counted():
    h = Harness()
    loop, schedule = h.engine._loop, Mock(spec=SchedulerOutput, num_steps=5, runs=["a"], num_tokens_shared=7)
    loop.stats.count_steps(schedule)
    loop.stats.discard_steps(schedule, 3)
    loop.stats.end_step(loop.memory, loop.scheduler)
    load = loop.stats.snapshot(0)
    assert (load.num_steps, load.num_cascade_steps, load.num_cascade_tokens) == (2, 2, 14)


# --- counts -----------------------------------------------------------------------------------------------------------


def test_a_histogram_counts_up_to_each_bound():
    first, second = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    for value, count in ((1.0, 1), (1.5, 3), (5.0, 1)):
        first.observe(value, count)
    second.observe(0.5)
    assert first.snapshot() == HistogramSnapshot((1.0, 2.0), (1, 4, 5), 10.5)
    both = HistogramSnapshot.total([first.snapshot(), second.snapshot()])
    assert both == HistogramSnapshot((1.0, 2.0), (2, 5, 6), 11.0)


def test_accepted_tokens_are_counted_by_position():
    stats = SpeculationStats(3)
    stats.count([3, 2, 0, 1], [3, 1, 0, 0])
    found = stats.snapshot()
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (3, 6, 4)
    assert found.num_accepted_tokens_per_pos == (2, 1, 1)


def test_a_place_is_free_as_soon_as_requests_have_ended_lately():
    clock = VirtualClock()
    stats, last = StepStats(FakeExecutor().geometry, clock), StepStats(FakeExecutor().geometry, clock)
    of_caller: Any = SimpleNamespace(ended_by="abort")
    of_engine: Any = SimpleNamespace(ended_by=None)
    for pause_s, group in ((0.0, of_caller), (2.0, of_engine), (4.0, of_caller)):
        assert stats.seconds_per_request() == (1.0 if pause_s < 4 else 2.0)
        clock.advance(pause_s)
        stats.count_end(group)
        last.count_end(group)
    assert stats.seconds_per_request() == 3.0
    assert {reason: count for reason, count in stats.num_ended().items() if count} == {"abort": 2, "error": 1}
    for _ in range(100):
        last.count_end(of_caller)
    assert last.seconds_per_request() == 0.1


def test_a_snapshot_has_what_others_count():
    clock = VirtualClock()
    stats, stalls = StepStats(FakeExecutor().geometry, clock), StallDetector(clock, 2.0)
    stalls.begin()
    clock.advance(3.0)
    load = stats.snapshot(4, stalls, ExpertStats(5, 6, 7, 0.5))
    assert (load.num_compiles_after_warm_up, load.seconds_since_progress, load.num_stalls) == (4, 3.0, 1)
    assert (load.num_expert_load_reads, load.num_expert_rearrangements, load.num_experts_moved) == (5, 6, 7)
    assert load.expert_balancedness == 0.5
    assert stats.snapshot(0).num_stalls == 0


def test_time_without_progress_is_that_of_pending_requests():
    clock = VirtualClock()
    stalls = StallDetector(clock, 2.0)

    def after(seconds: float) -> tuple[float, bool, int]:
        clock.advance(seconds)
        return stalls.seconds_without, stalls.is_stalled, stalls.num_stalls

    assert after(9.0) == (0.0, False, 0)
    stalls.begin()
    assert after(1.5) == (1.5, False, 0)
    assert after(0.5) == (2.0, True, 1)
    stalls.record_progress(clock())
    assert after(1.0) == (1.0, False, 1)
    stalls.record_progress(clock())
    stalls.set_paused(True)
    assert after(9.0) == (0.0, False, 1)
    stalls.set_paused(False)
    assert after(1.0) == (1.0, False, 1)
    clock.advance(4.0)
    stalls.rest()
    assert after(9.0) == (0.0, False, 2)
    stalls.begin_wait(clock())  # for a step whose requests were dropped
    assert after(3.0) == (3.0, True, 3)
    stalls.end_wait()
    assert after(1.0) == (0.0, False, 2)


def test_times_and_counts_are_those_of_the_requests():
    h = Harness(executor=FakeExecutor(num_blocks=64, block_size=4), overlap=False)
    h.submit("a", [1] * 6, max_tokens=4)
    h.submit("b", [2] * 3, max_tokens=2, n=2, temperature=1.0, seed=1)
    seen = []
    for _ in range(5):
        h.clock.advance(1.0)
        h.step()
        load = h.engine.load()
        seen.append((load.num_running, load.num_waiting, load.num_generation_tokens, load.num_requests_ended))
    assert seen == [(2, 0, 3, 0), (1, 0, 6, 1), (1, 0, 7, 1), (0, 0, 8, 2), (0, 0, 8, 2)]
    assert (load.num_prompt_tokens, load.num_first_tokens, load.num_steps) == (9, 2, 4)
    assert load.time_to_first_token_s == 1.0
    assert (load.num_blocks_used, load.num_blocks_free) == (0, 64)
    assert load.num_blocks_cached + load.num_blocks_empty == 64
    assert load.num_blocks_cached == 2 + 2  # of nine stored tokens two blocks, and of four in either sample one
    assert (load.peak_blocks_used, load.device_idle_s) == (3, 3.0)
    found = {name: h.engine.histogram(name) for name in DISTRIBUTIONS}
    assert {name: (one.cumulative_counts[-1], one.sum) for name, one in found.items() if name != "host_step"} == {
        "queue_time": (2, 2.0),
        "time_to_first_token": (2, 2.0),
        "inter_token": (5, 5.0),
        "end_to_end": (2, 4.0 + 2.0),
        "request_prompt_tokens": (2, 9),
        "request_generation_tokens": (2, 8),
        "request_n": (2, 3),
        "request_max_tokens": (2, 6),
        "prefill_time": (2, 0.0),
        "decode_time": (2, 3.0 + 1.0),
        "inference_time": (2, 3.0 + 1.0),
        "time_per_token": (2, 2.0),
    }
    assert found["host_step"].cumulative_counts[-1] == 4
    h.submit("c", [3], max_tokens=1)
    h.run()
    assert h.engine.num_ended_by_reason()["length"] == 3
    assert h.engine.histogram("time_per_token").cumulative_counts[-1] == 2
