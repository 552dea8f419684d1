"""Every policy chooses what a slow model of it chooses, whatever happens to a tier."""

import random
from collections.abc import Sized
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.kv_cache.eviction.cost_aware import BlockCosts, CandidateBuckets
from jpaged.engine.kv_cache.eviction.free_list import CachedBlock, RankedFreeList
from jpaged.engine.kv_cache.eviction.policies import EVICTION_POLICIES, Eviction
from tests.engine.kv_cache.eviction.slow import SlowLfu, SlowTwoQueues, SlowWorth

COSTS = BlockCosts(first_s=1.0, further_s=0.4, fetch_s=0.3)
OWNERS = (b"a", b"b", b"c")
REQUEST = st.tuples(st.just("request"), st.integers(0, 8), st.integers(1, 6), st.integers(0, 3))
ACTS = st.lists(
    st.one_of(
        REQUEST,
        REQUEST,
        st.tuples(st.just("release"), st.integers(0, 3)),
        st.tuples(st.just("release"), st.integers(0, 3)),
        st.tuples(st.just("forget"), st.integers(0, 30)),
        st.tuples(st.just("look"), st.integers(0, 30)),
    ),
    max_size=150,
)


def fetch_s(key):
    """Two tiers below have a fifth of the blocks each, the second of which is slower than to compute some again."""
    return {0: COSTS.fetch_s, 1: 1.4}.get(sum(key) % 5)


def slow_model(name, num_slots):
    return {
        "lfu": SlowLfu,
        "2q": lambda: SlowTwoQueues(num_slots),
        "worth": lambda: SlowWorth(num_slots, COSTS, fetch_s),
    }[name]()


class Pair:
    """A policy, and its slow model beside it, which are told the same and have to choose the same."""

    def __init__(self, policy, slow):
        self.policy, self.slow, self.num_chosen = policy, slow, 0

    def __getattr__(self, verb):
        def both(*words, **options):
            fast, slow = (getattr(one, verb)(*words, **options) for one in (self.policy, self.slow))
            assert fast == slow
            return fast

        return both

    def victim(self):
        slot, allowed = self.policy.victim(), self.slow.victims()
        assert slot in allowed
        self.slow.on_acquire(slot)
        self.num_chosen += 1
        return slot


class Tier:
    """A tier of a few places, and requests that come, hold chains of blocks, and go."""

    def __init__(self, name, num_slots):
        self.pair = Pair(Eviction(name, COSTS).policy(num_slots, fetch_s), slow_model(name, num_slots))
        self.num_slots = num_slots
        self.free = RankedFreeList(self.pair, range(num_slots))
        self.slots, self.keys = {}, {}
        self.holders = [0] * num_slots
        self.held = []

    def request(self, family, length, branch):
        """The chain of a family, which after two blocks is one of several."""
        names = [f"{family}.{slot}.{branch if slot > 1 else ''}".encode() for slot in range(length)]
        known = []
        for name in names:
            if name not in self.slots:
                break
            known.append(self.slots[name])
        if len(self.free) < length:
            return
        for slot in known:
            if not self.holders[slot]:
                del self.free[slot]
            self.holders[slot] += 1
        self.free.found(known)
        chain = known
        for i in range(len(known), length):
            slot, _ = self.free.popitem(last=False)
            if slot in self.keys:
                assert self.free.evicted(slot).key == self.keys[slot]
                del self.slots[self.keys.pop(slot)]
            self.holders[slot] = 1
            chain.append(slot)
            if names[i] not in self.slots:
                self.slots[names[i]], self.keys[slot] = slot, names[i]
                self.free.enter(slot, CachedBlock(names[i], names[i - 1] if i else None, i, OWNERS[family % 3]))
        self.held.append(chain)

    def release(self, which):
        if self.held:
            for slot in reversed(self.held.pop(which % len(self.held))):
                self.holders[slot] -= 1
                if not self.holders[slot]:
                    self.free[slot] = None

    def forget(self, which):
        slot = which % self.num_slots
        if slot in self.keys:
            del self.slots[self.keys.pop(slot)]
            self.free.discard(slot)

    def look(self, which):
        """Somebody holds a block for a moment, and is no request."""
        slot = which % self.num_slots
        if not self.holders[slot]:
            del self.free[slot]
            self.free[slot] = None

    def live(self, acts):
        for verb, *words in acts:
            getattr(self, verb)(*words)
            self.free.check(set(self.keys), lambda slot: not self.holders[slot])
            assert len(self.free) == self.holders.count(0)
            assert sorted(self.free) == [slot for slot, count in enumerate(self.holders) if not count]


