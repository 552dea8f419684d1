"""Engines that are alike behind one set of verbs: what holds for the whole, whichever of them does it."""

import itertools
import threading
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jpaged.engine.data_parallel import DataParallelEngine, shares
from jpaged.errors import AlreadyExists, InternalError, InvalidArgument, QueueFull, Unavailable, Unsupported
from jpaged.server_load import DISTRIBUTIONS, EngineLoad, total_load
from jpaged.testing import FakeExecutor, Faults, expected_tokens
from jpaged.types import FinishReason, Prompt, Request, SamplingParams
from tests.engine.data_parallel.fleet import PREFIX, Fleet
from tests.engine.kv_cache.oracle import expected_outputs

# --- ids, limits ------------------------------------------------------------------------------------------------------


def test_an_id_is_in_flight_once_in_all_replicas():
    fleet = Fleet(2)
    fleet.submit("a", [1] * 6)
    with pytest.raises(AlreadyExists, match="'a' is in flight"):
        fleet.submit("a", [2] * 6)
    assert fleet.ask("b", [2] * 6) == 1
    fleet.submit("a", [3] * 6)
    fleet.run()
    assert fleet.tokens("a") == expected_tokens([1] * 6, 4) + expected_tokens([3] * 6, 4)


def test_a_dropped_id_is_taken_until_its_engine_has_let_go():
    fleet = Fleet(2)
    fleet.submit("a", [1] * 6)
    fleet.replicas.drop("a")
    with pytest.raises(AlreadyExists):
        fleet.submit("a", [2] * 6)
    fleet.run()
    fleet.submit("a", [2] * 6)
    fleet.run()
    assert fleet.tokens("a") == expected_tokens([2] * 6, 4)


def test_the_queue_is_as_long_as_its_limit_over_all_replicas():
    fleet = Fleet(2, max_num_seqs=2, max_num_queued_reqs=3)
    assert fleet.replicas.max_num_in_flight == 7
    for i in range(7):
        fleet.submit(f"r{i}", [*PREFIX, i])  # alike, so that one replica is wanted by all
    with pytest.raises(QueueFull, match="7 requests are in flight, the limit of 2 replicas") as refusal:
        fleet.submit("r7", [1])
    assert refusal.value.retry_after_s > 0
    fleet.run()
    assert all(fleet.tokens(f"r{i}") == expected_tokens([*PREFIX, i], 4) for i in range(7))
    fleet.submit("r7", [1])
    fleet.run()


def test_a_full_replica_is_passed_over():
    """The row of a short request weighs next to nothing beside the slots of a long one."""
    fleet = Fleet(2, max_num_seqs=8, max_num_queued_reqs=0, num_blocks=16)
    assert fleet.place("long", [1] * 8, max_tokens=56) == 0
    places = []
    for i in range(15):
        assert not fleet.replicas.is_full
        places.append(fleet.place(f"r{i}", [i + 2], max_tokens=1))
    assert fleet.replicas.is_full
    assert (places.count(0), places.count(1)) == (7, 8)
    with pytest.raises(QueueFull):
        fleet.submit("r15", [1])
    fleet.run()


@pytest.mark.parametrize(("total", "parts", "each"), [(7, 2, [4, 3]), (4096, 4, [1024] * 4), (1, 3, [1, 0, 0])])
def test_a_limit_is_shared_out_to_the_last(total, parts, each):
    assert shares(total, parts) == each


def test_replicas_that_are_not_alike_are_refused():
    fleets = Fleet(1), Fleet(1, num_blocks=32)
    with pytest.raises(InternalError, match="different geometries"):
        DataParallelEngine([fleet.engines[0] for fleet in fleets])


# --- abort, drop ------------------------------------------------------------------------------------------------------


def test_abort_finds_the_request_where_it_is():
    fleet = Fleet(2)
    fleet.submit("a", [1] * 6, max_tokens=40)
    fleet.submit("b", [2] * 6, max_tokens=40)
    fleet.replicas.step()
    assert fleet.replicas.abort("b")
    fleet.run()
    assert fleet.last("b").finish.reason is FinishReason.ABORT
    assert fleet.last("a").finish.reason is FinishReason.LENGTH
    assert not fleet.replicas.abort("b")
    assert not fleet.replicas.abort("c")
    assert fleet.is_at_rest()


