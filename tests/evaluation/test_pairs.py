"""Pairs are cut to the model's length and grouped so that a context is computed once."""

from __future__ import annotations

import pytest

from jpaged.errors import InvalidArgument
from jpaged.evaluation.backends import MAX_CONTINUATIONS, MAX_TOLD_TOKENS, ContinuationGroup, by_pair, fitted, grouped


def test_pairs_of_a_context_are_one_group_and_contexts_that_begin_alike_are_neighbours() -> None:
    pairs = [((1, 2), (5, 6)), ((9,), (7, 8)), ((1, 2, 3), (4, 4)), ((1, 2), (7, 7)), ((1, 2), (5, 6))]
    assert grouped(pairs) == [
        ContinuationGroup((1, 2), ((5, 6), (7, 7))),
        ContinuationGroup((1, 2, 3), ((4, 4),)),
        ContinuationGroup((9,), ((7, 8),)),
    ]


def test_continuations_of_one_token_are_apart_from_longer_ones_and_empty_ones_are_left_out() -> None:
    groups = grouped([((1,), (5,)), ((1,), (6, 7)), ((1,), ()), ((1,), (8,))])
    assert [(group.is_of_tokens, group.continuations) for group in groups] == [
        (False, ((6, 7),)),
        (True, ((5,), (8,))),
    ]


def test_groups_are_no_larger_than_a_call_may_be() -> None:
    tokens = grouped([((1,), (n,)) for n in range(MAX_TOLD_TOKENS + 3)])
    assert [len(group.continuations) for group in tokens] == [MAX_TOLD_TOKENS, 3]
    texts = grouped([((1,), (n, n)) for n in range(MAX_CONTINUATIONS + 1)])
    assert [len(group.continuations) for group in texts] == [MAX_CONTINUATIONS, 1]


def test_every_pair_finds_its_likelihood_again() -> None:
    pairs = [((1,), (5,)), ((1,), (6, 7)), ((2,), (5,))]
    groups = grouped(pairs)
    found = by_pair(groups, [[(-float(i), False)] for i in range(len(groups))])
    assert set(found) == set(pairs)
    assert found[(2,), (5,)] == (-2.0, False)


@pytest.mark.parametrize(
    ("max_length", "kept"), [(9, (0, 1, 2, 3)), (6, (0, 1, 2, 3)), (5, (1, 2, 3)), (4, (2, 3)), (3, (3,))]
)
def test_a_context_loses_its_beginning_and_the_last_token_is_not_read(max_length: int, kept: tuple[int, ...]) -> None:
    assert fitted(([0, 1, 2, 3], [7, 8, 9]), max_length) == (kept, (7, 8, 9))


@pytest.mark.parametrize(("pair", "field"), [(([], [1]), "context"), (([1], [1, 2, 3, 4]), "continuation")])
def test_what_cannot_be_scored_is_refused(pair: tuple[list[int], list[int]], field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{field}: ") as raised:
        fitted(pair, 3)
    assert raised.value.field == field
