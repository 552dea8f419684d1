"""Bounds of what earlier requests leave behind, and who has to give way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jpaged.engine.speculative.suffix import NO_MATCH, DraftRule, SharedTexts, SuffixTree

RULE = DraftRule(max_depth=8, max_factor=1.0, min_prob=0.1)


def knows(texts: SharedTexts, sharing: bytes, token_ids: list[int]) -> bool:
    """Whether those who share are proposed the end of a text behind its beginning."""
    texts.settle(10**6)
    tree = texts.tree(sharing)
    if tree is None:
        return False
    reader = SuffixTree(RULE)
    seed = reader.grow(0, token_ids[:3], 0, 3)
    match = tree.advance(NO_MATCH, seed, token_ids[:3], 3)
    return tree.draft(match, 2).token_ids == token_ids[3:5]


def text(first: int, length: int = 10) -> list[int]:
    return list(range(first, first + length))


def test_texts_are_given_up_whole_the_one_used_longest_ago_first():
    texts = SharedTexts(RULE, max_texts=3)
    for first in (100, 200, 300):
        texts.add(b"x", text(first))
    texts.used(b"x", 1)
    texts.add(b"x", text(400))
    assert [knows(texts, b"x", text(first)) for first in (100, 200, 300, 400)] == [True, False, True, True]
    assert (texts.num_texts, texts.num_tokens, texts.num_leaves) == (3, 30, 27)


def test_tokens_are_bounded_too_and_a_text_that_is_too_long_keeps_its_end():
    texts = SharedTexts(RULE, max_texts=100, max_tokens=25)
    texts.add(b"x", text(100))
    texts.add(b"x", text(200))
    texts.add(b"x", text(300))
    assert (texts.num_texts, texts.num_tokens) == (2, 20)
    texts.add(b"x", text(1000, 60))
    assert (texts.num_texts, texts.num_tokens) == (1, 25)
    assert knows(texts, b"x", text(1040))
    assert not knows(texts, b"x", text(1000))


def test_a_text_is_settled_a_part_at_a_time():
    texts = SharedTexts(RULE, max_texts=2)
    for first in (100, 200):
        texts.add(b"x", text(first))
    leaves = []
    for _ in range(6):
        texts.settle(4)
        leaves.append(texts.num_leaves)
    assert leaves == [4, 8, 11, 15, 18, 18]  # nothing is known behind the last token of each
    assert all(knows(texts, b"x", text(first)) for first in (100, 104, 200, 204))


def test_a_text_that_is_given_up_before_it_is_settled_leaves_nothing():
    texts = SharedTexts(RULE, max_texts=1)
    texts.add(b"x", text(100))
    texts.settle(3)
    texts.add(b"x", text(200))
    texts.settle(100)
    assert texts.num_leaves == 9
    texts.add(b"y", text(300))
    texts.settle(100)
    assert (texts.num_leaves, texts.tree(b"x")) == (9, None)


def test_texts_that_nobody_settles_are_let_go():
    texts = SharedTexts(RULE, max_texts=2)
    for first in range(0, 10_000, 10):
        texts.add(str(first % 70).encode(), text(first))
    assert texts.num_texts == 2
    assert texts.num_unsettled <= 2 * 2 + 64
    texts.settle(20)
    assert (texts.num_unsettled, texts.num_leaves) == (0, 18)


def test_who_floods_gives_up_its_own():
    texts = SharedTexts(RULE, max_texts=10, max_tokens=1000)
    texts.add(b"quiet", text(100))
    texts.add(b"quiet", text(200))
    for first in range(1000, 2000, 20):
        texts.add(b"loud", text(first, 15))
    assert [knows(texts, b"quiet", text(first)) for first in (100, 200)] == [True, True]
    assert texts.num_texts == 10
    texts = SharedTexts(RULE, max_texts=1000, max_tokens=100)
    texts.add(b"quiet", text(100))
    for first in range(1000, 1500):
        texts.add(b"loud", text(first, 3))
    assert knows(texts, b"quiet", text(100))


def test_one_key_a_text_takes_no_more_than_all_may():
    texts = SharedTexts(RULE, max_texts=5)
    for first in range(0, 4000, 20):
        texts.add(str(first).encode(), text(first))
    assert (texts.num_texts, texts.num_tokens) == (5, 50)
    assert sum(knows(texts, str(first).encode(), text(first)) for first in range(0, 4000, 20)) == 5
    assert texts.num_leaves == 45


ACTS = st.lists(
    st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.lists(st.integers(0, 3), max_size=12), st.integers(0, 20)),
    max_size=40,
)


@given(ACTS, st.integers(1, 5), st.integers(5, 40))
def test_bounds_hold_and_trees_hold_what_was_kept(acts, max_texts, max_tokens):
    texts = SharedTexts(RULE, max_texts, max_tokens)
    for sharing, token_ids, number in acts:
        texts.add(sharing, token_ids)
        texts.used(sharing, number)
        assert texts.num_texts <= max_texts
        assert texts.num_tokens <= max_tokens
        # A leaf behind each token of a text but the last, unless later ones of the same seed took its place.
        assert texts.num_leaves <= texts.num_tokens - texts.num_texts
        texts.settle(number)
    texts.settle(10**6)
    for sharing, _, _ in acts:
        tree = texts.tree(sharing)
        assert tree is None or tree.num_leaves > 0