def test_a_dropped_request_says_nothing_more():
    fleet = Fleet(2)
    fleet.submit("a", [1] * 6, max_tokens=40)
    fleet.submit("b", [2] * 6, max_tokens=40)
    for _ in range(4):
        fleet.replicas.step()
    fleet.replicas.drop("b")
    fleet.replicas.drop("unknown")
    num_events = len(fleet.events["b"])
    fleet.run()
    assert len(fleet.events["b"]) == num_events
    assert fleet.last("a").usage.completion_tokens == 40
    assert fleet.is_at_rest()


# --- pins -------------------------------------------------------------------------------------------------------------


def test_a_prefix_is_pinned_in_every_pool_and_unpinned_there():
    fleet = Fleet(3)
    pinned = fleet.replicas.pin_prefix("system", PREFIX)
    assert not fleet.replicas.unpin_prefix("system")  # not yet
    fleet.run()
    assert pinned.result(timeout=0) == 12
    assert [load.num_blocks_used for load in fleet.replicas.replica_loads()] == [3, 3, 3]
    again = fleet.replicas.pin_prefix("system", PREFIX)
    assert isinstance(again.exception(timeout=0), AlreadyExists)
    assert fleet.replicas.unpin_prefix("system")
    assert not fleet.replicas.unpin_prefix("system")
    fleet.run()
    assert fleet.is_at_rest()
    fleet.replicas.pin_prefix("system", PREFIX)
    fleet.run()
    assert [load.num_blocks_used for load in fleet.replicas.replica_loads()] == [3, 3, 3]


def test_a_reset_forgets_what_every_replica_cached():
    fleet = Fleet(2)
    for name in ("a", "b"):
        fleet.submit(name, [*PREFIX, 1], use_prefix_cache=True, cache_salt=name)
    fleet.run()
    cached = [load.num_blocks_cached for load in fleet.replicas.replica_loads()]
    assert all(cached)
    forgotten = fleet.replicas.reset_prefix_cache()
    fleet.run()
    assert forgotten.result(timeout=0) == sum(cached)
    assert fleet.replicas.load().num_blocks_cached == 0


def test_a_prefix_that_one_pool_has_no_room_for_is_pinned_nowhere():
    fleet = Fleet(3, num_blocks=16, max_model_len=48)
    fleet.submit("room", [1] * 4, n=3, temperature=1.0, max_tokens=16)  # may need 13 blocks of replica 0
    pinned = fleet.replicas.pin_prefix("system", list(range(16)))
    fleet.run()
    assert isinstance(pinned.exception(timeout=0), InvalidArgument)
    assert "pinned blocks would leave" in str(pinned.exception())
    assert not fleet.replicas.unpin_prefix("system")
    fleet.run()
    assert fleet.is_at_rest()
    pinned = fleet.replicas.pin_prefix("system", list(range(16)))
    fleet.run()
    assert pinned.result(timeout=0) == 16


def test_what_cannot_be_pinned_says_why():
    fleet = Fleet(2, engine_options={"enable_prefix_caching": False})
    assert isinstance(fleet.replicas.pin_prefix("system", PREFIX).exception(timeout=0), Unsupported)
    fleet = Fleet(2)
    assert "there is nothing to pin" in str(fleet.replicas.pin_prefix("system", [1]).exception(timeout=0))
    fleet.replicas.pin_prefix("system", PREFIX)
    fleet.run()


# --- pauses, commands -------------------------------------------------------------------------------------------------


def test_a_pause_holds_for_every_replica():
    fleet = Fleet(2)
    for name in ("a", "b"):
        fleet.submit(name, [ord(name)] * 6, max_tokens=8)
    assert {fleet.where("a"), fleet.where("b")} == {0, 1}
    paused = fleet.replicas.pause("keep")
    fleet.replicas.step()
    paused.result(timeout=0)
    assert [engine.is_paused for engine in fleet.engines] == [True, True] and fleet.replicas.is_paused
    for _ in range(3):
        fleet.replicas.step()
    assert not fleet.events["a"] and not fleet.events["b"]
    resumed = fleet.replicas.resume()
    fleet.run()
    resumed.result(timeout=0)
    assert not fleet.replicas.is_paused
    assert [len(fleet.tokens(name)) for name in ("a", "b")] == [8, 8]
    fleet.submit("c", [3] * 6, max_tokens=40)
    fleet.replicas.pause()
    fleet.replicas.step()
    assert fleet.last("c").finish.reason is FinishReason.ABORT


