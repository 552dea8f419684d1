"""Policies in the engine: what goes first and what stays, in both tiers, beside pins and windows; tokens are same."""

from collections import Counter
from typing import get_args

import pytest

from jpaged.config import EngineConfig, EvictionPolicyName
from jpaged.engine.kv_cache.blocks import block_key, root_block_hash
from jpaged.engine.kv_cache.eviction.policies import EVICTION_POLICIES
from jpaged.errors import InternalError, InvalidArgument
from jpaged.testing import FakeExecutor, expected_tokens
from tests.engine.harness import Harness
from tests.engine.lives import WINDOWS, Life

POLICIES = ("lru", *EVICTION_POLICIES)
SYSTEM = list(range(100, 116))


def make(policy, *, num_blocks=24, num_host_blocks=0, windows=(None,), **options):
    executor = type("Windowed", (FakeExecutor,), {"windows": windows})(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        num_host_blocks=num_host_blocks,
    )
    return Harness(executor=executor, eviction_policy=policy, **options)


def ask(h, name, prompt, **sampling):
    """Serves one request to its end; the tokens of its prompt that were found."""
    h.submit(name, prompt, max_tokens=2, **sampling)
    h.run()
    assert h.tokens(name) == expected_tokens(prompt, 2)
    return h.last(name).usage.cached_tokens


def flood(h, count, first=0):
    """Prompts that nobody sends again, of four full blocks each."""
    for i in range(first, first + count):
        ask(h, f"flood {i}", [(7 * i + j * j) % 97 for j in range(18)])


def where(h, tokens, salt=""):
    """The blocks of a text on the device, and which of them host memory has; None where it has not."""
    prefixes, parent, on_device, in_host = h.engine.prefixes, root_block_hash(salt), [], []
    for end in range(4, len(tokens) + 1, 4):
        parent = block_key(parent, tokens[end - 4 : end])
        on_device.append(prefixes.cache.find(parent))
        in_host.append(prefixes._host.blocks.get(parent))
    return on_device, in_host


# --- what stays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_that_many_begin_with_outlives_a_flood_but_by_least_recently_used(policy):
    h = make(policy)
    for i in range(6):
        ask(h, f"r{i}", [*SYSTEM, 40 + i, 41, 42])
    flood(h, 12)
    assert ask(h, "again", [*SYSTEM, 50, 51]) == (0 if policy == "lru" else 16)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_end_of_a_chain_goes_before_what_it_follows(policy):
    h = make(policy, num_blocks=12)
    text = list(range(60, 92))
    ask(h, "long", text)
    lens = []
    for i in range(3):
        ask(h, f"other {i}", [120 + 9 * i + j for j in range(9)])
        on_device, _ = where(h, text)
        lens.append(sum(block_id is not None for block_id in on_device))
        assert None not in on_device[: lens[-1]], "a block was kept behind a gap"
    assert lens == sorted(lens, reverse=True) and 0 < lens[-1] < 8


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_blocks_that_hold_no_prefix_go_before_any_that_does(policy):
    h = make(policy, num_blocks=12)
    text = list(range(60, 85))
    ask(h, "cached", text)  # six full blocks
    for i in range(20):
        ask(h, f"uncached {i}", [5, 6, 7, 8, i], use_prefix_cache=False)  # two blocks, neither of which is kept
    assert None not in where(h, text[:24])[0]


def test_a_block_that_is_seen_by_few_goes_before_one_that_was_used_earlier():
    h = make("lfu", num_blocks=12)
    often, once = list(range(60, 69)), list(range(70, 79))
    for i in range(3):
        ask(h, f"often {i}", often)
    ask(h, "once", once)
    ask(h, "room", list(range(90, 123)))
    assert None not in where(h, often[:8])[0] and None in where(h, once[:8])[0]


def test_a_tenant_whose_prompts_never_come_back_takes_nothing_from_one_whose_do():
    h = make("worth", num_blocks=64)
    talk = [list(range(20 * i, 20 * i + 17)) for i in range(6)]
    hits: Counter[bool] = Counter()
    for turn in range(60):
        hits[turn >= 30] += ask(h, f"talk {turn}", talk[turn % 6], tenant="a", cache_tenant="a")
        for i in range(3):
            prompt = [(turn * 3 + i + j * j) % 97 for j in range(24)]
            ask(h, f"bulk {turn} {i}", [turn, i, *prompt], tenant="b", cache_tenant="b")
    assert hits[True] == 30 * 16


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6, None)])
def test_what_conversations_begin_with_is_known_as_shared_beside_windows_too(windows):
    h = make("worth", num_blocks=60, windows=windows)
    for i in range(3):
        h.submit(f"r{i}", [*SYSTEM, 40 + i, 41, 42, 43, 44, 45], max_tokens=2)
        h.run()
    blocks = h.engine.prefixes._ranked._policy._blocks.values()
    shared = [block.entry.index for block in blocks if block.is_shared]
    assert sorted(shared) == sorted([0, 1, 2, 3] + [2, 3] * (len(windows) - 1))


