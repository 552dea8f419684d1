"""No tenant sees in its hits what another has asked for, however the blocks are kept, shared or found."""

import itertools

import pytest

from jpaged.engine.kv_cache.blocks import root_block_hash
from jpaged.testing import FakeExecutor, expected_tokens
from tests.engine.data_parallel.fleet import PREFIX, Fleet
from tests.engine.harness import Harness

PROMPT = list(range(50, 62))  # three blocks of four


def cached_tokens(h, name):
    return h.last(name).usage.cached_tokens


def make(**sizes):
    return Harness(executor=FakeExecutor(block_size=4, **{"num_blocks": 64, "max_model_len": 32, **sizes}))


def test_no_two_pairs_of_tenant_and_salt_have_one_root():
    words = ["", "a", "b", "ab", "abc", "bc", "c", "\0", "a\0", "\0a", "1\0", "\0\0\0\1a", "é"]
    pairs = list(itertools.product(words, words))
    assert len({root_block_hash(salt, tenant) for salt, tenant in pairs}) == len(pairs)
    assert root_block_hash("salt", "") == root_block_hash("salt")


SHAPES = [{}, {"n": 3, "temperature": 1.0, "seed": 1}, {"beam_width": 3}, {"cache_salt": "s"}]


@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "n", "beams", "salt"])
@pytest.mark.parametrize("other", SHAPES, ids=["plain", "n", "beams", "salt"])
def test_one_tenants_prompt_is_no_hit_for_another(shape, other):
    h = make()
    h.submit("a", PROMPT, max_tokens=6, cache_tenant="a", **shape)
    h.run()
    for tenant in ("b", "", "aa"):
        h.submit(f"by {tenant}", [*PROMPT, 1], max_tokens=4, cache_tenant=tenant, **other)
        h.run()
        assert cached_tokens(h, f"by {tenant}") == 0
    h.submit("again", [*PROMPT, 1], max_tokens=4, cache_tenant="a", **shape)
    h.run()
    assert cached_tokens(h, "again") == 12


def test_nor_is_a_part_of_a_block_or_one_that_is_being_computed():
    h = make()
    h.submit("a", PROMPT, max_tokens=1, cache_tenant="a")
    h.submit("b", PROMPT, max_tokens=1, cache_tenant="b")
    h.run()
    assert cached_tokens(h, "b") == 0
    h.submit("part", PROMPT[:7], max_tokens=1, cache_tenant="c")
    h.run()
    assert cached_tokens(h, "part") == 0
    h.submit("part of a", PROMPT[:7], max_tokens=1, cache_tenant="a")
    h.run()
    assert cached_tokens(h, "part of a") == 6


def test_nor_one_that_has_gone_to_host_memory():
    h = make(num_blocks=8, num_host_blocks=64)
    h.submit("a", PROMPT, max_tokens=1, cache_tenant="a")
    h.run()
    for i in range(4):  # takes the pool's blocks
        h.submit(f"noise{i}", [i] * 28, max_tokens=4, cache_tenant="noise")
        h.run()
    for tenant, expected in (("b", 0), ("", 0), ("a", 12)):
        h.submit(f"by {tenant}", [*PROMPT, 1], max_tokens=2, cache_tenant=tenant)
        h.run()
        assert cached_tokens(h, f"by {tenant}") == expected
        assert h.tokens(f"by {tenant}") == expected_tokens([*PROMPT, 1], 2)


def test_a_request_goes_where_its_own_tenants_prefix_is():
    fleet = Fleet()
    assert fleet.ask("a0", PREFIX, cache_tenant="a") == 0
    held = [fleet.place(f"busy{i}", [i] * 3, max_tokens=30) for i in range(2)]
    assert held == [0, 1]
    fleet.submit("more", [9] * 3, max_tokens=60)
    assert fleet.place("of b", PREFIX, cache_tenant="b") == 1
    assert fleet.place("of a", PREFIX, cache_tenant="a") == 0
    fleet.run()
    assert fleet.last("of a").usage.cached_tokens == 12
    assert fleet.last("of b").usage.cached_tokens == 0


def test_a_prefix_of_a_tenant_is_pinned_in_every_replica():
    fleet = Fleet()
    pinned = fleet.replicas.pin_prefix("system", PREFIX, tenant="a")
    fleet.run()
    assert pinned.result(timeout=0) == 12
    taken = fleet.replicas.pin_prefix("system", PREFIX, tenant="b")
    fleet.run()
    assert taken.result(timeout=0) == 12
    assert not fleet.replicas.unpin_prefix("system")
    assert fleet.replicas.unpin_prefix("system", "a")
    assert fleet.replicas.unpin_prefix("system", "b")
    fleet.run()
    assert fleet.is_at_rest()