def test_replicas_that_sleep_already_resume_with_those_that_do_not_yet() -> None:
    fleet = Fleet(2, engine_options={"enable_sleep_mode": True})
    fleet.place("a", PREFIX, max_tokens=4)
    asleep = fleet.replicas.sleep(1, "wait")
    fleet.replicas.step()
    assert sorted(len(engine.asleep) for engine in fleet.engines) == [0, 2] and not asleep.done()
    resumed = fleet.replicas.resume()
    fleet.replicas.step()
    assert resumed.result(timeout=0) is None and not fleet.replicas.asleep
    with pytest.raises(Unavailable, match="generation was resumed before all requests had ended"):
        asleep.result(timeout=0)
    fleet.place("b", PREFIX)
    fleet.run()
    assert not fleet.replicas.is_paused


def test_memory_is_released_and_restored_in_every_replica():
    fleet = Fleet(2, engine_options={"enable_sleep_mode": True})
    fleet.replicas.pin_prefix("system", PREFIX)
    fleet.run()
    calls = fleet.replicas.sleep(0), fleet.replicas.resume()
    fleet.run()
    assert [call.result(timeout=0) for call in calls] == [None, None]
    assert fleet.replicas.sleep_level == 0 and not fleet.replicas.asleep
    asleep = fleet.replicas.sleep(2)
    fleet.replicas.step()
    asleep.result(timeout=0)
    assert [engine.sleep_level for engine in fleet.engines] == [2, 2]
    assert fleet.replicas.sleep_level == 2 and fleet.replicas.asleep == {"weights", "kv_cache"}
    part = fleet.replicas.wake_up(["weights"])
    fleet.replicas.step()
    assert part.result(timeout=0) is False and fleet.replicas.asleep == {"kv_cache"}
    rest = fleet.replicas.wake_up()
    fleet.run()
    assert rest.result(timeout=0) is True and not fleet.replicas.asleep and fleet.replicas.sleep_level == 0
    assert not fleet.replicas.unpin_prefix("system")
    fleet.replicas.pin_prefix("system", PREFIX)
    fleet.run()


def test_a_command_is_done_when_the_last_replica_has_run_it():
    fleet, calls = Fleet(2), []
    done = fleet.replicas.call_soon(lambda: calls.append(1))
    fleet.engines[0].step()
    assert not done.done() and len(calls) == 1
    fleet.engines[1].step()
    assert done.result(timeout=0) is None and len(calls) == 2


def test_a_command_that_fails_or_never_runs_says_so():
    fleet = Fleet(2)

    def fail() -> None:
        raise ZeroDivisionError

    failing = fleet.replicas.call_soon(fail)
    for engine in fleet.engines:
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert isinstance(failing.exception(timeout=0), ZeroDivisionError)
    fleet = Fleet(2)
    fleet.replicas.stop()
    assert fleet.replicas.call_soon(lambda: None).cancelled()


def test_a_failure_from_outside_ends_the_requests_of_every_replica():
    fleet = Fleet(2)
    for name in ("a", "b"):
        fleet.submit(name, [ord(name)] * 6, max_tokens=40)
    fleet.replicas.fail(InternalError("the device is gone"))  # before the threads start, which could end the requests
    fleet.replicas.start()
    fleet.replicas.stop()
    for name in ("a", "b"):
        assert "the device is gone" in str(fleet.last(name).error)


# --- counts -----------------------------------------------------------------------------------------------------------


def test_counts_are_sums_and_means_are_weighted():
    fleet = Fleet(2)
    for i in range(5):
        fleet.submit(f"r{i}", [i] * (6 + i), max_tokens=3 + i)
    fleet.run()
    load, (first, second) = fleet.replicas.load(), fleet.replicas.replica_loads()
    assert load.num_generation_tokens == 3 + 4 + 5 + 6 + 7 == first.num_generation_tokens + second.num_generation_tokens
    assert (load.num_blocks, load.block_size, load.max_num_seqs) == (128, 4, 16)
    assert load.num_requests_ended == 5
    assert min(first.slot_use, second.slot_use) <= load.slot_use <= max(first.slot_use, second.slot_use)
    assert fleet.replicas.num_ended_by_reason()["length"] == 5
    for name in DISTRIBUTIONS:
        parts = [engine.histogram(name) for engine in fleet.engines]
        whole = fleet.replicas.histogram(name)
        assert whole.bounds == parts[0].bounds
        assert whole.cumulative_counts[-1] == sum(part.cumulative_counts[-1] for part in parts)
        assert whole.sum == pytest.approx(sum(part.sum for part in parts))
    assert fleet.replicas.histogram("end_to_end").cumulative_counts[-1] == 5


