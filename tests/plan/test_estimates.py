"""Roofline, sequences, load and price: numbers that can be worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from jpaged.device.aot.topology import GPUS
from jpaged.errors import InvalidArgument
from jpaged.hardware import Hardware
from jpaged.plan.cost import ModelShape, Roofline, StepLoad
from jpaged.plan.estimate import (
    ConcurrencyLimits,
    PlannedService,
    SequenceLengths,
    estimate,
    get_price,
    mean_lengths,
    serve,
    usd_per_million,
)
from jpaged.plan.step_times import HOP_S, HOST_ROW_S, HOST_S, PlannedStepTimes, PlanTarget, find_target

GB, TERA = 1e9, 1e12
# Seven tenths of the bandwidth are 700 GB/s, half of the peak 100 TFLOP/s, half of the links 50 GB/s.
CHIP = Hardware("x", 16 * GB, 16 << 30, 1000 * GB, 200 * TERA, 32 * GB, 100 * GB)
TARGET = PlanTarget("x:2", "x", "tpu", 2, 2, CHIP, (2,))
SHAPE = ModelShape(
    num_params=10**9,
    num_layers=10,
    query_width=1000,
    weight_bytes=7 * 10**9,
    kv_bytes_per_token=1e4,
)


def times(num_devices: int = 1, number_bytes: int = 2, shape: ModelShape = SHAPE) -> PlannedStepTimes:
    return PlannedStepTimes(Roofline(shape, CHIP, num_devices), TARGET, 1000, number_bytes)


POOL = ConcurrencyLimits(num_blocks=100, block_size=16, max_num_seqs=8, max_num_batched_tokens=512)


def test_decoding_takes_the_time_to_read_weights_and_contexts() -> None:
    """7 GB of weights and 8 * 1000 * 10 kB of KV at 700 GB/s."""
    assert times().step_s(StepLoad.decoding(8, 1000)) == pytest.approx((7e9 + 8e7) / 700e9)


def test_layers_with_a_window_read_no_more_than_it() -> None:
    """Nine layers of ten see 100 of 1000 tokens, or of the 500 that queries of prompts see on average."""
    windowed = dataclasses.replace(SHAPE, windows=(*(100,) * 9, None))
    kv_bytes = 8 * (0.9 * 100 + 0.1 * 1000) * 1e4
    assert times(shape=windowed).step_s(StepLoad.decoding(8, 1000)) == pytest.approx((7e9 + kv_bytes) / 700e9)
    flops = 2e9 * 4000 + 4e4 * 4000 * (0.9 * 100 + 0.1 * 500)
    assert times(shape=windowed).step_s(StepLoad.prompts(4000, 1000)) == pytest.approx(flops / 100e12)
    mixed = StepLoad(3, 102, 1000 + 2 * 40, 5050 + 2 * 40, 2, 2 * 40)
    seen = mixed.within(50)
    assert (seen.num_kv_tokens, seen.num_pairs, seen.num_decoding_kv_tokens) == (150 + 80, 5000 + 80, 80)
    assert mixed.within(None) is mixed


def test_a_long_prefill_takes_the_time_of_its_products() -> None:
    """2 * 1e9 FLOPs a token and 4 * 10 * 1000 a pair, 500 pairs a token on average, at 100 TFLOP/s."""
    flops = 2e9 * 4000 + 4e4 * 4000 * 500
    assert times().step_s(StepLoad.prompts(4000, 1000)) == pytest.approx(flops / 100e12)


def test_devices_share_the_products_and_sum_over_their_links() -> None:
    """Two a layer and one: [4000, 1000] bfloat16, half of it sent twice, at 50 GB/s, and a hop there and back."""
    flops = (2e9 * 4000 + 4e4 * 4000 * 500) / 2
    sums = 21 * (4000 * 1000 * 2 / 50e9 + 2 * HOP_S)
    assert times(2).step_s(StepLoad.prompts(4000, 1000)) == pytest.approx(flops / 100e12 + sums)
    sums = 21 * (4000 * 1000 * 4 / 50e9 + 2 * HOP_S)
    assert times(2, number_bytes=4).step_s(StepLoad.prompts(4000, 1000)) == pytest.approx(flops / 100e12 + sums)


def test_the_output_matrix_is_for_sampled_rows_alone() -> None:
    """Half of the parameters are its, for one row of 4000 tokens; the others are for all."""
    shape = dataclasses.replace(SHAPE, head_params=5 * 10**8)
    flops = 1e9 * 4000 + 1e9 + 4e4 * 4000 * 2000
    assert times(shape=shape).step_s(StepLoad.prompts(4000, 4000)) == pytest.approx(flops / 100e12)


def test_a_step_is_no_shorter_than_the_hosts_part() -> None:
    small = dataclasses.replace(SHAPE, weight_bytes=1, num_params=1)
    assert times(shape=small).step_s(StepLoad.decoding(64, 1)) == HOST_S + 64 * HOST_ROW_S


def test_sequences_take_whole_blocks_and_no_more_than_the_rows_run() -> None:
    found = estimate(SequenceLengths(100, 29), POOL, times())  # 129 tokens: 9 blocks
    assert (found.num_fitting, found.num_running) == (11, 8)
    steps = 8 * 100 / 512 * found.prefill.seconds + 29 * found.decode.seconds
    assert found.tokens_per_s == pytest.approx(8 * 29 / steps)
    assert found.decode.seconds == times().step_s(StepLoad.decoding(8, 114.5))


def test_a_sequence_that_does_not_fit_gives_no_tokens() -> None:
    found = estimate(SequenceLengths(1600, 1), POOL, times())
    assert (found.num_fitting, found.num_running, found.tokens_per_s) == (0, 0, 0.0)


def test_a_mix_is_its_mean() -> None:
    assert mean_lengths([SequenceLengths(100, 10), SequenceLengths(301, 21)]) == SequenceLengths(201, 16)


def test_the_nearest_price_counts() -> None:
    prices = {"": 1.0, "v6e": 2.0, "v6e:2x4": 3.0}
    assert [get_price(prices, *where) for where in (("v6e:2x4", "v6e"), ("v6e:1x1", "v6e"), ("h200", "h200"))] == [
        3,
        2,
        1,
    ]
    assert get_price({"v6e": 2.0}, "h200", "h200") is None


def test_a_million_tokens_cost_the_chips_for_as_long_as_they_take() -> None:
    assert usd_per_million(3.6, 4, 1000.0) == pytest.approx(4.0)  # 1000 s of 4 chips at 0.1 cents a second
    assert usd_per_million(3.6, 4, 0.0) is None


@pytest.mark.parametrize(("load", "slices"), [(1.0, 1), (800.0, 1), (801.0, 2), (8000.0, 10)])
def test_a_load_takes_whole_slices_at_eight_tenths(load: float, slices: int) -> None:
    assert serve(load, 1000.0, 4, 2.0) == PlannedService(slices, 4 * slices, 8.0 * slices)


def test_what_serves_nothing_carries_no_load() -> None:
    assert serve(1.0, 0.0, 4, 2.0) is None


def test_targets_have_what_their_generation_has() -> None:
    found = find_target("tpu7x:2x2x1")
    assert (found.platform, found.num_chips, found.num_devices, found.family) == ("tpu", 4, 8, "tpu7x")
    assert find_target("h200") == dataclasses.replace(
        find_target("h200:8"), name="h200", num_devices=1, num_chips=1, shape=(1,)
    )


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_that_is_described_can_be_planned_for(gpu: str) -> None:
    found = find_target(f"{gpu}:4")
    assert (found.platform, found.family, found.num_devices, found.shape) == ("cuda", gpu, 4, (4,))
    assert found.hardware.name.startswith(gpu)
    assert 0.9 < found.hardware.usable_bytes / found.hardware.hbm_bytes < 1.02  # drivers report up to 7 % more


@pytest.mark.parametrize("name", ["h200:9", "h200:0", "v100", "a100-80gb", "v6e:3x3", ""])
def test_an_unknown_target_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^topology: .* is not known; known are a100, .*h200, .*v6e:2x4"):
        find_target(name)


def test_windows_let_more_sequences_fit() -> None:
    everything = ConcurrencyLimits(num_blocks=1000, block_size=16, max_num_seqs=64, max_num_batched_tokens=512)
    lossy = dataclasses.replace(everything, windows=(256,), num_sink_tokens=20)
    assert lossy.num_fitting(10_000) == 1000 // (2 + 16)  # of first tokens, and of the window
    assert everything.num_fitting(3200) == 1000 // 200
    mixed = dataclasses.replace(everything, windows=(None, 100, 100))
    assert mixed.num_fitting(3200) == 1000 // (200 + 7 + 7)  # 99 tokens of those before are in seven blocks
    assert mixed.num_fitting(3201) == 1000 // (201 + 8 + 8)
