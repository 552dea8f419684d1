"""What is learnt of reuse is what the counts say, and ranks blocks as one would by hand."""

import numpy as np
import pytest

from jpaged.engine.executor import DeviceRates
from jpaged.engine.kv_cache.eviction.cost_aware import NUM_AGES, BlockCosts, Reuse

NOBODY = np.zeros((2, NUM_AGES))


def by_hand(found, ended, alive, prior):
    """The rates of one class, a loop for each sum."""
    widths = [2.0 ** ((age + 1) / 2) - 2.0 ** (age / 2) for age in range(NUM_AGES)]
    chances = []
    for age in range(NUM_AGES):
        later = sum(found[age + 1 :]) + sum(ended[age + 1 :]) + sum(alive[age + 1 :])
        at_risk = later + found[age] + 0.5 * (ended[age] + alive[age])
        chances.append((found[age] + 0.06 * prior) / (at_risk + prior))
    rates = []
    for first in range(NUM_AGES):
        best, here, kept = 0.0, 1.0, 0.0
        for age in range(first, NUM_AGES):
            kept += widths[age] * (here + here * (1 - chances[age])) / 2
            here *= 1 - chances[age]
            best = max(best, (1 - here) / kept)
        rates.append(best)
    return rates


def test_rates_are_those_that_loops_over_the_counts_find():
    draw, reuse = np.random.default_rng(3), Reuse([0.06, 0.06], 4.0, prior_blocks=5.0)
    found, ended, alive = (draw.integers(0, 40, (2, NUM_AGES)) for _ in range(3))
    for kind in range(2):
        for age in range(NUM_AGES):
            for _ in range(found[kind, age]):
                reuse.found(kind, age)
            for _ in range(ended[kind, age]):
                reuse.ended(kind, age)
    reuse.learn(alive.astype(np.float64))
    for kind in range(2):
        expected = by_hand(found[kind].tolist(), ended[kind].tolist(), alive[kind].tolist(), 5.0)
        assert reuse.rates[kind] == pytest.approx(expected)


def test_ages_double_with_every_second():
    reuse = Reuse([0.06], 8.0, 1.0)
    assert [reuse.age(n) for n in (0, 3, 4, 7, 8, 14, 15, 23, 24)] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert reuse.age(10**9) == NUM_AGES - 1
    assert all(0 <= reuse.age(n + 1) - reuse.age(n) <= 1 for n in range(5000))


def test_of_two_classes_the_one_that_is_found_more_often_is_worth_more():
    reuse = Reuse([0.06, 0.06], 1.0, 4.0)
    for _ in range(100):
        reuse.found(0, 3)
        reuse.ended(1, 3)
    reuse.learn(NOBODY)
    assert min(reuse.rates[0][:3]) > max(reuse.rates[1][:3])


def test_what_is_found_after_a_while_alone_grows_in_worth_until_then():
    reuse = Reuse([0.06], 1.0, 1.0)
    for _ in range(200):
        reuse.found(0, 10)
    reuse.learn(np.zeros((1, NUM_AGES)))
    rates = reuse.rates[0]
    assert rates[:11] == sorted(rates[:11]) and rates[10] > rates[11]


def test_blocks_that_are_kept_on_and_not_found_count_against_their_class():
    few, many = Reuse([0.06], 1.0, 1.0), Reuse([0.06], 1.0, 1.0)
    alive = np.zeros((1, NUM_AGES))
    for reuse in (few, many):
        for _ in range(10):
            reuse.found(0, 2)
    few.learn(alive)
    alive[0, 12] = 500
    many.learn(alive)
    assert many.rates[0][0] < few.rates[0][0]


def test_what_was_learnt_fades():
    reuse = Reuse([0.06], 1.0, 1.0)
    for _ in range(50):
        reuse.found(0, 2)
    alive = np.zeros((1, NUM_AGES))
    reuse.learn(alive)
    before = reuse.rates[0][0]
    for _ in range(200):
        reuse.learn(alive)
    fresh = Reuse([0.06], 1.0, 1.0)
    assert before > 2 * fresh.rates[0][0] and reuse.rates[0][0] == pytest.approx(fresh.rates[0][0], rel=0.05)


def test_a_block_costs_what_its_tokens_and_their_pairs_take():
    rates = DeviceRates(1e6, 2e6, ((16, 0.001), (64, 0.002)), pair_s=1e-6)
    costs = BlockCosts.of(rates, 8, 4000)
    tokens_s, per_token_s = [], 0.002 / 64
    for position in range(8 * 5):
        tokens_s.append(per_token_s + 1e-6 * (position + 0.5))
    for index in range(5):
        assert costs.recompute_s(index) == pytest.approx(sum(tokens_s[8 * index : 8 * index + 8]))
    assert costs.fetch_s == pytest.approx(0.002)
