"""How many tokens are proposed: by acceptance, by load, and not at all where it does not pay."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from jpaged.engine.executor import BucketTable, DeviceRates
from jpaged.engine.speculative.controller import (
    LEAST_OFF_STEPS,
    MOST_OFF_STEPS,
    PROBE_STEPS,
    PROBE_TOKENS,
    TRUSTED_STEPS,
    AdaptationState,
    AdaptiveSpeculation,
    StepCosts,
)

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


def bound_by_memory(num_tokens: int, num_rows: int) -> float:
    """Reading the weights takes as long as computing 500 tokens."""
    return 0.010 + 2e-5 * num_tokens


def bound_by_compute(num_tokens: int, num_rows: int) -> float:
    return 2e-4 * num_tokens


@dataclass
class Run:
    """Rows that decode under an adaptation, and whose proposals are accepted at random."""

    adaptation: AdaptiveSpeculation
    step_s: Callable[[int, int], float] = bound_by_memory
    slower: float = 1.0  # what steps with proposals take, of what they were timed at
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    chosen: list[list[int]] = field(default_factory=list)
    states: list[AdaptationState] = field(default_factory=list)
    num_asked: int = 0

    def steps(self, count: int, rows: int, acceptance: float | Sequence[float], available: int = 99, others: int = 0):
        """Runs so many steps and returns the proposals of a row, on average."""
        keys = list(range(rows))
        rates = [acceptance] * rows if isinstance(acceptance, int | float) else acceptance
        before = len(self.chosen)
        for _ in range(count):
            limit = self.adaptation.limit(rows, others)
            self.num_asked += limit > 0
            chosen = self.adaptation.choose(keys, [min(limit, available)] * rows, others) if limit else [0] * rows
            accepted = [self.accepted(number, rate) for number, rate in zip(chosen, rates, strict=True)]
            num_tokens = rows + others + sum(chosen)
            seconds = self.step_s(next(size for size in SIZES if size >= num_tokens), rows)
            self.adaptation.observe(keys, chosen, accepted, seconds * (self.slower if any(chosen) else 1), others)
            self.chosen.append(chosen)
            self.states.append(self.adaptation.state)
        return float(np.mean(self.chosen[before:]))

    def accepted(self, number: int, rate: float) -> int:
        return sum(1 for _ in itertools.takewhile(lambda _: self.rng.random() < rate, range(number)))

    @property
    def is_on(self) -> bool:
        return self.states[-1] is AdaptationState.ON

    @property
    def changes(self) -> list[AdaptationState]:
        return [state for state, _ in itertools.groupby(self.states)]

    @property
    def times_turned_on(self) -> int:
        return self.changes[1:].count(AdaptationState.ON)


def run(
    k: int = 8, step_s=bound_by_memory, disable_by_batch_size: int | None = None, slower: float = 1.0, **costs
) -> Run:
    costs = {"row_s": 3e-6, "token_s": 1e-6} | costs
    adaptation = AdaptiveSpeculation(k, StepCosts(step_s, SIZES, **costs), disable_by_batch_size)
    return Run(adaptation, step_s, slower)


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_more_is_proposed_the_more_is_accepted():
    numbers = []
    for acceptance in (0.3, 0.6, 0.9, 1.0):
        one = run()
        one.steps(200, 64, acceptance)
        numbers.append(one.steps(50, 64, acceptance))
        assert one.changes == [AdaptationState.ON]
    assert numbers == sorted(numbers)
    assert numbers[0] <= 2
    assert numbers[-1] == 7  # 64 rows and 448 proposals fill a step of 512


@pytest.mark.long
def test_less_is_proposed_the_more_rows_there_are():
    numbers = []
    for rows in (4, 64, 128, 400):
        one = run()
        one.steps(200, rows, 0.7)
        numbers.append(one.steps(50, rows, 0.7))
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] == 7  # 4 rows and 28 proposals fill a step of 32
    assert numbers[-1] < 2


def test_nothing_is_proposed_or_asked_where_rows_fill_the_device():
    one = run(step_s=bound_by_compute)
    assert one.steps(300, 64, 1.0) == 0
    assert (one.num_asked, one.changes) == (0, [AdaptationState.ON])
    assert one.steps(50, 1, 0.9) > 4  # a step of 8 is paid for anyhow


def test_rows_whose_proposals_are_accepted_get_more():
    one = run()
    rates = [0.95] * 32 + [0.1] * 32
    one.steps(300, 64, rates)
    good = np.mean([chosen[:32] for chosen in one.chosen[-20:]])
    bad = np.mean([chosen[32:] for chosen in one.chosen[-20:]])
    assert good > 3 * bad


def test_no_more_is_run_than_there_is_and_than_a_step_holds():
    one = run()
    one.steps(50, 8, 1.0, available=3)
    assert max(map(max, one.chosen)) == 3
    one = run()
    one.steps(100, 8, 1.0, others=1000)
    assert {sum(chosen) for chosen in one.chosen[-10:]} == {16}


def test_prompts_in_the_step_leave_the_device_less_room():
    alone, beside = run(step_s=lambda n, r: max(0.01, 2e-5 * n)), run(step_s=lambda n, r: max(0.01, 2e-5 * n))
    assert alone.steps(100, 8, 0.5) > beside.steps(100, 8, 0.5, others=504)


def test_a_run_of_a_draft_model_for_each_position_makes_drafts_shorter():
    cheap, dear = run(), run(round_s=0.003)
    cheap.steps(100, 8, 0.7)
    dear.steps(100, 8, 0.7)
    assert cheap.steps(20, 8, 0.7) > dear.steps(20, 8, 0.7) > 0


def test_batches_that_the_operator_excludes_are_left_alone():
    one = run(disable_by_batch_size=4)
    assert one.steps(20, 5, 1.0) == 0
    assert one.num_asked == 0
    assert one.steps(20, 4, 1.0) > 0


def test_the_longest_drafts_are_tried_where_no_step_is_smaller():
    adaptation = run(k=4).adaptation
    assert adaptation.limit(1) == 4  # 1 to 5 tokens are padded to 8
    assert adaptation.limit(2, 1014) == 4  # 8 draft tokens fill the largest step
    assert adaptation.limit(1, 1023) == 0


@pytest.mark.parametrize(("seconds", "num_drafts"), [(1.5, 0), (0.75, 8)])
def test_draft_steps_that_are_faster_than_timed_pay_at_a_lower_acceptance(seconds, num_drafts):
    adaptation = run(k=1, step_s=lambda num_tokens, num_rows: 1.0 if num_tokens <= 8 else 1.5).adaptation
    for _ in range(60):
        adaptation.observe(range(8), [1] * 8, [1, 1, 0, 0, 0, 0, 0, 0], seconds)
    assert sum(adaptation.choose(range(8), [1] * 8)) == num_drafts


@pytest.mark.parametrize(("seconds", "num_drafts"), [(1.0, 8), (0.5, 0), (2.0, 8)])
def test_plain_steps_that_are_faster_than_timed_leave_no_gain(seconds, num_drafts):
    adaptation = run(k=1, step_s=lambda num_tokens, num_rows: 1.0 if num_tokens <= 8 else 1.5).adaptation
    for _ in range(60):
        adaptation.observe(range(8), [0] * 8, [0] * 8, seconds)
    assert sum(adaptation.choose(range(8), [1] * 8)) == num_drafts


def test_it_decides_the_same_given_the_same():
    def history():
        one = run()
        one.steps(200, 16, 0.6)
        one.steps(400, 16, 0.0)
        one.steps(400, 24, 0.9)
        return one.chosen, one.states

    assert history() == history()


# --- whether at all ---------------------------------------------------------------------------------------------------


def test_it_turns_off_when_nothing_is_accepted_and_hardly_asks_any_more():
    one = run()
    one.steps(200, 16, 0.0)
    assert not one.is_on
    one.num_asked = 0
    one.steps(4000, 16, 0.0)
    assert AdaptationState.ON not in one.states[200:]
    assert one.num_asked <= 8 * (PROBE_STEPS + 1)


@pytest.mark.long
def test_times_off_are_doubled_to_a_bound():
    one = run()
    one.steps(10_000, 16, 0.0)
    lens = [len(list(group)) for state, group in itertools.groupby(one.states) if state is AdaptationState.OFF]
    assert lens[0] in (LEAST_OFF_STEPS, LEAST_OFF_STEPS + 1)
    assert all(later >= 1.9 * former for former, later in itertools.pairwise(lens[:6]))
    assert max(lens) <= MOST_OFF_STEPS + 1


def test_it_comes_back_when_proposals_are_accepted_again():
    one = run()
    one.steps(400, 16, 0.0)
    assert not one.is_on
    one.steps(600, 16, 0.9)
    assert one.is_on
    assert one.steps(50, 16, 0.9) > 3


def test_a_probe_decides_by_what_it_sees_and_not_by_what_was_before():
    one = run(step_s=lambda num_tokens, num_rows: 0.002 + 8e-5 * num_tokens)
    one.steps(300, 16, 0.9)
    one.steps(1200, 16, 0.0)  # several probes in vain
    while one.adaptation.state is not AdaptationState.OFF:
        one.steps(1, 16, 0.0)
    for state in (AdaptationState.OFF, AdaptationState.PROBING):
        while one.adaptation.state is state:
            one.steps(1, 16, 0.9)
    assert one.is_on
    assert one.adaptation.acceptance.of_method()[0] > 0.7


def test_a_probe_runs_few_tokens_a_row():
    one = run()
    one.steps(500, 16, 0.0)
    probes = [
        max(chosen) for chosen, state in zip(one.chosen, one.states, strict=True) if state is AdaptationState.PROBING
    ]
    assert probes
    assert max(probes) <= PROBE_TOKENS


def test_a_probe_fits_into_the_largest_step():
    adaptation = run().adaptation
    adaptation.state = AdaptationState.PROBING
    assert adaptation.choose(range(4), [8, 1, 8, 8], SIZES[-1] - 4 - 4) == [2, 1, 1, 0]
    assert adaptation.choose(range(4), [8, 1, 8, 8], SIZES[-1] - 4) == [0, 0, 0, 0]


@pytest.mark.long
def test_a_gain_between_the_marks_changes_nothing():
    """What neither pays much nor costs much does not make the state flap."""
    for acceptance in (0.1, 0.15, 0.2, 0.25):
        one = run()
        one.steps(2000, 16, acceptance)
        assert one.times_turned_on <= 2


def test_acceptance_that_comes_and_goes_turns_it_on_ever_less_often():
    one = run()
    for _ in range(30):
        one.steps(60, 16, 0.9)
        one.steps(60, 16, 0.0)
    assert 1 <= one.times_turned_on <= 8


def test_steps_that_take_longer_than_they_were_timed_at_turn_it_off():
    one = run(slower=3.0)
    one.steps(300, 64, 0.6)
    assert not one.is_on
    one.slower = 1.0
    one.steps(500, 64, 0.6)
    assert one.is_on
    fair = run()
    fair.steps(300, 64, 0.6)
    assert fair.is_on


def test_one_step_that_somebody_else_made_slow_changes_nothing():
    one = run()
    one.steps(100, 64, 0.8)
    one.slower = 1000.0
    one.steps(1, 64, 0.8)
    one.slower = 1.0
    one.steps(10, 64, 0.8)
    assert one.steps(10, 64, 0.8) > 2
    one.steps(80, 64, 0.8)
    assert one.changes == [AdaptationState.ON]


def test_without_a_clock_expected_times_count():
    one = run()
    one.step_s = lambda num_tokens, num_rows: 0.0
    assert one.steps(100, 8, 0.9) > 4
    one.steps(300, 8, 0.0)
    assert not one.is_on


def test_asking_in_vain_turns_it_off_where_it_costs():
    one = run(row_s=1e-5)
    one.steps(200, 64, 0.0, available=0)
    assert not one.is_on
    cheap = run(row_s=1e-6)
    cheap.steps(200, 64, 0.0, available=0)
    assert cheap.is_on


def test_what_did_not_pay_under_load_is_tried_when_the_load_is_gone():
    one = run()
    one.steps(500, 256, 0.25)
    assert not one.is_on
    one.steps(3 * PROBE_STEPS, 4, 0.25)
    assert one.is_on


def test_a_step_that_was_begun_before_it_was_turned_off_changes_nothing_more():
    one = run()
    while one.adaptation.state is AdaptationState.ON:
        one.steps(1, 16, 0.0)
    mean = one.adaptation.mean_gain
    one.adaptation.observe(list(range(16)), [8] * 16, [0] * 16, 1.0)
    one.adaptation.choose(list(range(16)), [8] * 16)
    assert (one.adaptation.state, one.adaptation.mean_gain) == (AdaptationState.OFF, mean)
    one.steps(LEAST_OFF_STEPS + 1, 16, 0.0)
    assert one.adaptation.state is AdaptationState.PROBING


PLAIN_S = 0.010 + 8 * 0.001
SHORT_S = 0.020 + 8 * 0.001 + 8 * 0.0005 + 8 * 0.001 + 0.009  # device, rows, asking, tokens, a round
LONG_S = 0.038 + 8 * 0.001 + 8 * 0.0005 + 12 * 0.001 + 2 * 0.009  # beside 4 prompt tokens


@pytest.mark.parametrize(
    ("proposed", "accepted", "seconds", "num_other_tokens", "gain"),
    [
        ([1] * 8, [1] * 8, SHORT_S, 0, 2 * PLAIN_S / SHORT_S),
        ([1] * 8, [1] * 8, 0.0, 0, 2 * PLAIN_S / SHORT_S),  # not measured
        ([1] * 8, [0] * 8, 0.5 * SHORT_S, 0, PLAIN_S / (0.5 * SHORT_S)),
        ([1] * 8, [1] * 8, 1e9, 0, 2 * PLAIN_S / (4 * SHORT_S)),  # another process had the processor
        ([1, 2] * 4, [1] * 8, 0.0, 4, 2 * (0.020 + 8 * 0.001) / LONG_S),
        ([0] * 8, [0] * 8, 0.01, 0, None),
    ],
)
def test_a_gain_is_tokens_times_the_time_of_a_plain_step(proposed, accepted, seconds, num_other_tokens, gain):
    seconds_of = {8: 0.01, 16: 0.02, 32: 0.038}
    one = run(
        k=2,
        step_s=lambda size, num_rows: seconds_of[size] + 0.001 * num_rows,
        row_s=0.0005,
        token_s=0.001,
        round_s=0.009,
    )
    before = one.adaptation.mean_gain
    one.adaptation.observe(range(8), proposed, accepted, seconds, num_other_tokens)
    after = before if gain is None else before + (gain - before) / 16
    assert one.adaptation.mean_gain == pytest.approx(after)


def test_plain_steps_beside_prompts_that_take_as_long_as_expected_change_no_gain():
    seconds_of = {8: 0.01, 16: 0.02}
    one = run(
        k=2,
        step_s=lambda size, num_rows: seconds_of[size] + 0.001 * num_rows,
        row_s=0.0005,
        token_s=0.001,
        round_s=0.009,
    )
    one.adaptation.observe(range(8), [0] * 8, [0] * 8, 0.020 + 8 * 0.001, 4)
    before = one.adaptation.mean_gain
    one.adaptation.observe(range(8), [1] * 8, [1] * 8, 0.0)
    assert one.adaptation.mean_gain == pytest.approx(before + (2 * PLAIN_S / SHORT_S - before) / 16)


def test_a_device_whose_steps_were_timed_at_nothing_gains_nothing():
    one = run(step_s=lambda num_tokens, num_rows: 0.0, row_s=0.0, token_s=0.0)
    before = one.adaptation.mean_gain
    for proposed in (1, 0):
        one.adaptation.observe(range(8), [proposed] * 8, [0] * 8, 1.0)
    assert one.adaptation.mean_gain == before


def test_an_empty_step_is_none():
    one = run(k=1, step_s=lambda num_tokens, num_rows: 1.0 if num_tokens <= 8 else 1.5)
    assert one.adaptation.limit(0) == 0
    assert one.adaptation.choose([], []) == []
    for _ in range(60):
        one.adaptation.observe([], [], [], 0.1)
    assert one.adaptation.state is AdaptationState.ON
    assert one.adaptation.choose(range(8), [1] * 8) == [1] * 8  # it was no plain step, which are as slow as before


def test_times_off_are_short_again_after_a_long_time_on():
    one = run()
    one.steps(300, 16, 0.0)  # off, and a probe in vain
    while not one.is_on:
        one.steps(10, 16, 0.95)
    one.steps(TRUSTED_STEPS, 1, 0.95)
    while one.is_on:
        one.steps(1, 16, 0.0)
    begin = len(one.states)
    while one.adaptation.state is AdaptationState.OFF:
        one.steps(1, 16, 0.0)
    assert len(one.states) - begin == LEAST_OFF_STEPS + 1


def test_a_probe_without_proposals_ends_after_four_times_its_steps():
    one = run()
    while one.adaptation.state is not AdaptationState.PROBING:
        one.steps(1, 16, 0.0)
    begin = len(one.states)
    while one.adaptation.state is AdaptationState.PROBING:
        one.steps(1, 16, 0.0, available=0)
    assert len(one.states) - begin == 4 * PROBE_STEPS
    assert one.adaptation.limit(16) == 0


def test_ended_sequences_are_forgotten():
    one = run()
    one.steps(5, 8, 0.5)
    for key in range(8):
        one.adaptation.remove(key)
    assert one.adaptation.acceptance.num_sequences == 0


# --- costs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "seconds"), [(4, 0.001), (8, 0.001), (20, 0.002), (32, 0.003), (128, 0.012)])
def test_costs_follow_what_the_device_was_timed_at(num_tokens, seconds):
    rates = DeviceRates(1.0, 1.0, ((8, 0.001), (32, 0.003)))
    buckets = BucketTable.build(max_num_batched_tokens=64, max_num_seqs=8)
    costs = StepCosts.of(rates, buckets, host_s=0.5, row_s=1.0, token_s=2.0, round_s=3.0)
    assert (costs.host_s, costs.row_s, costs.token_s, costs.round_s) == (0.5, 1.0, 2.0, 3.0)
    assert costs.step_s(num_tokens, 4) == pytest.approx(seconds)
    assert (costs.size(3), costs.size(33), costs.size(65)) == (8, 64, 65)
    assert costs.plain_s(8, 0) == pytest.approx(0.501)
