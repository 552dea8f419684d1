"""What is measured between filling and draining, against arithmetic done by hand."""

from dataclasses import replace

import pytest

from benchmarks.paper.point import sustained_requests_per_s
from jpaged.config import EngineConfig
from jpaged.hardware import HARDWARE
from jpaged.plan.cost import StepLoad
from jpaged.plan.simulator import simulation
from jpaged.plan.simulator.deployment import MODELS, deploy
from jpaged.plan.simulator.simulation import ExecutorObservation, SimulatedStep, TimeWindow, simulate
from jpaged.plan.simulator.trace import WORKLOADS, TraceRequest, synthesize

STEP = SimulatedStep(0.0, 1.0, 2, 0, 0, 2, ExecutorObservation(100, 8, 0, False))
OPTIONS = EngineConfig().replace(
    max_num_seqs=256,
    max_num_batched_tokens=2560,
    overlap=False,
    max_inter_token_latency=0.0,
    preemption_mode="recompute",
    enable_prefix_caching=False,
)


def steps(**columns) -> list[SimulatedStep]:
    """Steps of a second each, one after another, that differ in these fields."""
    rows = zip(*columns.values(), strict=True)
    return [replace(STEP, begin_s=float(i), **dict(zip(columns, row, strict=True))) for i, row in enumerate(rows)]


def test_a_window_leaves_out_the_first_fifth_and_ends_with_the_last():
    assert simulation.window([9.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]) == TimeWindow(2.0, 9.0)
    assert simulation.window([0.0, 1.0, 2.0, 3.0], 0.5) == TimeWindow(2.0, 3.0)


def test_the_steady_window_is_from_a_fifth_of_the_first_tokens_to_the_last_of_them():
    # Ten first tokens: two in each of the first two steps, one in each of the next six, then the batch drains.
    some = steps(num_first_tokens=(2, 2, 1, 1, 1, 1, 1, 1, 0, 0))
    assert simulation.steady_window(some) == TimeWindow(2.0, 8.0)
    assert [step.begin_s for step in TimeWindow(2.0, 8.0).steps(some)] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_a_mean_weighs_steps_by_their_seconds():
    some = [replace(STEP, num_batched=4, seconds=3.0), replace(STEP, num_batched=8, seconds=1.0)]
    assert simulation.mean(some, lambda step: step.num_batched) == 5.0
    assert simulation.mean([], lambda step: step.num_batched) == 0.0


def test_a_rate_is_the_windows_share_of_the_tokens_as_requests():
    # 24 of 40 tokens in the window's 3 seconds: 60 percent of 5 requests.
    some = steps(num_sampled=(8, 8, 8, 8, 4, 4))
    assert simulation.requests_per_s(some, TimeWindow(1.0, 4.0), 5) == pytest.approx(0.6 * 5 / 3)


def test_the_queues_growth_is_the_slope_of_the_nearest_line():
    assert simulation.queue_growth_per_s(steps(num_waiting=(1, 3, 5, 7))) == pytest.approx(2.0)
    # Around the mean of 1.5 s: (-1.5 * 0 - 0.5 * 4 + 0.5 * 0 + 1.5 * 4) / (2 * 1.5^2 + 2 * 0.5^2) = 4 / 5
    assert simulation.queue_growth_per_s(steps(num_waiting=(0, 4, 0, 4))) == pytest.approx(0.8)
    assert simulation.queue_growth_per_s([STEP]) == 0.0


@pytest.mark.parametrize(
    ("waiting", "grows"),
    [
        ((0, 1, 2, 3, 4, 5, 6, 7), True),  # by 8 in 8 s, over a batch of 2
        ((7, 6, 5, 4, 3, 2, 1, 1), False),  # it shrinks
        ((9, 9, 9, 9, 9, 9, 9, 9), False),  # it is long, and stays so
        ((1, 1, 1, 1, 2, 2, 2, 2), False),  # by 1.5, under a batch
        ((0, 1, 2, 3, 4, 5, 0, 9), False),  # somebody found it empty at the end
        ((0, 0, 0, 0, 0, 0, 6, 8), True),
    ],
)
def test_a_queue_grows_by_more_than_a_batch_and_is_not_empty_late(waiting, grows):
    assert simulation.queue_grows(steps(num_waiting=waiting), TimeWindow(0.0, 8.0)) is grows


def test_a_window_without_steps_has_no_queue():
    assert not simulation.queue_grows(steps(num_waiting=(1, 2)), TimeWindow(5.0, 5.0))


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_equal_requests_are_served_at_the_rate_of_one_batch(batching):
    # Regions of 64 tokens in a pool of 128: two at a time, together from beginning to end.
    deployment = deploy(MODELS["opt-13b"], HARDWARE["a100-40gb"], num_kv_slots=128)
    options = OPTIONS.replace(kv_policy="reserve-oracle", batching=batching)
    result = simulate([TraceRequest(0.0, 40, 24)] * 20, deployment, options)
    contiguous = deployment.contiguous()
    batch_s = contiguous.step_s(StepLoad(2, 80, 80, 2 * 820))
    batch_s += sum(contiguous.step_s(StepLoad(2, 2, 2 * length, 2 * length)) for length in range(41, 64))
    assert sustained_requests_per_s(result) == pytest.approx(2 / batch_s)
    assert result.mean_batched_requests == pytest.approx(2.0)
    assert result.window.seconds == pytest.approx(7 * batch_s)  # batches 3 to 9, to the tenth's first token


@pytest.mark.long
def test_a_rate_above_what_is_sustained_grows_a_queue_and_one_below_does_not():
    deployment = deploy(MODELS["opt-13b"], HARDWARE["a100-40gb"])
    options = OPTIONS.replace(kv_policy="reserve-max")

    def serve(rate):
        trace = synthesize(WORKLOADS["alpaca"], rate_per_s=rate, num_requests=70, seed=0, max_model_len=2048)
        return simulate(trace, deployment, options)

    sustained = sustained_requests_per_s(serve(1e6))
    assert not serve(0.7 * sustained).queue_grows
    assert serve(1.3 * sustained).queue_grows


def test_a_trace_too_short_for_a_window_is_measured_whole():
    deployment = deploy(MODELS["opt-13b"], HARDWARE["a100-40gb"])
    result = simulate([TraceRequest(1.0, 100, 3)], deployment, OPTIONS)
    assert result.window == TimeWindow(0.0, result.elapsed_s)
    assert result.mean_batched_requests == 1.0
