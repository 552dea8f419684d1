"""Suffix decoding beside an oracle that searches all texts for every length of a match."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.config import SpeculativeOptions
from jpaged.engine.speculative import suffix
from jpaged.engine.speculative.suffix import SEED_LEN, DraftRule, SharedTexts, SuffixProposer

RULE = DraftRule(max_depth=8, max_factor=1.0, min_prob=0.1)
NO_LIMIT = 100


def common_len(text: list[int], end: int, context: list[int]) -> int:
    """Tokens before a place that are the last ones of the context."""
    length = 0
    while length < min(end, len(context)) and text[end - 1 - length] == context[-1 - length]:
        length += 1
    return length


def best_draft(texts: Mapping[int, list[int]], context: list[int], rule: DraftRule, limit: int):
    """(score, tokens) of the best path behind any match, the longer of two matches as good."""
    places = [
        (min(common_len(text, end, context), rule.max_depth - 1), number, end)
        for number, text in texts.items()
        for end in range(1, len(text))
    ]
    places.sort(reverse=True)
    best: tuple[float, list[int]] = (0.0, [])
    for match_len in range(rule.max_depth - 1, SEED_LEN - 1, -1):
        ways = [texts[number][end:] for length, number, end in places if length >= match_len]
        most = min(limit, int(match_len * rule.max_factor + 1e-6), rule.max_depth - match_len)
        token_ids: list[int] = []
        prob, score = 1.0, 0.0
        for place in range(max(0, most)):
            column = [way[place] for way in ways if len(way) > place]
            if not column:
                break
            token_id = max(column, key=lambda one: (column.count(one), -column.index(one)))
            prob *= column.count(token_id) / len(ways)
            if prob < rule.min_prob:
                break
            token_ids.append(token_id)
            score += prob
            ways = [way for way in ways if len(way) > place and way[place] == token_id]
        if score > best[0]:
            best = (score, token_ids)
    return best


@pytest.fixture
def all_leaves(monkeypatch):
    """Nothing is dropped, so that counts are exact."""
    monkeypatch.setattr(suffix, "MAX_LEAVES", 10**9)


TOKENS = st.lists(st.integers(0, 2), max_size=14)
NEW_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
RULES = st.builds(
    DraftRule, st.integers(4, 10), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.1, 0.4, 1.0])
)


@settings(max_examples=100)
@given(TOKENS, st.lists(TOKENS, min_size=1, max_size=6), RULES, st.integers(1, 12))
def test_alone_it_proposes_what_a_search_finds(prompt, chunks, rule, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "MAX_LEAVES", 10**9)
        proposer = SuffixProposer(rule, SharedTexts(rule, 0))
        proposer.begin(3, prompt, b"")
        text = list(prompt)
        for chunk in chunks:
            assert proposer.propose(3, limit) == best_draft({0: text}, text, rule, limit)[1]
            proposer.extend(3, chunk)
            text += chunk
        assert proposer.propose(3, limit) == best_draft({0: text}, text, rule, limit)[1]


@settings(max_examples=100)
@given(st.lists(TOKENS, min_size=1, max_size=4), st.lists(NEW_TOKENS, min_size=1, max_size=6), RULES)
def test_with_earlier_outputs_it_proposes_what_a_search_finds(outputs, chunks, rule):
    """Others end while one reads along; it reads on before it is asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "MAX_LEAVES", 10**9)
        proposer = SuffixProposer(rule, SharedTexts(rule, 100))
        shared: dict[int, list[int]] = {}
        proposer.begin(1, [], b"x")
        text: list[int] = []
        for i, chunk in enumerate(chunks):
            if i < len(outputs):
                proposer.begin(50 + i, [1, 2, 0], b"x")
                proposer.extend(50 + i, outputs[i])
                proposer.remove(50 + i)
                if outputs[i]:
                    shared[len(shared) + 1] = [1, 2, 0, *outputs[i]]
            proposer.extend(1, chunk)
            text += chunk
            own, theirs = (best_draft(one, text, rule, NO_LIMIT) for one in ({0: text}, shared))
            assert proposer.propose(1, NO_LIMIT) == (theirs if theirs[0] > own[0] else own)[1]


