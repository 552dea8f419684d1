"""Proposals never change what is decoded."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.speculative.drafts import verify
from jpaged.errors import InternalError

NONE: frozenset[int] = frozenset()


def by_hand(proposals: tuple[int, ...], drawn: tuple[int, ...], ending: frozenset[int]) -> tuple[int, list[int]]:
    token_ids: list[int] = []
    num_accepted = 0
    for place, token_id in enumerate(drawn[: len(proposals) + 1]):
        token_ids.append(token_id)
        if place == len(proposals) or proposals[place] != token_id:
            break
        num_accepted += 1
    for place, token_id in enumerate(token_ids):
        if token_id in ending:
            return num_accepted, token_ids[: place + 1]
    return num_accepted, token_ids


@pytest.mark.parametrize("ending", [NONE, frozenset({1}), frozenset({0, 1})])
@pytest.mark.parametrize("width", [0, 1, 3])
def test_all_rows_of_two_tokens_are_verified_as_by_hand(width, ending):
    rows = [
        (proposals[:count], proposals, drawn)
        for count in range(width + 1)
        for proposals in itertools.product((0, 1), repeat=width)
        for drawn in itertools.product((0, 1), repeat=width + 1)
    ]
    done = verify(
        np.array([padded for _, padded, _ in rows], np.int32).reshape(len(rows), width),
        np.array([len(proposals) for proposals, _, _ in rows], np.int32),
        np.array([drawn for _, _, drawn in rows], np.int32),
        [ending] * len(rows),
    )
    expected = [by_hand(proposals, drawn, ending) for proposals, _, drawn in rows]
    assert list(zip(done.num_accepted, done.token_ids, strict=True)) == expected


def drawn_behind(token_ids: list[int]) -> int:
    """A draw that depends on the position and on all tokens before it."""
    return zlib.crc32(bytes(token_ids)) % 3


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=40, max_size=40), st.integers(0, 2))
def test_whatever_is_proposed_the_tokens_are_those_of_plain_decoding(proposals, prompt):
    plain, token_ids, width = [prompt], [prompt], 4
    for proposed in proposals:
        padded = proposed + [9] * (width - len(proposed))
        drawn = [drawn_behind(token_ids + padded[:count]) for count in range(width + 1)]
        done = verify(np.array([padded]), np.array([len(proposed)]), np.array([drawn]), [NONE])
        assert len(done.token_ids[0]) == done.num_accepted[0] + 1
        token_ids += done.token_ids[0]
    while len(plain) < len(token_ids):
        plain.append(drawn_behind(plain))
    assert token_ids == plain


def test_ending_tokens_are_each_rows_own_and_are_kept():
    done = verify(
        np.array([[4, 5], [4, 5]]), np.array([2, 2]), np.array([[4, 5, 6], [4, 5, 6]]), [frozenset({5}), frozenset({7})]
    )
    assert (done.num_accepted, done.token_ids) == ([2, 2], [[4, 5], [4, 5, 6]])


@pytest.mark.parametrize(
    ("proposals", "counts", "drawn", "endings"),
    [
        ([[1]], [1], [[1]], [NONE]),
        ([[1]], [1, 1], [[1, 2]], [NONE]),
        ([[1]], [2], [[1, 2]], [NONE]),
        ([[1]], [-1], [[1, 2]], [NONE]),
        ([[1]], [1], [[1, 2]], []),
    ],
)
def test_shapes_that_do_not_belong_together_are_a_bug(proposals, counts, drawn, endings):
    with pytest.raises(InternalError, match="proposals"):
        verify(np.array(proposals), np.array(counts), np.array(drawn), endings)
