"""When a plan puts prefill and decode apart: numbers that can be worked out by hand, and what has to hold of any."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.hardware import Hardware
from jpaged.plan.cost import ASSUMED, ModelShape, Roofline, StepLoad
from jpaged.plan.estimate import (
    MIN_GAIN,
    ConcurrencyLimits,
    PlanGoals,
    RoleComparison,
    SequenceLengths,
    Way,
    compare,
    lines,
)
from jpaged.plan.step_times import PlannedStepTimes, PlanTarget

GB, TERA, MS = 1e9, 1e12, 1e-3
CHIP = Hardware("x", 16 * GB, 16 << 30, 1000 * GB, 200 * TERA, 32 * GB, 100 * GB)
TARGET = PlanTarget("x:1", "x", "tpu", 1, 1, CHIP, (1,))
SHAPE = ModelShape(num_params=10**9, num_layers=10, query_width=1000, weight_bytes=7 * 10**9, kv_bytes_per_token=1e5)
TIMES = PlannedStepTimes(Roofline(SHAPE, CHIP, 1), TARGET, 1000, 2)
POOL = ConcurrencyLimits(num_blocks=20_000, block_size=16, max_num_seqs=64, max_num_batched_tokens=8192)
LOOSE = PlanGoals(10.0, 10.0, 12.5 * GB)
LONG = SequenceLengths(4000, 200)


def found(
    lengths: SequenceLengths = LONG, goals: PlanGoals = LOOSE, num_copies: int = 2, pool: ConcurrencyLimits = POOL
) -> RoleComparison:
    one = compare(lengths, pool, TIMES, num_copies, goals)
    assert one is not None
    return one


def test_rows_that_decode_apart_take_steps_without_prompts() -> None:
    """64 rows of 4100 tokens of context; what each copy carries is its rows over the time of their outputs."""
    apart = found(num_copies=8).apart
    step_s = TIMES.step_s(StepLoad.decoding(apart.num_rows, 4100))
    assert apart.requests_per_s == pytest.approx(apart.num_decode * apart.num_rows / (200 * step_s))
    assert apart.itl_p99_s == pytest.approx(step_s)
    assert apart.itl_s == pytest.approx(step_s + apart.transfer_s / 199)


def test_a_prompt_goes_out_over_the_network_and_in() -> None:
    """4000 tokens of 100 kB: twice over 25.6 GB/s of a host's link, once over 12.5 of the network."""
    assert found().apart.transfer_s == pytest.approx(0.4 / 25.6 * 2 + 0.4 / 12.5)
    assert found().transfer_bytes == 4000 * 1e5
    in_parts = compare(LONG, POOL, dataclasses.replace(TIMES, num_context_parts=2), 2, LOOSE)
    assert in_parts is not None
    assert in_parts.apart.transfer_s == pytest.approx(0.4 / 51.2 * 2 + 0.4 / 12.5), "over the links of both devices"


def test_mixed_steps_share_their_time_between_prompts_and_rows() -> None:
    mixed = found().mixed
    share = mixed.num_rows * 4000 / (200 * mixed.chunk_tokens)
    assert 0 < share <= 1
    decode_s = TIMES.step_s(StepLoad.decoding(mixed.num_rows, 4100))
    assert decode_s < mixed.itl_s < mixed.itl_p99_s
    assert mixed.requests_per_s == pytest.approx(2 * mixed.num_rows / (200 * mixed.itl_s))
    assert mixed.itl_s == pytest.approx(decode_s + share * (mixed.itl_p99_s - decode_s))


def test_where_first_tokens_must_come_soon_and_others_steadily_they_are_put_apart() -> None:
    """A prompt takes 0.09 s alone: in small chunks it comes too late, and in large ones rows wait for it."""
    one = found(goals=PlanGoals(0.1, 0.03, 12.5 * GB), num_copies=8)
    assert one.chooses_apart
    assert one.apart.num_prefill + one.apart.num_decode == 8
    text = lines(one, LOOSE)
    assert text[-1].startswith(
        f"  choose: --role prefill on {one.apart.num_prefill} and --role decode on {one.apart.num_decode} of 8"
    )


def test_where_outputs_are_long_and_nobody_waits_both_stay_together() -> None:
    one = found(SequenceLengths(100, 2000))
    assert not one.chooses_apart
    assert "  choose: --role both; apart carries 0." in lines(one, LOOSE)[-1]


