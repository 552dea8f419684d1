"""Places that are kept for requests whose prompts are computed elsewhere: of one engine, and of several."""

import pytest

from jpaged.errors import AlreadyExists, QueueFull
from jpaged.types import OutputEvent, Request, SamplingParams
from tests.engine.data_parallel.fleet import Fleet
from tests.engine.harness import Harness

PROMPT = list(range(60, 101))  # ten blocks of four, and one token


def make_request(name, prompt=PROMPT):
    return Request(name, tuple(prompt), SamplingParams(max_tokens=1, temperature=0.0, seed=0))


def test_a_place_is_kept_for_what_is_computed_elsewhere():
    h = Harness()
    limit = h.engine.max_num_in_flight
    places = [make_request(f"request {number}") for number in range(limit + 1)]
    for request in places[:limit]:
        assert h.engine.reserve_slot(request) is h.engine.kv_transfer
    told: list[OutputEvent] = []
    with pytest.raises(QueueFull):
        h.engine.submit(places[limit], told.append)
    assert not h.engine.drain(0.0)
    h.engine.submit(places[0], told.append)  # a drain does not refuse what it waits for
    for request in places[1:limit]:
        h.engine.drop(request.request_id)
    h.run()
    assert h.engine.drain(0.0)
    assert [event.request_id for event in told] == ["request 0"]


def test_of_replicas_one_keeps_the_place_and_gets_the_blocks():
    fleet = Fleet(2, num_host_blocks=40, block_size=4, max_num_queued_reqs=2)
    fleet.ask("begin", PROMPT)
    request, told = make_request("first"), list[OutputEvent]()
    transfer = fleet.replicas.reserve_slot(request)
    assert transfer is fleet.engines[0].kv_transfer  # where its prefix is
    with pytest.raises(AlreadyExists):
        fleet.replicas.reserve_slot(request)
    assert fleet.replicas.reserve_slot(make_request("second", [1] * 20)) is fleet.engines[1].kv_transfer
    fleet.replicas.drop("second")
    fleet.replicas.drop("second")
    assert fleet.replicas.reserve_slot(make_request("second", [1] * 20)) is fleet.engines[1].kv_transfer
    fleet.replicas.drop("second")
    assert not fleet.replicas.drain(0.0)
    fleet.replicas.submit(request, told.append)
    fleet.run()
    assert fleet.replicas.drain(0.0)
    assert told[-1].is_last
    assert told[-1].usage.cached_tokens == 40
    assert fleet.replicas._entrance._router._loads == [0, 0]
    assert not fleet.replicas._entrance._kept
