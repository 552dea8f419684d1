"""One prompt, many sequences: blocks are shared until somebody writes, and go back as soon as somebody ends."""

import pytest

from jpaged.engine.output import processor
from jpaged.testing import FakeExecutor, expected_tokens
from jpaged.types import FinishReason
from tests.engine.harness import Harness

N_OF_SAMPLES = {"temperature": 1.0, "seed": 5}


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request):
    return request.param


def make(overlap, **pool):
    pool = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64} | pool
    return Harness(executor=FakeExecutor(**pool), overlap=overlap)


def samples(prompt, n, max_tokens):
    return [expected_tokens(prompt, max_tokens, seed=5, sequence_index=i) for i in range(n)]


def test_each_sequence_samples_its_own_from_one_prompt(overlap):
    h = make(overlap)
    h.submit("a", list(range(10)), max_tokens=9, n=4, **N_OF_SAMPLES)
    h.run()
    assert [h.tokens("a", i) for i in range(4)] == samples(list(range(10)), 4, 9)
    assert h.last("a").usage.completion_tokens == 36


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_first_write_copies_once_for_every_writer_but_the_last(overlap, n):
    h = make(overlap)
    h.submit("a", list(range(10)), max_tokens=2, n=n, **N_OF_SAMPLES)
    h.run()
    assert h.engine.load().num_copies_on_write == n - 1


def test_a_prompt_of_whole_blocks_is_never_copied(overlap):
    h = make(overlap)
    h.submit("a", list(range(8)), max_tokens=4, n=4, **N_OF_SAMPLES)
    h.run()
    assert h.engine.load().num_copies_on_write == 0


def test_eight_samples_of_a_long_prompt_hold_the_prompt_once(overlap):
    h = make(overlap, block_size=16, num_blocks=200, max_model_len=1100, max_num_batched_tokens=256)
    prompt = [i % 251 for i in range(1000)]
    h.submit("a", prompt, max_tokens=25, n=8, **N_OF_SAMPLES)
    h.run()
    # 62 full blocks of the prompt; its last 8 tokens and 24 of the outputs (the 25th is never written) are two more
    # blocks for each: 62 + 8 * 2. Without sharing it would be 8 * 64 = 512.
    assert h.engine.load().peak_blocks_used == 62 + 8 * 2
    assert [h.tokens("a", i) for i in range(8)] == samples(prompt, 8, 25)


def test_a_sample_that_ends_gives_its_own_blocks_back_at_once():
    h = make(overlap=False)
    prompt = list(range(8))
    first, second = samples(prompt, 2, 12)
    stop = second[5]
    assert stop not in first
    h.submit("a", prompt, max_tokens=12, n=2, stop_token_ids=(stop,), **N_OF_SAMPLES)
    used = {}
    while h.step():
        used[len(h.tokens("a", 0))] = h.engine.load().num_blocks_used
    # Two blocks of prompt, and one of four outputs for each; with five outputs two for each, but the second has ended.
    assert (used[5], used[6]) == (2 + 1 + 1, 2 + 2)
    assert h.tokens("a", 1)[-1] == stop and h.last("a").index == 0


def test_stored_tokens_count_a_shared_block_once():
    h = make(overlap=False)
    h.submit("a", list(range(10)), max_tokens=3, n=4, **N_OF_SAMPLES)
    h.step()
    # Ten tokens of prompt in three blocks of four, whoever holds them.
    assert h.engine.load().slot_use == 10 / 12


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_aborting_a_group_tells_every_sequence_and_ends_it_once(overlap, num_steps):
    h = make(overlap)
    h.submit("a", list(range(10)), max_tokens=30, n=3, **N_OF_SAMPLES)
    for _ in range(num_steps):
        h.step()
    assert h.engine.abort("a")
    h.run()
    ends = [event for event in h.events["a"] if event.finish is not None]
    assert sorted(event.index for event in ends) == [0, 1, 2]
    assert {event.finish.reason for event in ends} == {FinishReason.ABORT}
    assert h.last("a") is ends[-1]
    assert h.engine.load().num_blocks_used == 0


def test_best_of_returns_the_likeliest_and_nothing_before_the_end(overlap):
    h = make(overlap)
    h.submit("a", [1, 2, 3], max_tokens=6, n=2, best_of=5, **N_OF_SAMPLES)
    while h.step():
        assert not h.events["a"] or h.events["a"][-1].is_last
    assert [event.index for event in h.events["a"]] == [0, 1]
    assert all(h.tokens("a", i) in samples([1, 2, 3], 5, 6) for i in range(2))
    assert h.last("a").usage.completion_tokens == 30


@pytest.mark.parametrize("shape", [{"best_of": 5, **N_OF_SAMPLES}, {"beam_width": 3}], ids=["best of", "beams"])
def test_what_is_sent_at_the_end_comes_in_parts_of_a_bounded_size(monkeypatch, shape):
    def run():
        h = make(overlap=True)
        h.submit("a", [1, 2, 3], max_tokens=10, n=2, logprobs=2, **shape)
        h.run()
        return h.events["a"]

    whole = run()
    monkeypatch.setattr(processor, "_MAX_TOKENS_PER_EVENT", 4)
    parts = run()
    assert [(event.index, len(event.token_ids)) for event in whole] == [(0, 10), (1, 10)]
    assert [(event.index, len(event.token_ids)) for event in parts] == [
        (i, count) for i in (0, 1) for count in (4, 4, 2)
    ]
    for index, one in enumerate(whole):
        its = [event for event in parts if event.index == index]
        assert [event.finish for event in its] == [None, None, one.finish]
        assert [event.is_last for event in its] == [False, False, one.is_last]
        assert "".join(event.text for event in its) == one.text
        assert tuple(i for event in its for i in event.token_ids) == one.token_ids
        assert tuple(position for event in its for position in event.logprobs) == one.logprobs
        assert (its[-1].cumulative_logprob, its[-1].usage) == (one.cumulative_logprob, one.usage)


def test_a_preempted_group_comes_back_with_its_prompt_shared(overlap):
    h = make(overlap, num_blocks=16)
    for name in ("a", "b"):
        h.submit(name, list(range(9)), max_tokens=16, n=2, use_prefix_cache=False, **N_OF_SAMPLES)
    h.run()
    assert h.engine.load().num_preemptions > 0
    for name in ("a", "b"):
        assert [h.tokens(name, i) for i in range(2)] == samples(list(range(9)), 2, 16)
