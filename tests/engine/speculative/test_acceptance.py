"""What is known of acceptance: of a method by position, and of each sequence."""

from __future__ import annotations

import numpy as np
import pytest

from jpaged.engine.speculative.controller import Acceptance


def test_positions_are_told_apart_and_count_where_those_before_were_accepted():
    acceptance = Acceptance(3)
    for _ in range(300):
        acceptance.observe([1, 2], [3, 3], [1, 3])
    assert acceptance.of_method() == pytest.approx([1.0, 0.5, 1.0], abs=0.05)


def test_a_short_draft_says_nothing_of_the_positions_behind_it():
    acceptance = Acceptance(3)
    first = acceptance.of_method()
    for _ in range(300):
        acceptance.observe([1], [1], [0])
    first_then, second_then, _ = acceptance.of_method()
    assert first_then < 0.05
    assert second_then == pytest.approx(first_then)  # a position that nobody saw is like the one before
    assert first[0] == first[2] > 0.5


def test_sequences_begin_as_the_method_and_go_their_own_ways():
    acceptance = Acceptance(2)
    for _ in range(60):
        acceptance.observe([1, 2], [2, 2], [2, 0])
    good, bad, new = acceptance.probabilities([1, 2, 3])
    np.testing.assert_allclose(new, acceptance.of_method())
    assert good[0] > 0.85
    assert bad[0] < 0.15
    assert bad[0] < new[0] < good[0]


def test_who_is_not_asked_comes_back_to_what_others_do():
    acceptance = Acceptance(1)
    for _ in range(50):
        acceptance.observe([1, 2], [1, 1], [0, 1])
    before = acceptance.probabilities([1])[0, 0]
    for _ in range(2000):
        acceptance.observe([1, 2], [0, 1], [0, 1])
    after = acceptance.probabilities([1])[0, 0]
    assert before < 0.2
    assert after == pytest.approx(acceptance.of_method()[0], abs=0.02)


def test_what_is_recent_decides():
    acceptance = Acceptance(1)
    for _ in range(1000):
        acceptance.observe([1], [1], [1])
    for _ in range(200):
        acceptance.observe([1], [1], [0])
    assert acceptance.of_method()[0] < 0.05


def test_doubt_lets_a_few_steps_decide():
    acceptance = Acceptance(2)
    for _ in range(1000):
        acceptance.observe([1], [2], [0])
    trusting = acceptance.of_method()[0]
    acceptance.doubt()
    assert acceptance.of_method()[0] == pytest.approx(trusting, abs=0.1)
    for _ in range(12):
        acceptance.observe([1], [2], [2])
    assert acceptance.of_method()[0] > 0.7


def test_ended_sequences_leave_their_places_to_others():
    acceptance = Acceptance(2)
    for key in range(1000):
        acceptance.observe([key], [2], [0])
        acceptance.remove(key)
    acceptance.remove(5)
    assert acceptance.num_sequences == 0
    np.testing.assert_allclose(acceptance.probabilities([7])[0], acceptance.of_method())
