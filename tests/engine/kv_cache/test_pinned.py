"""A pinned prefix stays, whatever the load, until it is unpinned; and never takes what others were promised."""

import pytest

from jpaged.engine.kv_cache.pinned import pin_limit
from jpaged.errors import AlreadyExists, Cancelled, InvalidArgument, Unavailable, Unsupported
from jpaged.testing import FakeExecutor, expected_tokens
from tests.engine.groups import computed, group_of, paged_memory
from tests.engine.harness import Harness

PREFIX = list(range(50, 60))


def make(num_blocks=12, **options):
    options.setdefault("max_pinned_blocks", num_blocks - 6)
    return Harness(executor=FakeExecutor(block_size=4, num_blocks=num_blocks, max_model_len=24), **options)


def cached_tokens(h, name):
    return h.last(name).usage.cached_tokens


def test_full_blocks_are_pinned_and_survive_everything_that_evicts_others():
    h = make()
    future = h.engine.pin_prefix("system", PREFIX)
    h.run()
    assert future.result(timeout=0) == 8
    assert h.engine.load().num_blocks_used == 2
    for i in range(8):
        h.submit(f"noise{i}", [i] * 16, max_tokens=8)
    h.run()
    h.submit("a", [*PREFIX, 1, 2], max_tokens=4)
    h.run()
    assert cached_tokens(h, "a") == 8
    assert h.tokens("a") == expected_tokens([*PREFIX, 1, 2], 4)


def test_an_unpinned_prefix_is_evicted_like_others():
    h = make()
    h.engine.pin_prefix("system", PREFIX)
    h.run()
    assert h.engine.unpin_prefix("system")
    assert not h.engine.unpin_prefix("system")
    for i in range(8):
        h.submit(f"noise{i}", [i] * 16, max_tokens=8)
    h.run()
    h.submit("a", [*PREFIX, 1, 2], max_tokens=4)
    h.run()
    assert cached_tokens(h, "a") == 0
    assert h.engine.load().num_blocks_used == 0


def test_a_prefix_that_is_cached_already_is_pinned_where_it_is():
    h = make()
    h.submit("before", PREFIX[:8], max_tokens=1)
    h.run()
    future = h.engine.pin_prefix("system", PREFIX[:8])
    h.run()
    assert future.result(timeout=0) == 8
    for i in range(8):
        h.submit(f"noise{i}", [i] * 16, max_tokens=8)
    h.run()
    h.submit("a", [*PREFIX, 1, 2], max_tokens=1)
    h.run()
    assert cached_tokens(h, "a") == 8


def test_two_names_may_hold_one_prefix():
    h = make()
    first = h.engine.pin_prefix("one", PREFIX)
    second = h.engine.pin_prefix("two", PREFIX)
    h.run()
    assert first.result(timeout=0) == second.result(timeout=0) == 8
    assert h.engine.load().num_blocks_used == 2
    h.engine.unpin_prefix("one")
    h.step()
    assert h.engine.load().num_blocks_used == 2


def test_a_pinned_prefix_is_for_requests_of_its_salt():
    h = make()
    h.engine.pin_prefix("system", PREFIX, salt="tenant")
    h.run()
    h.submit("a", [*PREFIX, 1], max_tokens=1, cache_salt="tenant")
    h.submit("b", [*PREFIX, 1], max_tokens=1)
    h.run()
    assert (cached_tokens(h, "a"), cached_tokens(h, "b")) == (8, 0)


def test_a_taken_name_is_refused_while_it_is_computed_and_while_it_is_pinned():
    h = make()
    h.engine.pin_prefix("system", PREFIX)
    with pytest.raises(AlreadyExists, match="prefix 'system' is pinned"):
        h.engine.pin_prefix("system", [1] * 4).result(timeout=0)
    assert not h.engine.unpin_prefix("system")  # not yet
    h.run()
    with pytest.raises(AlreadyExists, match="prefix 'system' is pinned"):
        h.engine.pin_prefix("system", [1] * 4).result(timeout=0)
    assert h.engine.unpin_prefix("system")
    again = h.engine.pin_prefix("system", [1] * 4)
    h.run()
    assert again.result(timeout=0) == 4


