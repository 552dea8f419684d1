"""Who gets a request: the router's own placement, and simpler rules beside it."""

from collections import Counter

import grpc
import numpy as np
import pytest

from jpaged._proto.v1 import inference_pb2
from jpaged.client.routing.endpoints import Endpoint, Endpoints
from jpaged.plan.fleet.day import Attempt, Session, draw_sessions, get_prompt
from jpaged.plan.fleet.routing import RULES, FleetRouter
from jpaged.route.prefix_table import MAX_KNOWN_PREFIXES, PrefixTable, parse_prompt_prefix
from tests.plan.fleet.small import DAY


def attempt(number=0, tenant=0, said=(40,), turn=0, system_tokens=200):
    return Attempt(0, Session(number, 0.0, tenant, system_tokens, said, said, ()), turn, 0.0)


def a_router(rule, num_places, busy=None):
    """A router with places that have so many requests."""
    router = FleetRouter(rule, num_places, 0)
    for place in range(num_places):
        router.begin(place)
        for number in range(0 if busy is None else busy[place]):
            router.use([place])
            router.send(attempt(10_000 + 100 * place + number, tenant=1000 + place, system_tokens=0))
    router.use(range(num_places))
    return router


def busy_of(router, num_places):
    return [router.num_busy(place) for place in range(num_places)]


def test_random_asks_nothing():
    router = a_router("random", 3, [9, 0, 0])
    found = Counter(router.send(attempt(number)) for number in range(300))
    assert found.keys() == {0, 1, 2}
    assert min(found.values()) > 60


def test_the_least_busy_and_of_equals_any():
    router = a_router("least-load", 4, [3, 1, 2, 1])
    assert {router.send(attempt(number)) for number in range(2)} == {1, 3}
    assert busy_of(router, 4) == [3, 2, 2, 2]
    first = {FleetRouter("least-load", 9, seed) for seed in range(20)}
    for one in first:
        one.use(range(9))
    assert len({one.send(attempt()) for one in first}) > 3


@pytest.mark.parametrize(("rule", "wanted"), [("prefix", 1), ("prefix+load", 3)])
def test_a_prefix_is_followed_however_busy_its_replica_is_and_with_load_while_it_is_not_ahead(rule, wanted):
    router = a_router(rule, 4, [5, 4, 5, 0])
    router.use([1])
    router.send(attempt(7))
    router.use(range(4))
    assert busy_of(router, 4) == [5, 5, 5, 0]
    assert router.send(attempt(8)) == wanted
    for _ in range(5):
        router.ended(1)
    assert router.send(attempt(9)) == 1


def test_a_replica_that_starts_again_has_nothing():
    router = a_router("prefix", 5)
    router.use([3])
    router.send(attempt(1))
    router.use(range(5))
    assert router.send(attempt(2)) == 3
    router.end(3)
    router.use([0, 1, 2, 4])
    assert router.send(attempt(3)) != 3
    router.begin(3)
    router.use(range(5))
    assert router.send(attempt(4)) != 3


def test_a_conversation_goes_on_where_it_was_and_not_where_its_tenant_was_last():
    router = a_router("prefix", 3)
    for place, number in ((0, 1), (1, 2), (2, 3)):
        router.use([place])
        router.send(attempt(number, said=(120, 40), system_tokens=400))
    router.use(range(3))
    assert [router.send(attempt(number, said=(120, 40), turn=1, system_tokens=400)) for number in (2, 3, 1)] == [
        1,
        2,
        0,
    ]


@pytest.mark.parametrize("rule", RULES)
def test_one_replica_gets_all(rule):
    router = a_router(rule, 1, [7])
    assert [router.send(attempt(number)) for number in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_requests_go_where_the_router_sends_them(seed):
    """A day of attempts, ends, and servers that go and come: each goes where `jpaged route` has its messages go."""
    generator, count = np.random.default_rng(seed), 5
    simulated, directory = a_router("prefix+load", count), PrefixTable(MAX_KNOWN_PREFIXES)
    with grpc.insecure_channel("localhost:1") as channel:
        found = {place: Endpoint(str(place), channel) for place in range(count)}
        real = Endpoints([*found.values()], lambda endpoint, question: None, placement=directory)
        for place in range(count):
            directory.begin(str(place))
        running = list[tuple[int, Endpoint]]()
        for session in draw_sessions(DAY, seed):
            for turn in range(len(session.said)):
                one = Attempt(0, session, turn, 0.0)
                request = inference_pb2.GenerateRequest()
                request.token_ids.ids.extend(get_prompt(one))
                endpoint = real.enter(parse_prompt_prefix(request, str(session.tenant).encode()))
                place = simulated.send(one)
                assert str(place) == endpoint.name
                running.append((place, endpoint))
            while running and generator.random() < 0.6:
                place, endpoint = running.pop(int(generator.integers(len(running))))
                simulated.ended(place)
                real.leave(endpoint)
            if generator.random() < 0.1:
                place = int(generator.integers(count))
                simulated.end(place)
                directory.end(str(place))
                simulated.begin(place)
                directory.begin(str(place))
    assert directory.num_hits > 10 and directory.num_passed_over > 0
