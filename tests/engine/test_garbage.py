"""Python's collector does not run within a step, and yet nothing piles up."""

import gc
import threading
import weakref

import pytest

from jpaged.engine import engine
from jpaged.engine.engine import GCPause, collect_if_due, collected_between_steps
from jpaged.engine.scheduler.output import SchedulerOutput
from jpaged.testing import FakeExecutor
from jpaged.types import Request, SamplingParams
from tests.engine.harness import Harness


class Knot:
    """Holds itself, so that only the collector can free it."""

    def __init__(self):
        self.knot = self


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.enable()


def submit(h, name, sink, **sampling):
    h.engine.submit(Request(name, (1, 2, 3), SamplingParams(temperature=0.0, **sampling)), sink)


def test_a_running_loop_collects_between_steps_and_an_idle_one_leaves_it_to_python():
    h = Harness()
    during, is_over = [], threading.Event()

    def sink(event):
        during.append(gc.isenabled())
        if event.is_last:
            is_over.set()

    h.engine.start()
    try:
        submit(h, "a", sink, max_tokens=5)
        assert is_over.wait(60)
        assert during == [False] * 5
    finally:
        h.engine.stop()
    assert gc.isenabled()


def test_a_loop_that_fails_leaves_the_collector_as_it_was():
    h = Harness(executor=FakeExecutor())
    h.executor.faults.fail_at_step = 2
    is_over = threading.Event()
    h.engine.start()
    submit(h, "a", lambda event: is_over.set() if event.is_last else None, max_tokens=9)
    assert is_over.wait(60)
    h.engine.stop()
    assert gc.isenabled()


@pytest.mark.parametrize("max_looks", [0, 50])
@pytest.mark.long
def test_what_steps_leave_behind_is_collected_while_they_run(monkeypatch, max_looks):
    monkeypatch.setattr(engine, "_MAX_NEW", 300)
    monkeypatch.setattr(engine, "_MAX_LOOKS", max_looks)
    h = Harness()
    h.engine._loop.observers.on_dispatched.append(collect_if_due)  # as the engine's thread does
    knots = []

    def sink(event):
        knots.append(weakref.ref(Knot()))
        kept.extend([] for _ in range(200))

    kept: list[list[int]] = []
    submit(h, "a", sink, max_tokens=60)
    with collected_between_steps:
        h.run()
        alive = [knot for knot in knots if knot() is not None]
        assert len(knots) == 60 and len(alive) <= 4


def test_much_that_is_new_is_collected(monkeypatch):
    monkeypatch.setattr(engine, "_MAX_NEW", 300)
    with collected_between_steps:
        gc.collect()
        knot = weakref.ref(Knot())
        kept: list[list[int]] = [[] for _ in range(400)]
        collect_if_due(SchedulerOutput(), None)  # type: ignore[arg-type]
        assert knot() is None and len(kept) == 400


def test_little_that_is_new_is_not_looked_at():
    with collected_between_steps:
        gc.collect()
        before = [one["collections"] for one in gc.get_stats()]
        for _ in range(100):
            collect_if_due(SchedulerOutput(), None)  # type: ignore[arg-type]
        assert [one["collections"] for one in gc.get_stats()] == before


def test_loops_of_one_process_wait_for_each_other():
    pause = GCPause()
    with pause:
        with pause:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with pause:
        """Somebody else has switched it off."""
    assert not gc.isenabled()