def test_a_draft_is_as_long_as_match_and_depth_allow(all_leaves):
    proposer = SuffixProposer(RULE, SharedTexts(RULE, 0))
    proposer.begin(0, [*range(20), 0, 1], None)
    assert proposer.propose(0, NO_LIMIT) == [2, 3]
    proposer.extend(0, [2])
    assert proposer.propose(0, NO_LIMIT) == [3, 4, 5]
    proposer.extend(0, [3, 4, 5, 6])
    assert proposer.propose(0, NO_LIMIT) == [7, 8, 9, 10]  # 4 and 4 make the depth
    assert proposer.propose(0, 2) == [7, 8]


@pytest.mark.parametrize(("min_prob", "proposed"), [(0.6, [3, 4]), (0.61, [3])])
def test_the_likeliest_continuation_is_proposed_down_to_the_least_probability(all_leaves, min_prob, proposed):
    rule = DraftRule(max_depth=12, max_factor=1.0, min_prob=min_prob)
    proposer = SuffixProposer(rule, SharedTexts(rule, 0))
    proposer.begin(0, [1, 2, 3, 4, 9] * 3 + [1, 2, 3, 5, 8] * 2 + [77, 1, 2], None)
    assert proposer.propose(0, NO_LIMIT) == proposed  # 3 five times of five, then 4 three times


def forget_output(proposer: SuffixProposer, key: int, prompt: list[int], output: list[int], sharing: bytes | None):
    proposer.begin(key, prompt, sharing)
    proposer.extend(key, output)
    proposer.remove(key)


def test_the_same_prompt_finds_the_output_at_its_first_token():
    proposer = SuffixProposer(RULE, SharedTexts(RULE, 10))
    forget_output(proposer, 1, [5, 6, 7, 8], [20, 21, 22, 23, 24], b"x")
    proposer.begin(2, [5, 6, 7, 8], b"x")
    assert proposer.propose(2, NO_LIMIT) == [20, 21, 22, 23]


def test_tenants_and_those_who_share_nothing_see_nothing():
    proposer = SuffixProposer(RULE, SharedTexts(RULE, 10))
    output = [20, 21, 22, 23, 24]
    forget_output(proposer, 1, [5, 6], output, b"tenant a")
    forget_output(proposer, 2, [5, 6], output, None)
    for key, sharing in ((3, b"tenant b"), (4, None)):
        proposer.begin(key, [5, 6, 20, 21], sharing)
        assert proposer.propose(key, NO_LIMIT) == []
    proposer.begin(5, [5, 6, 20, 21], b"tenant a")
    assert proposer.propose(5, NO_LIMIT) == [22, 23, 24]
    assert proposer.texts.num_texts == 1


def test_nothing_is_kept_of_who_made_nothing_or_of_anybody_where_none_may_be():
    proposer = SuffixProposer(RULE, SharedTexts(RULE, 0))
    forget_output(proposer, 1, [5, 6], [7, 8], b"x")
    assert (proposer.texts.num_texts, proposer.num_own_leaves) == (0, 0)
    proposer = SuffixProposer(RULE, SharedTexts(RULE, 5))
    forget_output(proposer, 1, [5, 6, 7], [], b"x")
    assert (proposer.texts.num_texts, proposer.num_own_leaves) == (0, 0)


def test_the_own_tree_keeps_the_last_tokens():
    proposer = SuffixProposer(RULE, SharedTexts(RULE, 0), max_own_tokens=20)
    proposer.begin(0, [1, 2, 3], None)
    for i in range(100):
        proposer.extend(0, [1000 + 3 * i, 1001 + 3 * i, 1002 + 3 * i])
        proposer.propose(0, 4)
        assert proposer.num_own_leaves <= 20
    proposer.extend(0, [1, 2])
    assert proposer.propose(0, 4) == []
    proposer.extend(0, [1297, 1298])
    assert proposer.propose(0, 4) == [1299, 1]


