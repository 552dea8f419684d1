"""Whatever happens in a short memory with a second tier, every token is right and nobody finds what is not theirs."""

from collections import Counter

import pytest

from jpaged.testing import SpeculatingExecutor
from jpaged.types import LoadedAdapter
from tests.engine.lives import ADAPTERS, STREAMING, WINDOWS, Life

WHAT_HAPPENS = (
    "num_preemptions",
    "num_recomputed_tokens",
    "num_blocks_swapped_in",
    "num_copies_on_write",
    "num_prefix_hit_tokens",
)


DRAFTED_WINDOWS = ((None,), (None, 5), (None, 12, 2))
"""A draft needs a KV group that sees everything."""


@pytest.mark.parametrize("first", range(0, 40, 10))
@pytest.mark.thinned(5)
def test_lives_in_a_short_memory_sample_every_token_as_if_alone(first):
    for seed in range(first, first + 10):
        Life(seed).run()


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.thinned(9)
def test_lives_of_models_whose_layers_see_unequally_far(windows):
    for seed in range(2000, 2006):
        Life(seed, windows).run()


@pytest.mark.parametrize("windows", STREAMING, ids=str)
@pytest.mark.thinned(4)
def test_lives_of_models_that_see_first_tokens_and_a_window(windows):
    for seed in range(5000, 5006):
        Life(seed, windows).run()


@pytest.mark.long
def test_lives_with_a_draft_model():
    num_dispatches = num_drafted = 0
    for seed in range(4000, 4030):
        life = Life(seed, DRAFTED_WINDOWS[seed % 3], kind=SpeculatingExecutor, nums_rounds=(1, 1, 0))
        life.run()
        num_dispatches += life.h.rule.num_dispatches
        num_drafted += life.h.executor.draft.num_tokens
    assert num_dispatches > 50 and num_drafted > 50


@pytest.mark.parametrize("first", [6000, 6006])
@pytest.mark.thinned(2)
def test_lives_of_prompts_of_which_parts_are_embeddings(first):
    num_hit_tokens = num_preemptions = num_embedded = 0
    for seed in range(first, first + 6):
        life = Life(seed, WINDOWS[seed % len(WINDOWS)] if seed % 2 else (None,), has_embeds=True)
        life.run()
        num_hit_tokens += life.h.engine.load().num_prefix_hit_tokens
        num_preemptions += life.h.engine.load().num_preemptions
        num_embedded += sum(request.embeds is not None for request in life.requests.values())
    assert min(num_hit_tokens, num_preemptions, num_embedded) > 10, (num_hit_tokens, num_preemptions, num_embedded)


def test_lives_of_more_adapters_than_slots():
    ended_of: Counter[LoadedAdapter | None] = Counter()
    for seed in range(3000, 3010):
        life = Life(seed, max_loras=1 + seed % 2)
        life.run()
        ended_of += life.ended_of
    assert set(ended_of) == {None, *ADAPTERS}


def test_lives_see_everything_that_can_happen_to_a_block():
    ended: Counter[tuple[int, int, bool]] = Counter()
    counts: Counter[str] = Counter()
    for seed in range(40, 50):
        life = Life(seed)
        life.run()
        ended += life.ended
        load = life.h.engine.load()
        counts.update({name: getattr(load, name) for name in WHAT_HAPPENS})
    for has_salt in (False, True):
        assert {num_samples for num_samples, _, salted in ended if salted == has_salt} >= {1, 2, 3}, ended
        assert {bool(width) for _, width, salted in ended if salted == has_salt} == {False, True}, ended
    assert min(counts.values()) > 10, counts


@pytest.mark.parametrize("seed", [5748, 90449])
def test_lives_in_which_samples_run_again_and_are_preempted_once_more(seed):
    """A sample that was forked anew is not taken for the one that it was forked from, when it looks for its blocks."""
    Life(seed, overlap=seed % 4 > 0, batching="continuous").run()


def test_lives_that_are_swapped_with_tokens_in_flight():
    for seed in range(10):
        Life(seed, overlap=True, preemption_mode="swap").run()


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(1000, marks=pytest.mark.long),
        *(pytest.param(n, marks=pytest.mark.deep) for n in (1100, 1200, 1300)),
    ],
)
def test_many_lives_in_a_short_memory(first):
    for seed in range(first, first + 100):
        Life(seed, [(None,), *WINDOWS][seed % 7], max_loras=seed % 4).run()


@pytest.mark.long
def test_many_lives_with_a_draft_model():
    for seed in range(5000, 5200):
        windows = DRAFTED_WINDOWS[seed % 3]
        Life(seed, windows, kind=SpeculatingExecutor, nums_rounds=[(16,), (2, 0), (1, 0, 0, 5)][seed % 3]).run()
