"""The least time of a workload, against sums made by hand."""

import pytest

from benchmarks.peers.limits import Rates, least_s, num_shared_tokens
from benchmarks.peers.workloads import Job, make
from tests.peers.shapes import TINY

WEIGHTS = TINY.num_parameters_read
OUTPUT = TINY.num_output_parameters
KEY_BYTES = 2 * 1 * 1 * 64 * 4
"""Keys and values of a token: one layer, one head of 64, float32."""


def test_one_stream_reads_the_weights_for_each_token():
    rates = Rates(read_bytes_s=1000.0, flops=1e18)
    num_keys = 4 * 3 + (1 + 2 + 3)  # three steps over a prompt of four, and over what came since
    expected = 4 * 4 * WEIGHTS / 1000 + num_keys * KEY_BYTES / 1000
    assert least_s(TINY, [Job([7, 8, 9, 10], 4)], rates) == pytest.approx(expected)


def test_many_rows_are_multiplied():
    rates = Rates(read_bytes_s=1e18, flops=1000.0)
    jobs = [Job([index, 8], 3) for index in range(5)]
    attention = 4 * 1 * 2 * 64 * (5 * 2**2 / 2)
    prompts = 2 * (WEIGHTS - OUTPUT) * 10 + 2 * OUTPUT * 5 + attention
    assert least_s(TINY, jobs, rates) == pytest.approx((prompts + 2 * 5 * 2 * WEIGHTS) / 1000)


def test_a_step_lasts_while_any_sequence_has_tokens_to_come():
    rates = Rates(read_bytes_s=1000.0, flops=1e18)
    alone = least_s(TINY, [Job([1], 9)], rates)
    beside = least_s(TINY, [Job([1], 9), Job([2], 3)], rates)
    assert beside - alone == pytest.approx((2 * 1 + 1 + 2) * KEY_BYTES / 1000)  # only keys: the weights are read anyhow


@pytest.mark.parametrize(("workload", "expected"), [("W1", 0), ("W2", 341), ("W5", 0)])
def test_what_all_prompts_begin_with_is_counted_once(workload, expected):
    assert num_shared_tokens(make("S", workload)) == expected


def test_equal_prompts_are_shared_to_their_end():
    assert num_shared_tokens([Job([1, 2], 1), Job([1, 2, 3], 1)]) == 2
