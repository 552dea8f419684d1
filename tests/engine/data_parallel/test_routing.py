"""Which of several engines takes a request: by cached prefix, then by load, then the first."""

import pytest

from jpaged.testing import expected_tokens
from jpaged.types import FinishReason
from tests.engine.data_parallel.fleet import PREFIX, Fleet


def test_requests_that_share_nothing_take_turns():
    fleet = Fleet(3)
    assert [fleet.place(f"r{i}", [i] * 6) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    fleet.run()
    assert fleet.ask("again", [99] * 6) == 0


def test_a_longer_request_counts_for_more():
    """1/8 of the rows and 48/300 of the slots against 1/8 and 3/300 each."""
    fleet = Fleet(2, num_blocks=75)
    assert fleet.place("long", [1] * 8, max_tokens=40) == 0
    assert [fleet.place(f"r{i}", [2 + i] * 2, max_tokens=1) for i in range(4)] == [1, 1, 1, 0]
    fleet.run()


def test_samples_count_with_all_that_they_may_sample():
    """4/8 of the rows and 83/300 of the slots against 1/8 and 3/300 each."""
    fleet = Fleet(2, num_blocks=75)
    assert fleet.place("four", [1] * 3, n=4, temperature=1.0, max_tokens=20) == 0
    assert [fleet.place(f"r{i}", [2 + i] * 2, max_tokens=1) for i in range(7)] == [1, 1, 1, 1, 1, 1, 0]
    fleet.run()


def test_samples_and_beams_count_as_rows():
    fleet = Fleet(2)
    assert fleet.place("four", [1] * 3, n=4, temperature=1.0) == 0
    assert [fleet.place(f"r{i}", [2 + i] * 3) for i in range(4)] == [1, 1, 1, 1]
    assert fleet.place("beams", [9] * 3, beam_width=4) == 0
    assert [fleet.place(f"after{i}", [10 + i] * 3) for i in range(3)] == [1, 1, 1]
    fleet.run()


def test_a_prompt_goes_where_its_prefix_is_cached():
    fleet = Fleet(3)
    fleet.submit("other", [1] * 6)
    assert fleet.ask("first", [*PREFIX, 1]) == 1
    assert [fleet.ask(f"r{i}", [*PREFIX, 2 + i]) for i in range(4)] == [1] * 4
    assert fleet.last("r3").usage.cached_tokens >= 12
    assert fleet.ask("fresh", [7] * 14) == 0


def test_the_longest_prefix_wins():
    fleet = Fleet(2)
    fleet.submit("short", [*PREFIX[:8], 1, 1, 1, 1, 1])
    assert fleet.place("other", [1] * 6) == 1
    fleet.run()
    fleet.engines[1].pin_prefix("long", PREFIX)
    fleet.run()
    assert fleet.ask("long prompt", [*PREFIX, 5]) == 1
    assert fleet.ask("short prompt", [*PREFIX[:4], 6, 6, 6, 6]) == 0  # both know a block: the first
    assert fleet.ask("eight", [*PREFIX[:8], 1, 1, 1, 1, 7]) == 0  # twelve tokens here, eight there


def test_a_prefix_that_is_still_computed_samples_its_like():
    fleet = Fleet(2)
    assert fleet.place("first", [*PREFIX, 1]) == 0
    assert fleet.place("like it", [*PREFIX, 2]) == 0
    assert fleet.place("unlike", [1] * 14) == 1
    fleet.run()
    assert fleet.last("like it").usage.cached_tokens >= 12


def test_salts_keep_prompts_apart_and_together():
    fleet = Fleet(2)
    assert fleet.place("a", [*PREFIX, 1], cache_salt="a") == 0
    assert fleet.place("b", [*PREFIX, 1], cache_salt="b") == 1
    fleet.run()
    assert [fleet.ask(f"a{i}", [*PREFIX, 2], cache_salt="a") for i in range(2)] == [0, 0]
    assert [fleet.ask(f"b{i}", [*PREFIX, 2], cache_salt="b") for i in range(2)] == [1, 1]
    assert fleet.ask("none", [*PREFIX, 2]) == 0


def test_a_request_that_wants_no_cache_goes_by_load():
    fleet = Fleet(2)
    fleet.submit("first", [*PREFIX, 1])
    assert fleet.place("without", [*PREFIX, 1], use_prefix_cache=False) == 1
    fleet.run()


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"kv_policy": "reserve-oracle"}])
def test_without_a_cache_only_load_counts(options):
    fleet = Fleet(2, engine_options=options)
    assert [fleet.place(f"r{i}", [*PREFIX, i]) for i in range(4)] == [0, 1, 0, 1]
    fleet.run()
    assert fleet.tokens("r3") == expected_tokens([*PREFIX, 3], 4)


def test_a_hot_prefix_does_not_starve_the_others():
    """Each counts 1/8 of the rows and 16/256 of the slots: with three, replica 0 is more than half a one ahead."""
    fleet = Fleet(2)
    places = [fleet.place(f"r{i}", PREFIX[:12]) for i in range(9)]
    assert places == [0, 0, 0, 1, 1, 1, 0, 1, 0]
    fleet.run()
    assert all(fleet.tokens(f"r{i}") == expected_tokens(PREFIX[:12], 4) for i in range(9))


@pytest.mark.parametrize(("last_tokens", "replica"), [(5, 0), (6, 1)])
def test_half_a_replica_ahead_is_not_too_much_and_a_token_more_is(last_tokens, replica):
    """3/8 of the rows, and 32/256 of the slots: a half."""
    fleet = Fleet(2)
    for i, max_tokens in enumerate((6, 6, last_tokens)):
        assert fleet.place(f"r{i}", PREFIX[:5], max_tokens=max_tokens) == 0
    assert fleet.place("next", PREFIX[:5], max_tokens=6) == replica
    fleet.run()


def test_what_has_ended_or_was_dropped_is_no_load():
    fleet = Fleet(2)
    assert fleet.place("a", [1] * 6) == 0
    fleet.replicas.drop("a")
    assert fleet.place("b", [2] * 6) == 0
    assert fleet.replicas.abort("b")
    fleet.run()
    assert fleet.last("b").finish.reason is FinishReason.ABORT
    assert [fleet.place("c", [3] * 6), fleet.place("d", [4] * 6)] == [0, 1]
    fleet.run()


def test_a_pinned_prefix_is_everywhere_so_that_load_decides():
    fleet = Fleet(2)
    pinned = fleet.replicas.pin_prefix("system", PREFIX)
    fleet.run()
    assert pinned.result(timeout=0) == 12
    assert [fleet.place(f"r{i}", [*PREFIX, i]) for i in range(4)] == [0, 1, 0, 1]
    fleet.run()
    assert [fleet.events[f"r{i}"][-1].usage.cached_tokens >= 12 for i in range(4)] == [True] * 4


def test_the_tokens_of_a_seeded_request_do_not_depend_on_where_it_runs():
    fleet, alone = Fleet(3), Fleet(1)
    for one in (fleet, alone):
        for i in range(6):
            one.submit(f"r{i}", [i] * 5, temperature=1.0, max_tokens=8)
        one.run()
    assert {name: fleet.tokens(name) for name in fleet.events} == {name: alone.tokens(name) for name in alone.events}
    assert len({load.num_requests_ended for load in fleet.replicas.replica_loads()}) == 1
