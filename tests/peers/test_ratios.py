"""Medians, ratios and the agreement of greedy tokens."""

import pytest

from benchmarks.peers.ratios import Agreement, Spread, Timed, agreement, best, ratios

TAKEN = {
    "jpaged": Timed([2.0, 1.0, 3.0], [1.5, 1.0, 2.0]),
    "vllm": Timed([3.0, 3.0, 9.0], [3.0, 3.0, 3.0]),
    "llama.cpp": Timed([1.0, 0.5, 8.0]),
}


def test_a_ratio_is_the_peers_median_over_ours():
    assert ratios(TAKEN) == {"vllm": 1.5, "llama.cpp": 0.5}


def test_a_peer_without_processor_time_has_no_ratio_of_it():
    assert ratios(TAKEN, of_processor=True) == {"vllm": 2.0}


def test_without_ours_there_is_no_ratio():
    assert ratios({"vllm": Timed([1.0])}) == {}


def test_the_best_peer_is_the_quickest_by_the_clock():
    assert best(TAKEN) == "llama.cpp"
    assert best({"jpaged": Timed([1.0])}) is None


def test_a_spread_is_the_median_between_the_extremes():
    assert TAKEN["vllm"].wall == Spread(3.0, 3.0, 9.0)


@pytest.mark.parametrize(("processor_s", "is_disturbed"), [([1.0, 0.9], False), ([1.0, 0.5], True), ([], False)])
def test_a_peer_that_had_not_all_of_the_core_was_disturbed(processor_s, is_disturbed):
    assert Timed([1.0, 1.0], processor_s).is_disturbed is is_disturbed


def test_its_own_time_is_the_processors_where_that_is_known():
    assert TAKEN["jpaged"].own_s == 1.5
    assert TAKEN["llama.cpp"].own_s == 1.0


def test_tokens_agree_up_to_the_first_that_differs():
    ours = [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9]]]
    theirs = [[[1, 2, 3], [4, 0, 6]], [[0, 8, 9]]]
    assert agreement(ours, theirs) == Agreement(num_sequences=3, num_equal=1, num_tokens=9, num_before=4)


def test_other_numbers_of_sequences_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        agreement([[[1]], [[2]]], [[[1]]])