def test_a_slow_network_shows_in_the_goal_where_outputs_are_short() -> None:
    """One token in 49 waits for the transfer: more than 1 in 100."""
    short = SequenceLengths(4000, 50)
    fast, slow = (found(short, dataclasses.replace(LOOSE, network_bytes_per_s=rate)) for rate in (100 * GB, GB))
    assert slow.apart.itl_p99_s - fast.apart.itl_p99_s == pytest.approx(slow.apart.transfer_s - fast.apart.transfer_s)
    tight = PlanGoals(10.0, 0.1, GB)
    assert found(short, tight).apart.requests_per_s == 0.0
    assert found(short, tight).mixed.requests_per_s > 0.0


def test_goals_that_cannot_be_kept_are_said() -> None:
    one = found(goals=PlanGoals(1e-6, 1e-6, GB))
    assert one.mixed.requests_per_s == one.apart.requests_per_s == 0.0
    assert lines(one, LOOSE)[-1] == "  choose: neither meets the goals"
    assert "does not meet the goals: one row has time to first token " in lines(one, LOOSE)[1]


def test_one_token_or_no_room_is_not_compared() -> None:
    assert compare(SequenceLengths(100, 1), POOL, TIMES, 2, LOOSE) is None
    assert compare(LONG, dataclasses.replace(POOL, num_blocks=10), TIMES, 2, LOOSE) is None


def test_a_ratio_is_tried_for_each_number_of_copies_up_to_a_bound() -> None:
    assert found(num_copies=1).num_copies == 2
    assert found(num_copies=1000).num_copies == 64


@pytest.mark.long
@given(
    input_len=st.integers(1, 8000),
    output_len=st.integers(2, 2000),
    itl_ms=st.floats(5, 500),
    ttft_ms=st.floats(20, 5000),
    num_copies=st.integers(2, 6),
)
def test_whatever_is_chosen_keeps_the_goals(
    input_len: int, output_len: int, itl_ms: float, ttft_ms: float, num_copies: int
) -> None:
    goals = PlanGoals(ttft_ms * MS, itl_ms * MS, 12.5 * GB)
    one = compare(SequenceLengths(input_len, output_len), POOL, TIMES, num_copies, goals)
    assert one is not None
    for way in (one.mixed, one.apart):
        _holds(way, one, goals)
    assert one.chooses_apart == (one.apart.requests_per_s > MIN_GAIN * one.mixed.requests_per_s)
    json.dumps(dataclasses.asdict(one.lengths))


def _holds(way: Way, one: RoleComparison, goals: PlanGoals) -> None:
    if not way.requests_per_s:
        return
    assert way.num_prefill + way.num_decode == one.num_copies
    assert way.ttft_s <= goals.ttft_s
    assert way.itl_p99_s <= goals.itl_s
    assert 1 <= way.num_rows <= POOL.max_num_seqs
    assert way.chunk_tokens <= POOL.max_num_batched_tokens
    # No more prompts than there is time for, whoever computes them.
    prompts_s = (
        way.requests_per_s
        * one.lengths.input_len
        / way.chunk_tokens
        * TIMES.step_s(StepLoad.prompts(way.chunk_tokens, one.lengths.input_len))
    )
    assert prompts_s <= (way.num_prefill or way.num_decode) * (1 + 1e-9)


def test_transports_have_the_length_from_which_they_beat_computing() -> None:
    """Data ports take the network alone: 100 kB a token over 12.5 GB/s; gRPC is bound by a core."""
    grpc, jax = found().transports
    assert (grpc.name, jax.name, jax.bytes_per_s) == ("grpc", "jax", pytest.approx(12.5 * GB))
    assert [count for count, _, _ in jax.prefixes] == [2048, 8192, 32768]
    assert jax.prefixes[1][1] == pytest.approx(ASSUMED.offer_s + 8192 * 1e5 / (12.5 * GB))
    assert grpc.prefixes[1][1] > 8192 * 1e5 / ASSUMED.grpc_bytes_per_s
    assert jax.break_even_tokens is not None
    assert grpc.break_even_tokens is None or grpc.break_even_tokens >= jax.break_even_tokens
    slow = found(goals=PlanGoals(10.0, 10.0, 1e3)).transports[1]
    assert slow.break_even_tokens is None
    (line,) = [line for line in lines(found(), LOOSE) if line.startswith("  jax: ")]
    assert f"faster than computing from {jax.break_even_tokens} tokens" in line
