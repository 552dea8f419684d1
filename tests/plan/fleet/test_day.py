"""The conversations of a day."""

import dataclasses

import numpy as np
import pytest

from jpaged.errors import InvalidArgument
from jpaged.plan.fleet.day import NUM_FIRST_IDS, QUARTERS, Attempt, Day, TurnLengths, draw_sessions, get_prompt

LONG = Day(seconds=86_400.0, rate_per_s=1.0, max_model_len=8192, num_tenants=50, mean_turns=2.0)


@pytest.fixture(scope="module")
def sessions():
    return draw_sessions(LONG, 0)


@pytest.mark.long
def test_the_mean_rate_is_the_one_asked_for(sessions):
    assert sum(len(one.said) for one in sessions) == pytest.approx(86_400, rel=0.05)
    begins = [one.begin_s for one in sessions]
    assert begins == sorted(begins)
    assert [one.number for one in sessions] == list(range(len(sessions)))


def test_the_afternoon_is_busier_than_the_night(sessions):
    hours = np.bincount([int(one.begin_s // 3600) for one in sessions], minlength=24)
    assert hours[14:17].mean() / hours[2:5].mean() == pytest.approx(1.6 / 0.4, rel=0.3)


def test_the_first_tenants_have_most(sessions):
    counts = np.bincount([one.tenant for one in sessions], minlength=50) / len(sessions)
    shares = 1 / np.arange(1, 51)
    assert counts[:3] == pytest.approx(shares[:3] / shares.sum(), rel=0.2)
    assert len({one.system_tokens for one in sessions if one.tenant == 3}) == 1


@pytest.mark.long
def test_a_smaller_shape_is_burstier():
    def variation(shape):
        day = dataclasses.replace(LONG, burst_shape=shape, num_tenants=1, swing=0.0)
        counts = np.bincount([int(one.begin_s // 900) for one in draw_sessions(day, 1)], minlength=QUARTERS)
        return counts.std() / counts.mean()

    assert variation(1.0) == pytest.approx(1.0, rel=0.35)
    assert variation(1e6) < 0.1


def test_no_conversation_is_too_long_and_answers_have_the_means_asked_for():
    day = dataclasses.replace(
        LONG, max_model_len=500, system=TurnLengths(400.0, 1.0), answered=TurnLengths(100.0, 0.5), mean_turns=8.0
    )
    for one in draw_sessions(day, 0):
        assert one.prompt_tokens(len(one.said) - 1) + one.answered[-1] <= 500
        assert min(*one.said, *one.answered) >= 1
        assert len(one.said) == len(one.answered) == len(one.thinking_s) + 1
    assert LONG.answered.draw(200_000, np.random.default_rng(0)).mean() == pytest.approx(LONG.answered.mean, rel=0.02)


def test_a_day_too_large_for_memory_is_refused():
    with pytest.raises(InvalidArgument, match=r"rate: 4.32e\+07 conversations in a day are above the limit of 5000000"):
        draw_sessions(dataclasses.replace(LONG, rate_per_s=1000.0), 0)
    with pytest.raises(InvalidArgument, match=r"rate: 8.64e\+07 requests in a day are above the limit of 15000000"):
        draw_sessions(dataclasses.replace(LONG, rate_per_s=1000.0, mean_turns=100.0), 0)


def test_a_turn_brings_all_that_was_said_before(sessions):
    one = next(one for one in sessions if len(one.said) >= 3)
    prompts = [get_prompt(Attempt(0, one, turn, 0.0)) for turn in range(3)]
    for turn, prompt in enumerate(prompts):
        assert len(prompt) == one.prompt_tokens(turn) == Attempt(0, one, turn, 0.0).prompt_tokens
        assert 0 <= min(prompt) <= max(prompt) < NUM_FIRST_IDS
    for turn in (0, 1):
        before = (*prompts[turn], *[0] * one.answered[turn])
        assert prompts[turn + 1][: len(before)] == before
    resumed = Attempt(0, one, 1, 0.0, num_generated=1)
    assert get_prompt(resumed) == (*prompts[1], 0)
    assert resumed.num_tokens_left == one.answered[1] - 1


def test_tenants_share_their_system_prompt_and_nothing_else(sessions):
    first, second = [one for one in sessions if one.tenant == 0][:2]
    other = next(one for one in sessions if one.tenant == 1)
    ids = [get_prompt(Attempt(0, one, 0, 0.0)) for one in (first, second, other)]
    count = first.system_tokens
    assert ids[0][:count] == ids[1][:count]
    assert ids[0][count] != ids[1][count]
    assert ids[0][:8] != ids[2][:8]


def test_answers_of_other_servers_are_a_text_of_their_own(sessions):
    one = next(one for one in sessions if len(one.said) >= 2)
    prompt = get_prompt(Attempt(0, one, 1, 0.0, replays=False))
    begin = one.prompt_tokens(0)
    assert len(set(prompt[begin : begin + one.answered[0]])) > 1 or one.answered[0] == 1
    assert prompt[:begin] == get_prompt(Attempt(0, one, 0, 0.0))
