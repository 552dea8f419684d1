"""Prompt lookup beside a search through the whole sequence."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.config import SpeculativeOptions
from jpaged.engine.speculative import ngram
from jpaged.engine.speculative.ngram import NgramProposer


def looked_up(token_ids: list[int], least: int, most: int, limit: int) -> list[int]:
    """What follows the earliest place of the longest n-gram at the end."""
    for n in range(min(most, len(token_ids)), least - 1, -1):
        for end in range(n, len(token_ids)):
            if token_ids[end - n : end] == token_ids[len(token_ids) - n :]:
                return token_ids[end : end + limit]
    return []


CHUNKS = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=8)


@given(CHUNKS, st.integers(1, 3), st.integers(0, 3), st.integers(0, 6))
def test_it_proposes_what_a_search_finds(chunks, least, more, limit):
    proposer = NgramProposer(least, least + more)
    proposer.begin(7, chunks[0], None)
    token_ids = list(chunks[0])
    for chunk in chunks[1:]:
        assert proposer.propose(7, limit) == looked_up(token_ids, least, least + more, limit)
        proposer.extend(7, chunk)
        token_ids += chunk
    assert proposer.propose(7, limit) == looked_up(token_ids, least, least + more, limit)


def test_the_longest_ngram_wins_and_then_the_earliest_place():
    proposer = NgramProposer(1, 2)
    proposer.begin(0, [1, 2, 9, 2, 8, 1, 2, 7, 2, 6, 1, 2], None)
    assert proposer.propose(0, 3) == [9, 2, 8]
    proposer.extend(0, [5, 2])
    assert proposer.propose(0, 2) == [9, 2]


def test_asking_without_telling_changes_nothing():
    proposer = NgramProposer(2, 3)
    proposer.begin(0, [1, 2, 3, 1, 2], None)
    assert [proposer.propose(0, limit) for limit in (2, 0, 4, 2)] == [[3, 1], [], [3, 1, 2], [3, 1]]


def test_sequences_do_not_see_each_other_and_are_forgotten():
    proposer = NgramProposer(2, 2)
    proposer.begin(1, [1, 2, 3, 4], b"all")
    proposer.begin(2, [1, 2], b"all")
    assert (proposer.propose(1, 4), proposer.propose(2, 4)) == ([], [])
    assert proposer.num_entries == 4
    proposer.remove(1)
    assert proposer.num_entries == 1
    proposer.remove(2)
    assert proposer.num_entries == 0
    proposer.begin(1, [3, 4, 5, 3, 4], None)
    assert proposer.propose(1, 1) == [5]


def test_memory_is_bounded_and_recent_places_are_known():
    proposer = NgramProposer(2, 3, window=64)
    rng = random.Random(5)
    proposer.begin(0, [], None)
    for _ in range(300):
        proposer.extend(0, [rng.randrange(10**6) for _ in range(10)])
        proposer.propose(0, 4)
        assert proposer.num_entries <= 2 * 64
    recent = [rng.randrange(10**6) for _ in range(20)]
    proposer.extend(0, [*recent, *recent[:3]])
    assert proposer.propose(0, 4) == recent[3:7]


def test_what_fell_out_of_the_window_is_not_proposed():
    proposer = NgramProposer(2, 2, window=8)
    proposer.begin(0, [1, 2, 3, *range(100, 120), 1, 2], None)
    assert proposer.propose(0, 4) == []


def test_a_long_prompt_is_looked_through_over_several_steps(monkeypatch):
    monkeypatch.setattr(ngram, "MAX_INDEXED_TOKENS", 8)
    proposer = NgramProposer(2, 2)
    proposer.begin(0, [1, 2, 3, *range(100, 120), 50, 51, 52, 1, 2], None)
    found, entries = [], []
    for _ in range(4):
        found.append(proposer.propose(0, 1))
        entries.append(proposer.num_entries)
    assert found == [[3]] * 4  # the place was among the first
    assert entries == [7, 15, 23, 26]  # "1 2" at the end has a place already


def test_a_place_is_compared_before_it_is_believed():
    same_hash = (1 << 61) - 1
    assert hash((same_hash,)) == hash((0,))
    proposer = NgramProposer(1, 1)
    proposer.begin(0, [0, 5, same_hash], None)
    assert proposer.propose(0, 2) == []


@pytest.mark.parametrize(("text", "lengths"), [('"prompt_lookup_max": 4', (4, 4)), ('"prompt_lookup_min": 2', (2, 2))])
def test_it_is_made_by_the_options(text, lengths):
    options = SpeculativeOptions.parse(f'{{"method": "ngram", "num_speculative_tokens": 3, {text}}}')
    proposer = NgramProposer.of(options)
    assert (proposer.least, proposer.most) == lengths
