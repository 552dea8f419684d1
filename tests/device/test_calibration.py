"""What steps are said to take, from how long some of them took."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jpaged.device.step_costs import _measure_seconds, measure_steps, measure_used_tokens, null_prefill
from jpaged.engine.executor import BucketTable, Geometry, StepInputs
from jpaged.testing import FakeExecutor

GEOMETRY = FakeExecutor(max_num_batched_tokens=128, max_model_len=256).geometry


class Device:
    """Takes a millisecond a padded token, and a microsecond a pair; remembers what it ran."""

    def __init__(self, pair_s: float = 1e-6) -> None:
        self.pair_s = pair_s
        self.ran: list[tuple[int, int]] = []

    def step_s(self, inputs: StepInputs) -> float:
        num_padded = len(inputs.token_ids_t)
        self.ran.append((num_padded, int(inputs.positions_t[0])))
        return 1e-3 * num_padded + self.pair_s * inputs.num_pairs


def test_steps_of_three_sizes_are_timed_and_attention_in_the_middle_one() -> None:
    device = Device()
    forward_s, pair_s = measure_steps(GEOMETRY, device.step_s)
    assert pair_s == pytest.approx(1e-6)
    assert [size for size, _ in forward_s] == [8, 32, 128]
    np.testing.assert_allclose([seconds for _, seconds in forward_s], [0.008, 0.032, 0.128])
    assert device.ran == [(8, 0), (32, 0), (128, 0), (32, 128)]


def test_where_one_size_is_there_by_now_that_is_timed() -> None:
    device = Device()
    geometry = dataclasses.replace(GEOMETRY, buckets=BucketTable((128,), (8,)))
    forward_s, pair_s = measure_steps(geometry, device.step_s)
    assert pair_s == pytest.approx(1e-6)
    assert [size for size, _ in forward_s] == [128]
    assert forward_s[0][1] == pytest.approx(0.128)
    assert device.ran == [(128, 0), (128, 128)]


@pytest.mark.parametrize(("num_processes", "num_runs"), [(1, 1), (2, 3)])
def test_processes_that_wait_for_each_other_run_a_long_step_as_often(
    monkeypatch: pytest.MonkeyPatch, num_processes: int, num_runs: int
) -> None:
    times_s = iter(range(100))  # a second goes by from one look at the clock to the next
    monkeypatch.setattr("jpaged.device.step_costs.time.perf_counter", lambda: next(times_s))
    monkeypatch.setattr("jpaged.device.step_costs.jax.process_count", lambda: num_processes)
    ran: list[None] = []
    assert _measure_seconds(lambda: ran.append(None)) == 1
    assert len(ran) == num_runs


@pytest.mark.parametrize("pair_s", [-1e-6, 1.0])
def test_what_attention_takes_is_never_below_nothing_nor_more_than_half_of_a_step(pair_s: float) -> None:
    noisy = Device(pair_s)
    forward_s, found = measure_steps(GEOMETRY, noisy.step_s)
    assert found >= 0
    for size, seconds in forward_s:
        inputs = null_prefill(GEOMETRY, size)
        timed = 1e-3 * size + pair_s * inputs.num_pairs
        assert found * inputs.num_pairs <= timed / 2 * 1.001
        assert seconds == pytest.approx(timed - found * inputs.num_pairs)


@pytest.mark.parametrize(("num_padded", "start"), [(8, 0), (128, 0), (32, 128), (128, 240)])
def test_a_null_step_is_one_that_an_executor_can_run(num_padded: int, start: int) -> None:
    inputs = null_prefill(GEOMETRY, num_padded, start)
    assert inputs.num_tokens == min(num_padded, GEOMETRY.max_num_seqs * (256 - start))
    query_lens = np.diff(inputs.query_starts_s1)
    assert query_lens.sum() == inputs.num_tokens and (query_lens[: inputs.num_rows] > 0).all()
    assert inputs.kv_lens_s.max() <= GEOMETRY.max_model_len
    for row in range(inputs.num_rows):
        begin, end = inputs.query_starts_s1[row : row + 2]
        np.testing.assert_array_equal(inputs.positions_t[begin:end], np.arange(start, inputs.kv_lens_s[row]))
    pairs = sum(position + 1 for position in inputs.positions_t[: inputs.num_tokens].tolist())
    assert inputs.num_pairs == pairs


def test_the_shortest_model_can_be_timed() -> None:
    geometry: Geometry = dataclasses.replace(GEOMETRY, max_model_len=2)
    forward_s, pair_s = measure_steps(geometry, Device().step_s)
    assert pair_s >= 0
    assert all(seconds > 0 for _, seconds in forward_s)


class FreePadding(Device):
    """Takes a millisecond and more for each token in use, whatever the size of its program."""

    def step_s(self, inputs: StepInputs) -> float:
        self.ran.append((len(inputs.token_ids_t), inputs.num_tokens))
        return 1e-3 * (1 + inputs.num_tokens) + self.pair_s * inputs.num_pairs


def test_if_padding_is_free_the_largest_program_is_timed_with_few_tokens() -> None:
    device = FreePadding()
    geometry = dataclasses.replace(GEOMETRY, buckets=BucketTable((8, 128), (8,)))
    forward_s, pair_s = measure_used_tokens(geometry, device.step_s)
    assert device.ran == [(128, 8), (128, 32), (128, 32)]  # the second step was long enough
    assert pair_s == pytest.approx(1e-6)
    assert [size for size, _ in forward_s] == [8, 32, 128]
    np.testing.assert_allclose([seconds for _, seconds in forward_s], [0.009, 0.033, 0.129])


def test_a_device_that_is_quick_is_timed_up_to_the_largest_step() -> None:
    device = FreePadding(pair_s=0.0)
    geometry = dataclasses.replace(GEOMETRY, buckets=BucketTable((16,), (8,)))
    forward_s, pair_s = measure_used_tokens(geometry, device.step_s)
    assert [num_tokens for _, num_tokens in device.ran] == [8, 16, 16]
    assert pair_s == 0
    assert [size for size, _ in forward_s] == [8, 16]
    np.testing.assert_allclose([seconds for _, seconds in forward_s], [0.009, 0.017])