def test_a_total_weighs_what_each_saw():
    sizes: dict[str, Any] = {"num_blocks": 8, "block_size": 4, "max_num_seqs": 2}
    one = EngineLoad(**sizes, sum_reserved_slots=300, slot_use=0.5, num_first_tokens=1, time_to_first_token_s=4.0)
    two = EngineLoad(**sizes, sum_reserved_slots=100, slot_use=0.9, num_first_tokens=3, time_to_first_token_s=2.0)
    total = total_load([one, two])
    assert (total.num_blocks, total.block_size, total.max_num_seqs) == (16, 4, 4)
    assert total.slot_use == pytest.approx(0.6)
    assert total.time_to_first_token_s == pytest.approx(2.5)
    idle = EngineLoad(**sizes)
    assert total_load([idle, idle]).slot_use == 0.0


# --- life -------------------------------------------------------------------------------------------------------------


class Listener:
    """Waits for the last event of each of some requests that threads serve."""

    def __init__(self):
        self.events = defaultdict(list)
        self._news = threading.Condition()

    def take(self, event):
        with self._news:
            self.events[event.request_id].append(event)
            self._news.notify_all()

    def wait_for(self, names):
        with self._news:
            assert self._news.wait_for(
                lambda: all(self.events[name] and self.events[name][-1].is_last for name in names), timeout=60
            )


def start(fleet, names, **sampling):
    """Submits a request of each name, one a replica in turn."""
    listener = Listener()
    fleet.replicas.start()
    for i, name in enumerate(names):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **sampling})
        request = fleet.input_processor.make_request(request_id=name, sampling=params, prompt=Prompt(token_ids=[i] * 5))
        fleet.replicas.submit(request, listener.take)
    return listener


def test_threads_serve_all_and_a_drain_waits_for_every_replica():
    faults = [Faults() for _ in range(2)]
    faults[1].gate.clear()
    fleet = Fleet(2, faults=faults)
    names = ["a", "b", "c", "d"]
    listener = start(fleet, names)
    listener.wait_for(["a", "c"])
    assert not fleet.replicas.drain(0.01)
    with pytest.raises(Unavailable, match="shutting down"):
        fleet.submit("late", [1])
    faults[1].gate.set()
    assert fleet.replicas.drain(20)
    listener.wait_for(names)
    fleet.replicas.stop()
    for i, name in enumerate(names):
        tokens = [token for event in listener.events[name] for token in event.token_ids]
        assert tokens == expected_tokens([i] * 5, 40)
    assert fleet.replicas.failure is None


def test_stop_ends_what_is_left_everywhere():
    faults = [Faults() for _ in range(3)]
    fleet = Fleet(3, faults=faults)
    for one in faults:
        one.gate.clear()
    listener = start(fleet, ["a", "b", "c"])
    stopping = threading.Thread(target=fleet.replicas.stop)
    stopping.start()
    for one in faults:
        one.gate.set()
    stopping.join(60)
    assert not stopping.is_alive()
    listener.wait_for(["a", "b", "c"])
    for events in listener.events.values():
        assert events[-1].error is None or isinstance(events[-1].error, Unavailable)


def test_one_that_fails_ends_all_with_its_error():
    faults = [Faults(), Faults(fail_at_step=3), Faults()]
    faults[0].gate.clear()
    faults[2].gate.clear()
    fleet = Fleet(3, faults=faults)
    names = ["a", "b", "c", "d"]
    listener = start(fleet, names, max_tokens=100)
    listener.wait_for(["b"])
    assert isinstance(fleet.replicas.failure, RuntimeError)
    with pytest.raises(Unavailable, match="the engine has failed"):
        fleet.submit("late", [1])
    faults[0].gate.set()
    faults[2].gate.set()
    listener.wait_for(names)
    assert str(fleet.replicas.failure) == "injected fault at step 3"
    assert "injected fault at step 3" in str(listener.events["b"][-1].error)
    for name in ("a", "c", "d"):
        assert [event.is_last for event in listener.events[name]].count(True) == 1
        error = listener.events[name][-1].error
        assert isinstance(error, InternalError)
        assert "replica 1 failed: RuntimeError: injected fault at step 3" in str(error)
    fleet.replicas.stop()
    assert str(fleet.replicas.failure) == "injected fault at step 3"