@pytest.mark.parametrize(
    ("token_ids", "problem"),
    [
        ([1, 2, 3], "3 tokens do not fill a block of 4: there is nothing to pin"),
        ([], "0 tokens do not fill a block of 4"),
        ([1] * 24, r"24 tokens are not below max_model_len \(24\)"),
        ([1, 2, 3, 257], "257 is not a token id from 0 to 256"),
    ],
)
def test_a_prefix_that_cannot_be_pinned_is_refused_at_once(token_ids, problem):
    with pytest.raises(InvalidArgument, match=problem):
        make().engine.pin_prefix("system", token_ids).result(timeout=0)


def test_a_prefix_beyond_what_may_be_pinned_is_refused_with_the_numbers():
    h = make(num_blocks=9)
    first = h.engine.pin_prefix("one", [1] * 8)
    h.run()
    assert first.result(timeout=0) == 8
    second = h.engine.pin_prefix("two", [2] * 8)
    h.run()
    problem = r"2 blocks, added to 2 pinned ones, exceed max_pinned_blocks \(3\)"
    with pytest.raises(InvalidArgument, match=problem):
        second.result(timeout=0)
    assert h.engine.load().num_blocks_used == 2


def test_a_prefix_that_would_starve_a_request_in_flight_is_refused():
    h = make(num_blocks=12)
    h.submit("wide", [7] * 4, max_tokens=19, n=2, temperature=1.0, seed=1)
    future = h.engine.pin_prefix("one", [1] * 8)
    h.run()
    with pytest.raises(InvalidArgument, match="2 pinned blocks would leave 10 of 12; a request in flight may need 11"):
        future.result(timeout=0)
    retried = h.engine.pin_prefix("one", [1] * 8)
    h.run()
    assert retried.result(timeout=0) == 8


def test_a_request_that_no_longer_fits_beside_the_pinned_is_refused_when_it_arrives():
    h = make(num_blocks=12)
    h.engine.pin_prefix("one", [1] * 8)
    h.run()
    h.submit("wide", [7] * 4, max_tokens=19, n=2, temperature=1.0, seed=1)
    h.run()
    assert "can never fit" in str(h.last("wide").error)


def test_nothing_can_be_pinned_without_a_prefix_cache():
    for options in ({"enable_prefix_caching": False}, {"kv_policy": "reserve-max"}):
        with pytest.raises(Unsupported, match="the prefix cache is off"):
            make(**options).engine.pin_prefix("system", PREFIX).result(timeout=0)


def test_a_prompt_over_max_cached_tokens_cannot_be_pinned():
    with pytest.raises(InvalidArgument, match=r"10 tokens exceed max_cached_tokens \(9\)"):
        make(max_cached_tokens=9).engine.pin_prefix("system", PREFIX).result(timeout=0)


def test_an_aborted_or_failed_computation_frees_the_name():
    h = make()
    future = h.engine.pin_prefix("system", PREFIX)
    assert h.engine.abort("pin_prefix/system/0")
    h.run()
    with pytest.raises(Cancelled):
        future.result(timeout=0)
    late = h.engine.pin_prefix("system", PREFIX)
    h.engine.stop()
    with pytest.raises(Unavailable):
        late.result(timeout=0)
    with pytest.raises(Unavailable):
        h.engine.pin_prefix("system", PREFIX).result(timeout=0)


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_a_prefix_that_lost_its_blocks_with_its_token_in_flight_is_computed_again(preemption_mode):
    # One step computes the prompt of three samples and the prefix. The next is decided before the prefix has its token:
    # the samples write to the block that they share, which takes two copies, and one block is free.
    executor = FakeExecutor(block_size=4, num_blocks=5, max_model_len=12, num_host_blocks=8)
    h = Harness(executor=executor, preemption_mode=preemption_mode, max_pinned_blocks=2)
    h.submit("a", [1, 2, 3, 4, 5, 6], max_tokens=2, n=3, temperature=1.0, seed=5)
    future = h.engine.pin_prefix("system", PREFIX[:8])
    h.run()
    assert h.engine.load().num_preemptions > 0
    assert future.result(timeout=0) == 8
    assert h.engine.load().num_blocks_used == 2
    expected = [expected_tokens([1, 2, 3, 4, 5, 6], 2, seed=5, sequence_index=i) for i in range(3)]
    assert [h.tokens("a", i) for i in range(3)] == expected