def test_a_long_prompt_is_looked_through_over_several_steps(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_INDEXED_TOKENS", 10)
    proposer = SuffixProposer(RULE, SharedTexts(RULE, 5))
    forget_output(proposer, 1, [90, 91, 92], [93, 94], b"x")
    proposer.begin(0, [*range(25), 0, 1, 2, 3], b"x")
    assert [proposer.propose(0, 3) for _ in range(3)] == [[], [], [4, 5, 6]]
    proposer.extend(0, [4, 50, *range(100, 130), 90, 91, 92])
    assert [proposer.propose(0, 3) for _ in range(4)] == [[], [], [], [93, 94]]


def test_the_rest_of_a_long_output_is_indexed_as_others_propose(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_INDEXED_TOKENS", 10)
    proposer = SuffixProposer(RULE, SharedTexts(RULE, 5))
    forget_output(proposer, 1, [90, 91, 92], list(range(100, 140)), b"x")
    proposer.begin(2, [130, 131], b"x")
    drafts = [proposer.propose(2, 3)]
    for token_id in (132, 133, 134):
        proposer.extend(2, [token_id])
        drafts.append(proposer.propose(2, 3))
    assert drafts == [[], [133, 134, 135], [134, 135, 136], [135, 136, 137]]
    assert proposer.texts.num_unsettled == 0


def test_an_output_that_drafts_come_from_is_kept_longer():
    proposer = SuffixProposer(RULE, SharedTexts(RULE, 2))
    forget_output(proposer, 1, [90, 91, 92], [1, 2, 3], b"x")
    forget_output(proposer, 2, [80, 81, 82], [4, 5, 6], b"x")
    proposer.begin(3, [90, 91, 92], b"x")
    assert proposer.propose(3, NO_LIMIT) == [1, 2, 3]
    forget_output(proposer, 4, [70, 71, 72], [7, 8, 9], b"x")
    for key, prompt, draft in ((5, [90, 91, 92], [1, 2, 3]), (6, [80, 81, 82], []), (7, [70, 71, 72], [7, 8, 9])):
        proposer.begin(key, prompt, b"x")
        assert proposer.propose(key, NO_LIMIT) == draft


def test_a_match_goes_on_where_its_seed_is_too_common_to_be_found(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_LEAVES", 2)
    proposer = SuffixProposer(RULE, SharedTexts(RULE, 0))
    common = [1, 2, 30, 1, 2, 31, 1, 2, 32]
    proposer.begin(0, [7, 8, 1, 2, 40, 41, *common, 7, 8], None)
    assert proposer.propose(0, 4) == [1, 2]
    proposer.extend(0, [1, 2])  # the first "1 2" is dropped for later ones, but it was matched
    assert proposer.propose(0, 4) == [40, 41, 1, 2]


def test_of_a_match_goes_on_what_the_new_tokens_continue(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_LEAVES", 2)
    proposer = SuffixProposer(RULE, SharedTexts(RULE, 0))
    common = [1, 2, 30, 1, 2, 31, 1, 2, 32]
    proposer.begin(0, [7, 8, 1, 3, 40, 41, 7, 8, 1, 2, 50, 51, *common, 7, 8], None)
    proposer.propose(0, 4)
    proposer.extend(0, [1])
    proposer.propose(0, 4)
    proposer.extend(0, [2])  # of the two places after "7 8 1" it continues the second one
    assert proposer.propose(0, 4) == [50, 51, 1, 2]


def test_a_text_that_is_dropped_while_it_matches_proposes_nothing_more(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_LEAVES", 2)
    proposer = SuffixProposer(RULE, SharedTexts(RULE, 3))
    forget_output(proposer, 1, [7, 8], [1, 2, 40, 41], b"x")
    forget_output(proposer, 2, [90, 91], [1, 2, 50, 1, 2, 51], b"x")
    proposer.begin(3, [7, 8], b"x")
    assert proposer.propose(3, 4) == [1, 2]
    for key in (4, 5, 6):
        forget_output(proposer, key, [60 + key, 91], [1, 2, 60, 1, 2, 60], b"x")
    proposer.extend(3, [1, 2])
    assert proposer.propose(3, 4) == [60, 1]


def test_it_is_made_by_the_options():
    text = '{"method": "suffix", "suffix_decoding_max_tree_depth": 6, "suffix_decoding_max_spec_factor": 2.0}'
    proposer = SuffixProposer.of(SpeculativeOptions.parse(text))
    proposer.begin(0, [*range(20), 0, 1], None)
    assert proposer.propose(0, NO_LIMIT) == [2, 3, 4, 5]


def test_shares_of_texts_and_of_tokens_count_alike():
    texts = SharedTexts(RULE, 4, max_tokens=40)
    for name in (b"many", b"many", b"long"):
        texts.add(name, [1] * (20 if name == b"long" else 2))
    texts.add(b"new", [2] * 20)
    assert texts.num_tokens == 24  # of two halves of the store, the one whose key sorts first gave up its oldest text
    assert texts.tree(b"long") is None
    texts = SharedTexts(RULE, 4, max_tokens=40)
    for name in (b"long", b"many", b"many", b"many", b"new"):
        texts.add(name, [1] * (20 if name == b"long" else 2))
    assert (texts.num_texts, texts.num_tokens) == (4, 26)  # three of four texts are more than half of the tokens