# --- tiers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_host_memory_keeps_by_the_same_policy(policy):
    h = make(policy, num_blocks=24, num_host_blocks=16)
    for i in range(6):
        ask(h, f"r{i}", [*SYSTEM, 40 + i, 41, 42])
    h.engine._loop.memory.limiter.leave(17)  # what is set aside goes on to host memory, the system's prompt too
    h.engine._loop.memory.limiter.leave(24)
    flood(h, 12)
    on_device, in_host = where(h, SYSTEM)
    assert all(device is not None or host is not None for device, host in zip(on_device, in_host, strict=True))
    assert ask(h, "again", [*SYSTEM, 50, 51]) == 16


def test_what_host_memory_keeps_is_cheaper_to_lose():
    h = make("worth", num_blocks=16, num_host_blocks=64)
    first, second = list(range(60, 77)), list(range(80, 97))
    ask(h, "first", first)
    for num_blocks in (0, 16):  # all is set aside for a moment, so that what was cached goes on to host memory
        h.engine._loop.memory.limiter.leave(num_blocks)
    assert where(h, first[:16])[0] == [None] * 4 and None not in where(h, first[:16])[1]
    ask(h, "second", second)
    ask(h, "second again", second)
    ask(h, "first again", first)  # from host memory, which has it still: as often seen as the second, and later
    ask(h, "room", list(range(120, 166)))  # twelve blocks, of which eight hold nothing
    assert None not in where(h, second[:16])[0]
    assert where(h, first[:16])[0] == [None] * 4 and None not in where(h, first[:16])[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_forgotten_is_found_in_no_tier_and_its_places_go_first(policy):
    h = make(policy, num_blocks=24, num_host_blocks=16)
    for i in range(4):
        ask(h, f"r{i}", [*SYSTEM, 40 + i, 41, 42])
    flood(h, 6)
    future = h.engine.reset_prefix_cache()
    h.step()
    assert future.result() > 24
    use = h.engine._loop.memory.use()
    assert (use.num_free, use.num_cached) == (24, 0)
    assert where(h, SYSTEM) == ([None] * 4, [None] * 4)
    assert ask(h, "again", [*SYSTEM, 50, 51]) == 0
    assert ask(h, "and again", [*SYSTEM, 50, 51]) == 16


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_pinned_blocks_are_no_choice(policy):
    h = make(policy)
    pinned = h.engine.pin_prefix("system", SYSTEM)
    h.run()
    assert pinned.result() == 16
    flood(h, 12)
    assert ask(h, "again", [*SYSTEM, 50, 51]) == 16
    assert h.engine.unpin_prefix("system")
    h.step()
    h.engine.check()


# --- the whole ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.thinned(3)
def test_lives_in_a_short_memory_by_every_policy(policy):
    num_hits = 0
    for seed in range(6):
        life = Life(6000 + seed, [(None,), *WINDOWS][seed % 7], max_loras=seed % 3, eviction_policy=policy)
        life.run()
        num_hits += life.h.engine.load().num_prefix_hit_tokens
    assert num_hits > 10


@pytest.mark.long
@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_many_lives_in_a_short_memory_by_every_policy(policy):
    for seed in range(100):
        Life(7000 + seed, [(None,), *WINDOWS][seed % 7], max_loras=seed % 4, eviction_policy=policy).run()


def test_a_policy_that_is_not_told_of_a_block_is_found_out():
    h = make("worth")
    ask(h, "r", SYSTEM)
    ranked = h.engine.prefixes._ranked
    slot = next(iter(ranked._ranked))
    ranked.discard(slot)
    with pytest.raises(
        InternalError, match=rf"blocks \[{slot}\]: tier and policy disagree on whether they hold prefixes"
    ):
        h.engine.check()


def test_a_policy_that_thinks_a_held_block_free_is_found_out():
    h = make("2q", num_host_blocks=8)
    ask(h, "r", SYSTEM)
    ranked = h.engine.prefixes._ranked
    ranked._blank[next(iter(ranked._ranked))] = None
    with pytest.raises(InternalError, match=r"free twice|are not 24"):
        h.engine.check()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize(
    ("option", "value", "named"),
    [("kv_policy", "reserve-max", "kv_policy reserve-max"), ("enable_prefix_caching", False, "enable_prefix_caching")],
)
def test_a_policy_without_anything_to_choose_from_is_refused(policy, option, value, named):
    with pytest.raises(InvalidArgument, match=f"eviction_policy.*{policy}.*{named}"):
        EngineConfig.load({"eviction_policy": policy, option: value})
    assert {*get_args(EvictionPolicyName)} == {"auto", "lru", *EVICTION_POLICIES}
    EngineConfig.load({option: value})  # nobody asked for a policy
    assert EngineConfig.load({"eviction_policy": policy}).cache.eviction_policy == policy


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_how_often_a_block_was_seen_is_known_of_one_that_comes_back_from_host_memory(policy):
    h = make(policy, num_blocks=16, num_host_blocks=64)
    for i in range(3):
        ask(h, f"{i}", [*SYSTEM, 1])
    ask(h, "large", list(range(20, 80)))  # which has the whole pool
    (on_device, in_host), ranked = where(h, SYSTEM), h.engine.prefixes._ranked
    assert on_device == [None] * 4
    assert None not in in_host
    assert ask(h, "again", [*SYSTEM, 1]) == 16
    (on_device, _) = where(h, SYSTEM)
    assert [ranked.times_seen(block_id) for block_id in on_device] == [4] * 4
