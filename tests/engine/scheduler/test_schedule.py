"""What a schedule looks like when it is packed."""

from typing import Any

import numpy as np
import pytest

from jpaged.config import SchedulerOptions
from jpaged.engine.executor import BEYOND_TOKENS, Detail, SamplingInputs
from jpaged.engine.kv_cache.paged import PagedKVCacheManager
from jpaged.engine.scheduler.output import build_sampling_inputs, build_step_inputs
from jpaged.engine.scheduler.scheduler import Scheduler, SchedulingPolicy
from jpaged.engine.sequence import SequenceGroup
from jpaged.testing import FakeExecutor
from jpaged.types import Request, SamplingParams


def packed(*arguments, **options):
    return [inputs for inputs, _ in both(*arguments, **options)]


def sampled(*arguments, **options):
    return [sampling for _, sampling in both(*arguments, **options)]


def scheduler_of(max_num_batched_tokens=16, **options):
    executor = FakeExecutor(block_size=4, num_blocks=32, max_num_seqs=4, max_model_len=32)
    geometry = executor.geometry
    memory = PagedKVCacheManager(geometry)
    scheduler = Scheduler(
        memory,
        SchedulingPolicy(),
        SchedulerOptions(max_num_batched_tokens=max_num_batched_tokens, preemption_mode="recompute", **options),
        geometry,
        executor.rates,
    )
    return scheduler, memory, geometry


def both(prompts, *, max_num_batched_tokens=16, sampling=None, eos=frozenset(), steps=1, **options):
    scheduler, _, geometry = scheduler_of(max_num_batched_tokens, **options)
    for i, prompt in enumerate(prompts):
        request = Request(str(i), tuple(prompt), sampling or SamplingParams(temperature=0.0))
        scheduler.queues.add(SequenceGroup(request, i, 0.0, lambda event: None, geometry.max_blocks_per_seq))
    for _ in range(steps):
        schedule = scheduler.schedule()
        yield (
            build_step_inputs(schedule, geometry),
            build_sampling_inputs(schedule, geometry, eos, scheduler.rows.logits_processors),
        )


def test_rows_are_packed_in_order_and_padded_with_the_null_block():
    (inputs,) = packed([[10, 11, 12, 13, 14], [20]])
    assert inputs.token_ids_t.tolist() == [10, 11, 12, 13, 14, 20, 0, 0]
    assert inputs.positions_t.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert inputs.slots_gt.tolist() == [[4, 5, 6, 7, 8, 12, 0, 0]]
    assert inputs.query_starts_s1.tolist() == [0, 5, 6, 6, 6]
    assert inputs.kv_lens_s.tolist() == [5, 1, 0, 0]
    assert inputs.sample_tokens_s.tolist()[:2] == [4, 5]
    assert inputs.block_tables_gsm[0, :3, :3].tolist() == [[1, 2, 0], [3, 0, 0], [0, 0, 0]]
    assert (inputs.num_rows, inputs.num_tokens) == (2, 6)


def test_a_long_prompt_goes_in_chunks_and_leaves_room_for_decoding_rows():
    first, second, third = packed([[7], list(range(20))], max_num_batched_tokens=8, steps=3)
    assert first.query_starts_s1.tolist() == [0, 1, 8, 8, 8]
    assert second.token_ids_t.tolist() == [0, 7, 8, 9, 10, 11, 12, 13]
    assert second.is_prev_sampled_t.tolist() == [True] + [False] * 7
    assert third.kv_lens_s.tolist() == [3, 20, 0, 0]


def test_a_long_prompt_leaves_tokens_to_short_ones():
    prompts = [list(range(20)), [30, 31, 32]]
    first, second = packed(prompts, max_num_batched_tokens=16, long_prefill_token_threshold=6, steps=2)
    assert first.token_ids_t.tolist()[:9] == [0, 1, 2, 3, 4, 5, 30, 31, 32]
    assert second.query_starts_s1.tolist()[-1] == 7  # six of the prompt, and the decoding row
    (whole,) = packed(prompts, max_num_batched_tokens=16)
    assert whole.num_rows == 1


