"""Thinking ends when its budget is used up, in the tag's own tokens, and can be taken back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.structured import TagTexts, ThinkingBudget, ThinkingGrammar
from jpaged.testing.fake_model import FakeGrammar

OPEN, CLOSE = (7,), (8,)


def run(budget, tokens):
    """The tokens of a sequence that wants `tokens`, as far as the budget lets it."""
    got = []
    for token in tokens:
        forced = budget.forced()
        got.append(token if forced is None else forced)
        budget.push(got[-1])
    return got


def test_tokens_before_and_behind_thinking_are_free():
    budget = ThinkingBudget(OPEN, CLOSE, 2, is_open_at_start=False)
    assert run(budget, [1, 2, 3, 7, 1, 8, 4, 5, 6]) == [1, 2, 3, 7, 1, 8, 4, 5, 6]
    assert (budget.is_open, budget.num_used) == (False, 1)


def test_the_closing_tag_is_forced_when_the_budget_is_used_up():
    budget = ThinkingBudget(OPEN, CLOSE, 2, is_open_at_start=False)
    assert run(budget, [7, 1, 2, 3, 4]) == [7, 1, 2, 8, 4]


@pytest.mark.parametrize(("budget", "wanted"), [(0, [8, 9, 3, 4]), (1, [1, 8, 9, 4]), (9, [1, 2, 3, 4])])
def test_a_tag_of_several_tokens_comes_one_by_one(budget, wanted):
    assert run(ThinkingBudget(OPEN, (8, 9), budget, is_open_at_start=True), [1, 2, 3, 4]) == wanted


def test_a_tag_that_the_model_has_begun_is_ended_and_not_begun_again():
    assert run(ThinkingBudget((), (8, 9), 2, is_open_at_start=True), [1, 8, 3, 4]) == [1, 8, 9, 4]


def test_what_only_begins_like_a_tag_counts_as_thinking():
    budget = ThinkingBudget((), (8, 8, 9), 5, is_open_at_start=True)
    assert run(budget, [8, 8, 8, 9, 1]) == [8, 8, 8, 9, 1]
    assert (budget.is_open, budget.num_used) == (False, 1)


def test_thinking_again_goes_on_with_the_same_budget():
    budget = ThinkingBudget(OPEN, CLOSE, 3, is_open_at_start=False)
    assert run(budget, [7, 1, 8, 5, 7, 1, 1, 1, 5, 7, 1]) == [7, 1, 8, 5, 7, 1, 1, 8, 5, 7, 8]


def test_without_an_opening_tag_nothing_opens_again():
    assert run(ThinkingBudget((), CLOSE, 0, is_open_at_start=True), [1, 7, 7]) == [8, 7, 7]


def test_a_copy_leaves_the_first_as_it_was():
    first = ThinkingBudget((), (8, 9), 2, is_open_at_start=True)
    first.push(1)
    twin = first.copy()
    assert run(twin, [2, 3, 4, 5]) == [2, 8, 9, 5]
    assert (twin.is_open, first.is_open, first.num_used, first.forced()) == (False, True, 1, None)
    twin = first.copy()
    twin.push(8)
    assert twin.copy().forced() == 9


@given(
    tokens=st.lists(st.integers(6, 9), max_size=30),
    tag=st.lists(st.integers(7, 9), min_size=1, max_size=3),
    budget=st.integers(0, 8),
)
def test_thinking_is_never_longer_than_its_budget(tokens, tag, budget):
    one = ThinkingBudget((), tag, budget, is_open_at_start=True)
    got = run(one, [*tokens, *[6] * (budget + len(tag))])
    end = next(i for i in range(len(got)) if got[i : i + len(tag)] == tag)
    assert end <= budget
    assert (one.is_open, one.num_used) == (False, end)
    assert got[end + len(tag) :] == [*tokens, *[6] * (budget + len(tag))][end + len(tag) :]


@pytest.mark.parametrize(("close", "budget"), [((), 1), (CLOSE, -1)])
def test_a_budget_needs_a_tag_and_a_number(close, budget):
    with pytest.raises(ValueError, match=r"close_ids must hold|budget -1 must be"):
        ThinkingBudget(OPEN, close, budget, is_open_at_start=True)


def may_come(state):
    """The tokens that a state allows, of 64."""
    mask_w = np.zeros(2, np.int32)
    state.fill(mask_w)
    return np.flatnonzero(np.unpackbits(mask_w.view(np.uint8), bitorder="little")).tolist()


TEXTS = {
    1: "a",
    2: " b",
    3: "<th",
    4: "ink>",
    5: "</",
    6: "think",
    7: ">",
    10: "x</thi",
    11: "nk>y",
    12: "\n",
    13: "",
    14: "<",
}
SPELLED = {**TEXTS, 20: "<think>", 21: "</think>"}


def spelled(budget, *, is_open=False):
    texts = TagTexts("<think>", "</think>", SPELLED.__getitem__)
    return ThinkingBudget((20,), (21,), budget, is_open_at_start=is_open, texts=texts)


@pytest.mark.parametrize("opening", [(20,), (3, 4), (12, 14, 6, 7), (12, 13, 3, 4)])
@pytest.mark.parametrize("closing", [(21,), (5, 6, 7), (10, 11), (13, 5, 13, 6, 7)])
def test_tags_are_found_in_the_text_however_they_are_cut(opening, closing):
    tokens = [*opening, 1, 2, 1, *closing, 2, 1, 1, 1]
    one = spelled(9)
    assert run(one, tokens) == tokens
    assert (one.is_open, one.num_used) == (False, 3 + closing.count(13))
    assert run(spelled(2), tokens)[: len(opening) + 3] == [*opening, 1, 2, 21]


def test_thinking_that_the_prompt_opens_ends_in_any_tokens():
    one = spelled(4, is_open=True)
    assert run(one, [1, 5, 6, 7, 1, 1, 1, 1, 1]) == [1, 5, 6, 7, 1, 1, 1, 1, 1]
    assert one.num_used == 1
    assert run(spelled(3, is_open=True), [1, 2, 5, 1, 1]) == [1, 2, 5, 21, 1]


def test_an_answer_may_quote_the_opening_tag():
    assert run(spelled(0), [1, 3, 4, 1, 2]) == [1, 3, 4, 1, 2]


def test_a_state_allows_everything_until_the_tag_is_due():
    state = ThinkingGrammar(ThinkingBudget(OPEN, (8, 40), 2, is_open_at_start=True)).start()
    assert may_come(state) == list(range(64))
    assert state.forced(9) == []
    assert state.num_accepted([1, 2, 3]) == 2
    assert state.num_accepted([1, 2, 8, 40, 3]) == 5
    assert state.accept(1)
    assert state.accept(2)
    assert may_come(state) == [8]
    assert state.forced(9) == [8, 40]
    assert state.forced(1) == [8]
    twin = state.copy()
    assert twin.accept(8)
    assert may_come(twin) == [40]
    assert may_come(state) == [8]
    assert twin.accept(40)
    assert may_come(twin) == list(range(64))


@pytest.mark.parametrize("salt", range(20))
def test_a_budget_gives_way_to_what_the_text_follows(salt):
    """The grammar of the text knows no tags: it is followed, and the tag comes where it may."""
    text = FakeGrammar(64, 63, 12, salt=salt)
    alone, state = text.start(), ThinkingGrammar(ThinkingBudget(OPEN, CLOSE, 0, is_open_at_start=True), text).start()
    while not alone.is_complete:
        allowed = sorted(set(alone.allowed()))
        is_due = state.budget.is_open and 8 in allowed
        assert may_come(state) == ([8] if is_due else allowed)
        token_id = 8 if is_due else allowed[-1]
        assert alone.accept(token_id)
        assert state.accept(token_id)
        assert (state.is_complete, state.has_ended, state.failure) == (alone.is_complete, alone.has_ended, None)
    assert not state.accept(1)