def test_the_first_failure_is_the_one_that_is_told():
    faults = [Faults(fail_at_step=0), Faults(fail_at_step=0)]
    fleet = Fleet(2, faults=faults)
    listener = start(fleet, ["a"])
    listener.wait_for(["a"])
    fleet.replicas.stop()
    assert str(fleet.replicas.failure) == "injected fault at step 0"
    assert str(fleet.engines[1].failure) == "replica 0 failed: RuntimeError: injected fault at step 0"


# --- any life ---------------------------------------------------------------------------------------------------------

SHAPES = st.sampled_from(
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "n": 3, "seed": 7},
        {"beam_width": 2, "n": 2},
        {"cache_salt": "x"},
        {"use_prefix_cache": False},
    ]
)
ACTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 2), st.integers(0, 14), st.integers(1, 9), SHAPES),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.integers(0, 5)),
    st.tuples(st.just("pin"), st.integers(0, 2)),
    st.tuples(st.just("unpin"), st.integers(0, 2)),
)


_SUBMIT: tuple[str, int, int, int, dict[str, int]] = ("submit", 0, 0, 1, {})
_PINS_FILL_THE_QUEUE = [*[_SUBMIT] * 6, ("pin", 0), ("pin", 1), *[_SUBMIT] * 2]


@settings(max_examples=60)
@example(count=1, num_blocks=12, overlap=False, acts=_PINS_FILL_THE_QUEUE)
@given(count=st.integers(1, 4), num_blocks=st.integers(12, 30), overlap=st.booleans(), acts=st.lists(ACTS, max_size=40))
def test_whatever_happens_every_request_ends_once_with_its_tokens(count, num_blocks, overlap, acts):
    fleet = Fleet(
        count,
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_model_len=40,
        max_num_queued_reqs=5,
        engine_options={"overlap": overlap},
    )
    numbers = itertools.count()
    requests: dict[str, Request] = {}
    dropped: set[str] = set()
    for act in acts:
        match act:
            case "submit", kind, num_shared, max_tokens, shape:
                name, prompt = f"r{next(numbers)}", [kind * 7 + i for i in range(num_shared)] + [len(requests)]
                if fleet.replicas.is_full:
                    with pytest.raises(QueueFull, match=f"^{fleet.replicas.max_num_in_flight} requests are in flight"):
                        fleet.submit(name, prompt, max_tokens=max_tokens, **shape)
                else:
                    requests[name] = fleet.submit(name, prompt, max_tokens=max_tokens, **shape)
            case "step", num_steps:
                for _ in range(num_steps):
                    fleet.replicas.step()
                    fleet.replicas.check()
            case "abort", which if len(requests) > which:
                fleet.replicas.abort([*requests][-1 - which])
            case "drop", which if len(requests) > which:
                dropped.add([*requests][-1 - which])
                fleet.replicas.drop([*requests][-1 - which])
            case "pin", kind:
                fleet.replicas.pin_prefix(f"p{kind}", [kind * 7 + i for i in range(9)])
            case "unpin", kind:
                fleet.replicas.unpin_prefix(f"p{kind}")
    fleet.run()
    for kind in range(3):
        fleet.replicas.unpin_prefix(f"p{kind}")
    fleet.run()
    assert fleet.is_at_rest()
    assert fleet.replicas._entrance._router._routes == {}
    assert fleet.replicas._entrance._router._loads == [0] * count
    assert not any(fleet.replicas._entrance._router._in_flight)
    for name, request in requests.items():
        if name in dropped:
            assert all(not event.is_last for event in fleet.events[name][:-1])
            continue
        last = fleet.last(name)
        if last.error is not None:
            continue
        if last.finish.reason is not FinishReason.ABORT:
            want = expected_outputs(list(request.prompt_token_ids), request.sampling)
            assert [fleet.tokens(name, i) for i in range(request.sampling.n)] == want


def test_replicas_that_hang_at_the_end_are_waited_for_together(monkeypatch):
    fleet = Fleet(3)
    all_wait = threading.Barrier(3)
    shutdown = FakeExecutor.shutdown

    def hang(executor):
        all_wait.wait(60.0)
        shutdown(executor)

    monkeypatch.setattr(FakeExecutor, "shutdown", hang)
    fleet.replicas.stop()
    assert not all_wait.broken