def test_rows_that_sample_together_exceed_the_limit_of_a_prompt():
    sampling = SamplingParams(temperature=0.0, beam_width=3, max_tokens=3)
    scheduler, _, geometry = scheduler_of(long_prefill_token_threshold=1)
    group = SequenceGroup(Request("a", (1,), sampling), 0, 0.0, lambda event: None, geometry.max_blocks_per_seq)
    assert [scheduler._limited(budget, group) for budget in (2, 16)] == [2, 3]


def test_a_token_in_flight_is_named_by_its_row():
    _, second = packed([[1, 2], [3], [4]], steps=2)
    assert second.is_prev_sampled_t.tolist() == [True] * 3 + [False] * 5
    assert second.prev_sampled_rows_t.tolist()[:3] == [0, 1, 2]
    assert second.positions_t.tolist()[:3] == [2, 1, 1]


@pytest.mark.parametrize(("sampling", "is_admitted"), [({}, True), ({"repetition_penalty": 1.5}, False)])
def test_a_preempted_request_waits_for_tokens_that_its_penalties_count(sampling, is_admitted):
    scheduler, memory, geometry = scheduler_of()
    group = SequenceGroup(
        Request("a", (1, 2), SamplingParams(**sampling)), 0, 0.0, lambda event: None, geometry.max_blocks_per_seq
    )
    scheduler.queues.add(group)
    scheduler.schedule()
    (sequence,) = group.live
    assert sequence.num_in_flight_tokens == 1
    scheduler.queues.stop_running(group)
    scheduler.rows.remove(sequence)
    memory.release(sequence)
    group.reset_for_recompute()
    scheduler.queues.put_back(group)
    assert (scheduler.schedule().num_rows == 1) == is_admitted
    sequence.append(7, -0.5)
    if not is_admitted:
        assert scheduler.schedule().num_rows == 1


def test_rope_lengths_are_the_prompts_until_the_sequence_is_longer():
    first, second = packed([[1, 2, 3]], steps=2)
    assert first.rope_lens_t.tolist()[:3] == [3, 3, 3]
    assert second.rope_lens_t.tolist()[:1] == [4]


def test_every_sampling_field_reaches_its_row():
    sampling = SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        seed=2**40 + 5,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=(3,),
        logprobs=2,
    )
    (inputs,) = sampled([[1, 2, 3]], sampling=sampling, eos=frozenset({9}))
    rows, neutral = inputs.rows_r, SamplingInputs.neutral(len(inputs.rows_r)).rows_r
    row = rows[0]
    assert (row["temperature_r"], row["top_k_r"], row["top_p_r"], row["min_p_r"]) == (0.5, 7, 0.25, 0.125)
    assert row["seeds_r2"].tolist() == [2**8, 5]
    assert row["positions_r"] == 3
    assert row["banned_token_ids_rx"][:3].tolist() == [3, 9, BEYOND_TOKENS]
    assert inputs.detail == Detail.TOP_LOGPROBS
    assert rows["is_padding_r"].tolist() == [0] + [1] * (len(rows) - 1)
    neutral["is_padding_r"] = 1
    assert np.array_equal(rows[1:], neutral[1:])


@pytest.mark.parametrize(
    ("params", "detail"),
    [
        ({}, Detail.TOKENS),
        ({"n": 2, "temperature": 1.0}, Detail.TOKENS),
        ({"logprobs": 0}, Detail.LOGPROBS),
        ({"n": 1, "best_of": 2}, Detail.LOGPROBS),
        ({"n": 1, "best_of": 2, "logprobs": 1}, Detail.TOP_LOGPROBS),
        ({"beam_width": 2}, Detail.TOP_LOGPROBS),
    ],
)
def test_a_step_tells_what_its_requests_need(params: dict[str, Any], detail: Detail):
    (inputs,) = sampled([[1, 2, 3]], sampling=SamplingParams(**params))
    assert inputs.detail == detail


def test_a_chunk_that_samples_nothing_is_greedy_and_forbids_nothing():
    sampling = SamplingParams(temperature=1.0, seed=1, min_tokens=1, stop_token_ids=(3,))
    (inputs,) = sampled([list(range(20))], max_num_batched_tokens=8, sampling=sampling)
    rows, neutral = inputs.rows_r, SamplingInputs.neutral(len(inputs.rows_r)).rows_r
    neutral["is_padding_r"][1:] = 1
    assert np.array_equal(rows, neutral)
