"""Who gets a request, and what is remembered for it."""

from collections import Counter

import grpc
import numpy as np
import pytest

from jpaged.capacity.fleet.beginnings import Beginnings
from jpaged.capacity.fleet.routing import RULES, SHARE_AHEAD, SLACK, choose
from jpaged.client.routing import endpoints as router
from jpaged.client.routing.endpoints import Endpoint, Endpoints

GENERATOR = np.random.default_rng(0)


def ints(*values):
    return np.array(values, np.int64)


def test_random_asks_nothing():
    found = Counter(choose("random", ints(9, 0, 0), None, draw) for draw in np.arange(0, 1, 0.01))
    assert found.keys() == {0, 1, 2}
    assert max(found.values()) - min(found.values()) <= 1


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_the_least_busy_and_of_equals_any(draw):
    assert choose("least-load", ints(3, 1, 2), None, draw) == 1
    assert choose("least-load", ints(1, 3, 1), None, draw) == (0 if draw < 0.5 else 2)


def test_a_prefix_is_followed_however_busy_its_replica_is_and_with_load_while_it_is_not_ahead():
    matched = ints(0, 64, 64, 0)
    assert choose("prefix", ints(0, 90, 80, 0), matched, 0.5) == 2
    assert choose("prefix+load", ints(0, 2, 2, 0), matched, 0.9) == 2
    assert choose("prefix+load", ints(1, 90, 2, 0), matched, 0.9) == 2
    assert choose("prefix+load", ints(1, 90, 80, 0), matched, 0.9) == 3


def test_without_a_prefix_the_least_busy_is_taken():
    for rule in ("prefix", "prefix+load"):
        assert choose(rule, ints(4, 3, 2), ints(0, 0, 0), 0.5) == 2


@pytest.mark.parametrize("rule", RULES)
def test_one_replica_gets_all(rule):
    assert choose(rule, ints(7), ints(0), 0.999) == 0


def test_the_bound_is_the_routers():
    assert (SLACK, SHARE_AHEAD) == (router._SLACK, router._SHARE_AHEAD)


class Longest:
    """A placement by what each has, then by load, as a router places that knows beginnings."""

    def __init__(self, matched):
        self.matched = matched

    def place(self, key, usable):
        return min(usable, key=lambda one: (-self.matched[one.name], one.num_busy))


@pytest.mark.parametrize("case", range(200))
def test_who_may_be_chosen_is_who_the_router_lets_be_chosen(case):
    """The same replica as `Endpoints` gives it, over busy counts and matches at random."""
    generator = np.random.default_rng(case)
    count = int(generator.integers(1, 6))
    busy = generator.integers(0, 12, count)
    matched = generator.permutation(count * 3)[:count]
    with grpc.insecure_channel("localhost:1") as channel:
        found = [Endpoint(str(place), channel) for place in range(count)]
        usable = Endpoints(found, lambda endpoint, question: None)
        for endpoint, open_calls in zip(found, busy.tolist(), strict=True):
            endpoint.num_open = open_calls
        least, total = int(busy.min()), int(busy.sum())
        most = least + max(router._SLACK, router._SHARE_AHEAD * total / count)
        allowed = {int(one.name) for one in found if one.num_busy <= most}
        entered = int(usable.enter(b"key").name)
    place = choose("prefix+load", busy, matched, float(generator.random()))
    assert place in allowed
    assert entered in allowed
    assert matched[place] == max(matched[other] for other in allowed)


def test_beginnings_are_those_of_the_newest_tokens_that_a_pool_holds():
    beginnings = Beginnings([100, 1000])
    beginnings.note(0, tenant=7, system_tokens=40, session=1, num_tokens=60)
    beginnings.note(1, tenant=7, system_tokens=40, session=2, num_tokens=60)
    assert beginnings.matched(7, 40, 1, 2).tolist() == [60, 40]
    assert beginnings.matched(7, 40, 3, 2).tolist() == [40, 40]
    assert beginnings.matched(8, 40, 3, 2).tolist() == [0, 0]
    beginnings.note(0, tenant=8, system_tokens=40, session=4, num_tokens=50)  # forgets the oldest: tenant 7, session 1
    assert beginnings.matched(7, 40, 1, 2).tolist() == [0, 40]
    assert beginnings.matched(8, 40, 4, 2).tolist() == [50, 0]
    beginnings.forget(0)
    assert beginnings.matched(8, 40, 4, 2).tolist() == [0, 0]
    assert beginnings.matched(7, 40, 2, 2).tolist() == [0, 60]


def test_a_tenant_without_a_system_prompt_has_nothing_in_common():
    beginnings = Beginnings([100])
    beginnings.note(0, tenant=1, system_tokens=0, session=1, num_tokens=30)
    assert beginnings.matched(1, 0, 2, 1).tolist() == [0]


def test_what_is_remembered_is_bounded():
    beginnings, generator = Beginnings([500, 500]), np.random.default_rng(1)
    for session in range(2000):
        place, tenant = int(generator.integers(2)), int(generator.integers(50))
        beginnings.note(place, tenant, 20, session, int(generator.integers(20, 90)))
    assert all(sum(sent.values()) <= 500 for sent in beginnings._sent)
    assert beginnings._num_tokens == [sum(sent.values()) for sent in beginnings._sent]
    held = {name for sent in beginnings._sent for name in sent}
    assert held == set(beginnings._holders)