def test_a_block_that_was_a_duplicate_when_it_was_filled_is_pinned_when_the_other_is_gone():
    memory = paged_memory(6)
    assert memory.prefixes is not None
    first, second = group_of(8), group_of(8)
    memory.release(computed(memory, first).live[0])
    computed(memory, second)  # shares the first block and copies the second, whose last token has to run
    memory.prefixes.register_full_blocks(second.live[0])
    computed(memory, group_of(16, first=100))  # takes the first one's second block
    assert memory.prefixes.pin("system", second.live[0]) == 8
    assert len(memory.prefixes.pinned_blocks) == 2


def test_no_error_names_a_request_of_somebody_else():
    h = make(num_blocks=12)
    h.submit("secret", [7] * 4, max_tokens=19, n=2, temperature=1.0, seed=1)
    future = h.engine.pin_prefix("one", [1] * 8)
    h.run()
    assert "secret" not in str(future.exception(timeout=0))


def test_every_pin_counts_with_all_of_its_blocks_also_while_it_is_computed():
    h = make(num_blocks=20, max_pinned_blocks=5)
    futures = [h.engine.pin_prefix(f"p{i}", PREFIX) for i in range(3)]
    assert "max_pinned_blocks (5)" in str(futures[2].exception(timeout=0))
    h.run()
    assert [future.result(timeout=0) for future in futures[:2]] == [8, 8]
    h.engine.unpin_prefix("p0")
    third = h.engine.pin_prefix("p2", PREFIX)
    h.run()
    assert third.result(timeout=0) == 8


def test_a_refused_or_aborted_pin_holds_nothing_against_others():
    h = make(num_blocks=20, max_pinned_blocks=2)
    for number in range(3):
        future = h.engine.pin_prefix("p", PREFIX)
        assert h.engine.abort(f"pin_prefix/p/{number}")
        h.run()
        assert isinstance(future.exception(timeout=0), Cancelled)
        assert isinstance(h.engine.pin_prefix("long", [1] * 12).exception(timeout=0), InvalidArgument)
    future = h.engine.pin_prefix("p", PREFIX)
    h.run()
    assert future.result(timeout=0) == 8


def test_a_quarter_of_the_pool_may_be_pinned_unless_told_otherwise_and_the_longest_request_always_runs():
    geometry = FakeExecutor(block_size=4, num_blocks=40, max_model_len=24).geometry
    assert pin_limit(None, geometry) == 10
    assert pin_limit(34, geometry) == 34
    with pytest.raises(InvalidArgument, match=r"max_pinned_blocks: 35 is over 34: .* \(24\) may need 6 of 40 blocks"):
        pin_limit(35, geometry)
    assert pin_limit(None, FakeExecutor(block_size=4, num_blocks=7, max_model_len=24).geometry) == 1
    assert pin_limit(None, FakeExecutor(block_size=4, num_blocks=4, max_model_len=24).geometry) == 0
    h = make(num_blocks=7, max_pinned_blocks=1)
    h.engine.pin_prefix("one", [1] * 4)
    h.run()
    h.submit("longest", [2] * 12, max_tokens=12)
    h.run()
    assert len(h.tokens("longest")) == 12


def test_a_pinned_prefix_and_its_name_are_of_a_tenant():
    h = make(num_blocks=20)
    mine, theirs = h.engine.pin_prefix("system", PREFIX, tenant="a"), h.engine.pin_prefix("system", PREFIX, tenant="b")
    h.run()
    assert (mine.result(timeout=0), theirs.result(timeout=0)) == (8, 8)
    assert h.engine.load().num_blocks_used == 4
    for tenant in ("a", "b", ""):
        h.submit(f"of {tenant}", [*PREFIX, 1], max_tokens=1, cache_tenant=tenant)
    h.run()
    assert [cached_tokens(h, f"of {tenant}") for tenant in ("a", "b", "")] == [8, 8, 0]
    assert not h.engine.unpin_prefix("system")
    assert h.engine.unpin_prefix("system", "a")
    assert not h.engine.unpin_prefix("system", "a")
    h.step()
    assert h.engine.load().num_blocks_used == 2
