"""A deadline ends its request once, counts as one cause whoever saw it first, and leaves nothing behind."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from jpaged.engine.deadlines import Deadlines, is_over
from jpaged.errors import DeadlineExceeded, QueueFull
from jpaged.testing import FakeExecutor
from jpaged.types import Request, SamplingParams
from tests.engine.harness import Harness

FAR = 1e6


def ended(h):
    return {reason: count for reason, count in h.engine.num_ended_by_reason().items() if count}


@pytest.mark.long
def test_what_is_kept_of_deadlines_is_bounded_by_the_requests_in_flight():
    h = Harness()
    h.submit("long", [1], max_tokens=100, deadline_s=FAR)
    for i in range(300):
        h.submit(f"r{i}", [1], max_tokens=1, deadline_s=FAR + i)
        while f"r{i}" in h.engine.in_flight:
            h.step()
        if "long" not in h.engine.in_flight:
            h.submit("long", [1], max_tokens=100, deadline_s=FAR)
        assert len(h.engine._loop._deadlines._heap) <= 4
    h.run()
    assert len(h.engine._loop._deadlines._heap) == 0


def test_the_earliest_deadline_is_known_without_looking_at_those_that_were_forgotten():
    deadlines = Deadlines()
    groups: list[Any] = [SimpleNamespace(arrival=i) for i in range(4)]
    assert deadlines.next_s == math.inf
    for group, deadline_s in zip(groups, (5.0, 3.0, 9.0, 9.0), strict=True):
        deadlines.add(group, deadline_s)
    assert deadlines.next_s == 3.0 and not list(deadlines.expired(2.9))
    deadlines.discard(groups[1])
    deadlines.discard(groups[1])
    assert not list(deadlines.expired(4.0)) and deadlines.next_s == 5.0
    assert list(deadlines.expired(5.0)) == groups[:1] and deadlines.next_s == 9.0
    deadlines.discard(groups[0])
    assert list(deadlines.expired(10.0)) == groups[2:] and deadlines.next_s == math.inf
    for group in groups[2:]:
        deadlines.discard(group)
    deadlines.add(groups[1], 20.0)
    deadlines.discard(groups[1])
    assert deadlines.next_s == math.inf


@pytest.mark.parametrize("how", ["abort", "drop"])
def test_a_request_that_was_ended_early_leaves_no_deadline(how):
    h = Harness()
    for i in range(8):
        h.submit(f"r{i}", [1], max_tokens=50, deadline_s=FAR)
    h.step()
    for i in range(8):
        getattr(h.engine, how)(f"r{i}")
    h.run()
    assert len(h.engine._loop._deadlines._heap) == 0
    assert ended(h) == {"abort": 8}


def test_later_deadlines_still_end_their_requests_after_others_were_forgotten():
    h = Harness()
    for i in range(8):
        h.submit(f"r{i}", [1], max_tokens=100, deadline_s=10.0 + i)
    h.step()
    for i in range(0, 8, 2):
        h.engine.abort(f"r{i}")
    h.step()
    h.clock.advance(13.5)
    h.step()
    assert [f"r{i}" in h.engine.in_flight for i in (1, 3, 5, 7)] == [False, False, True, True]
    h.clock.advance(100)
    h.run()
    assert ended(h) == {"abort": 4, "deadline": 4}


def test_a_deadline_has_passed_at_its_time():
    h = Harness()
    h.submit("a", [1], max_tokens=100, deadline_s=10.0)
    h.step()
    h.clock.advance(10.0 - h.clock())
    h.step()
    assert ended(h) == {"deadline": 1}


def test_a_passed_deadline_is_one_reason_whether_the_engine_or_the_caller_saw_it_first():
    h = Harness()
    h.submit("engine", [1], max_tokens=100, deadline_s=10.0)
    h.submit("caller", [1], max_tokens=100, deadline_s=10.0)
    h.submit("leaves", [1], max_tokens=100, deadline_s=10.0)
    h.step()
    h.clock.advance(6.0)
    h.engine.drop("leaves")
    h.clock.advance(3.9)
    h.engine.drop("caller")
    h.clock.advance(10.0)
    h.run()
    assert ended(h) == {"abort": 1, "deadline": 2}
    assert h.engine.load().num_requests_ended == 3


def test_a_caller_who_left_in_time_was_not_late_because_the_engine_heard_of_it_late():
    h = Harness()
    h.submit("a", [1], max_tokens=100, deadline_s=10.0)
    h.step()
    h.engine.drop("a")
    h.clock.advance(20.0)
    h.run()
    assert ended(h) == {"abort": 1}


@pytest.mark.parametrize(
    ("left_s", "total_s", "is_late"),
    [
        (0.0, 5.0, True),
        (-3.0, 5.0, True),
        (0.2, 5.0, True),  # the caller's clock, and the way
        (0.3, 5.0, False),
        (10.0, 1000.0, True),  # 1000 s are up to 1010 on the wire
        (30.0, 1000.0, False),
        (0.09, 0.1, False),  # in its first half a call is cancelled, however short it is
        (0.04, 0.1, True),
    ],
)
def test_a_caller_near_its_deadline_leaves_for_it(left_s, total_s, is_late):
    request = Request("r", (1,), SamplingParams(), deadline_s=100.0)
    assert is_over(request, 100.0 - total_s, 100.0 - left_s) is is_late
    assert not is_over(Request("r", (1,), SamplingParams()), 0.0, 1e9)


def test_who_waits_too_long_for_a_first_step_is_refused_with_a_time_to_come_back():
    h = Harness(executor=FakeExecutor(max_num_seqs=1), queue_timeout=5.0)
    h.submit("runs", [1], max_tokens=50)
    h.submit("waits", [1], max_tokens=1)
    h.step()
    h.clock.advance(4.0)
    h.step()
    assert not h.ended("waits")
    num_steps = h.executor.num_steps
    h.clock.advance(1.5)
    h.step()
    error = h.last("waits").error
    assert isinstance(error, QueueFull)
    assert error.retry_after_s > 0
    assert "waited 5.500 s for its first step (queue_timeout)" in str(error)
    assert h.executor.num_steps <= num_steps + 1
    h.run()
    assert h.last("runs").error is None
    assert h.engine._loop._queue_timeouts._heap == []


def test_a_deadline_ends_a_waiting_request_without_a_step_of_its_own():
    h = Harness(executor=FakeExecutor(max_num_seqs=1))
    h.submit("runs", [1], max_tokens=50)
    h.submit("waits", [1], max_tokens=1, deadline_s=5.0)
    h.step()
    h.clock.advance(6.0)
    h.step()
    assert isinstance(h.last("waits").error, DeadlineExceeded)
    assert h.engine.load().num_prompt_tokens == 1
    h.run()