@pytest.mark.parametrize("name", EVICTION_POLICIES)
@given(num_slots=st.integers(4, 30), acts=ACTS)
@settings(max_examples=120)
def test_a_policy_chooses_as_its_slow_model(name, num_slots, acts):
    Tier(name, num_slots).live(acts)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
@pytest.mark.parametrize("num_slots", [6, 24, 130])
def test_a_long_life_has_many_choices_all_as_the_slow_model(name, num_slots):
    draw, tier = random.Random(num_slots), Tier(name, num_slots)
    for _ in range(1500):
        family = min(draw.randrange(num_slots), draw.randrange(num_slots))
        acts = [("request", family, draw.randint(1, 6), draw.randrange(4)), ("release", draw.randrange(4))]
        tier.live([draw.choice([*acts, *acts, ("look", draw.randrange(num_slots))])])
        if draw.random() < 0.02:
            tier.live([("forget", draw.randrange(num_slots))])
    assert tier.pair.num_chosen > 200


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_what_a_policy_keeps_does_not_grow_where_nothing_has_to_go(name):
    policy = EVICTION_POLICIES[name](100, COSTS, fetch_s)
    for slot in range(4):
        policy.on_insert(slot, CachedBlock(bytes([slot]), bytes([slot - 1]) if slot else None, slot, b"a"))
        policy.on_free(slot)
    sizes = []
    for _ in range(8):
        for _ in range(500):
            for slot in range(4):
                policy.on_acquire(slot)
            policy.on_hit(range(4))
            for slot in reversed(range(4)):
                policy.on_free(slot)
        sizes.append(num_kept(policy))
    assert policy.candidates() == {0, 1, 2, 3}
    assert max(sizes) < 600


def num_kept(thing):
    """The entries of all dicts and lists of a policy, and of what it has of its own."""
    values = [*vars(thing).values()]
    of_its_own = [value for value in values if isinstance(value, CandidateBuckets)]
    return sum(len(value) for value in values if isinstance(value, Sized)) + sum(map(num_kept, of_its_own))


SPANS = (0, 8, 16, 24, 32)
"""Where buckets of spans 0 to 39 begin in the end when it is span 100: those at least 64 old are of eight spans."""


@pytest.mark.parametrize("most", [1, 7, 10_000])
def test_old_lots_are_put_together_a_bounded_part_at_a_time(monkeypatch, most):
    """Whatever is moved when, none is lost, the oldest stay in front, and in the end it is as if it were at once."""
    monkeypatch.setattr("jpaged.engine.kv_cache.eviction.cost_aware._MOST_MOVED", most)
    choose = random.Random(0)
    buckets: Any = CandidateBuckets(span=4)
    freed_at = {slot: slot for slot in range(160)}
    for slot, when in freed_at.items():
        buckets.add(slot, choose.randrange(2), 0, when)
    passed = choose.sample(range(100), 40)
    for slot in passed:
        buckets.get_bucket(slot).pass_over(slot)
    for slot in passed[:20]:
        buckets.get_bucket(slot).mark_leaf(slot)
    for slot in passed[10:15]:  # gone while it is ripe
        buckets.remove(slot)
        del freed_at[slot]
    now, ripe = 400, set(passed[:10] + passed[15:20])
    for _ in range(len(freed_at) + 50):
        before = {slot: buckets.get_bucket(slot) for slot in freed_at}
        buckets.settle(now)
        assert sum(buckets.get_bucket(slot) is not before[slot] for slot in freed_at) <= most
        assert sorted(slot for bucket in buckets for slot in (*bucket.slots, *bucket.passed)) == sorted(freed_at)
        for bucket in buckets:
            assert all(buckets.get_bucket(slot) is bucket for slot in (*bucket.slots, *bucket.passed))
            assert list(bucket.slots.values()) == sorted(bucket.slots.values())
            assert buckets.get_begin(bucket) <= min((*bucket.slots.values(), *bucket.passed.values()))
    assert sorted((bucket.kind, bucket.span) for bucket in buckets) == [
        (kind, span) for kind in (0, 1) for span in SPANS
    ]
    found = set()
    for bucket in buckets:
        while (slot := bucket.oldest()) is not None:
            found.add(slot)
            bucket.remove(slot)
    assert found == {slot for slot in freed_at if slot not in passed or slot in ripe}
