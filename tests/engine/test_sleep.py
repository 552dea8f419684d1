"""Pauses of generation, and the release of device memory meanwhile: tokens are those of a run without them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from jpaged.engine.executor import SLEEP_TAGS
from jpaged.errors import DeadlineExceeded, InvalidArgument, NotFound, Unavailable, Unsupported
from jpaged.testing import FakeAdapter, FakeExecutor, SeveralStepsExecutor, expected_tokens, with_adapters
from jpaged.types import FinishReason, LoadedAdapter
from tests.engine.data_parallel.fleet import Fleet
from tests.engine.harness import Harness

PROMPT = list(range(10, 24))


def done(h: Harness, future: Future[Any]) -> Any:
    """Steps once, which runs the posted commands, and returns the result."""
    h.engine.step()
    return future.result(0)


def finish_reason(h: Harness, name: str) -> FinishReason:
    last = h.last(name)
    assert last.finish is not None
    reason: FinishReason = last.finish.reason
    return reason


@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_kept_requests_continue_after_a_pause(num_scheduler_steps: int) -> None:
    h = Harness(executor=SeveralStepsExecutor(), num_scheduler_steps=num_scheduler_steps)
    h.submit("a", PROMPT, max_tokens=20)
    h.step()
    h.step()
    done(h, h.engine.pause("keep"))
    assert h.engine.is_paused
    num_steps, num_events = h.executor.num_steps, len(h.events["a"])
    h.submit("b", PROMPT[2:], max_tokens=6)
    for _ in range(3):
        assert h.engine.step()
        h.engine.check()
    assert (h.executor.num_steps, len(h.events["a"]), h.events["b"]) == (num_steps, num_events, [])
    done(h, h.engine.resume())
    assert not h.engine.is_paused
    h.run()
    assert (h.tokens("a"), h.tokens("b")) == (expected_tokens(PROMPT, 20), expected_tokens(PROMPT[2:], 6))
    assert h.engine.load().num_preemptions == 0


def test_a_pause_ends_requests_and_refuses_new_ones() -> None:
    h = Harness()
    h.submit("a", PROMPT, max_tokens=20)
    h.step()
    done(h, h.engine.pause("abort"))
    assert finish_reason(h, "a") is FinishReason.ABORT
    for _ in range(2):
        with pytest.raises(Unavailable, match="generation is paused: try again"):
            h.submit("b", PROMPT, max_tokens=2)
    assert not h.engine.step()
    done(h, h.engine.resume())
    done(h, h.engine.resume())
    h.submit("b", PROMPT, max_tokens=2)
    h.run()
    assert h.tokens("b") == expected_tokens(PROMPT, 2)


def test_a_pause_waits_for_requests() -> None:
    h = Harness()
    h.submit("a", PROMPT, max_tokens=5)
    h.step()
    paused = h.engine.pause("wait")
    h.step()
    assert not paused.done() and not h.engine.is_paused
    with pytest.raises(Unavailable):
        h.submit("b", PROMPT, max_tokens=2)
    h.run()
    assert paused.done() and h.engine.is_paused
    assert h.tokens("a") == expected_tokens(PROMPT, 5)


def test_a_pause_that_waits_lets_kept_requests_end() -> None:
    h = Harness()
    h.submit("a", PROMPT, max_tokens=5)
    h.step()
    done(h, h.engine.pause("keep"))
    paused = h.engine.pause("wait")
    h.run()
    assert paused.done() and h.tokens("a") == expected_tokens(PROMPT, 5)


def test_resuming_ends_a_pause_that_waits() -> None:
    h = Harness()
    h.submit("a", PROMPT, max_tokens=5)
    h.step()
    paused = h.engine.pause("wait")
    done(h, h.engine.resume())
    with pytest.raises(Unavailable, match="resumed before all requests had ended"):
        paused.result(0)
    h.run()
    assert h.tokens("a") == expected_tokens(PROMPT, 5)


def test_deadlines_pass_during_a_pause_which_is_no_stall() -> None:
    h = Harness()
    h.submit("a", PROMPT, max_tokens=20, deadline_s=30.0)
    h.submit("b", PROMPT, max_tokens=20)
    h.step()
    done(h, h.engine.pause("keep"))
    assert h.engine._loop.idle_budget_s == 1.0
    h.clock.advance(20.0)
    h.engine.step()
    assert h.engine._loop.stall_detector.seconds_without == 0.0
    h.clock.advance(20.0)
    h.engine.step()
    assert isinstance(h.last("a").error, DeadlineExceeded) and not h.events["b"]
    done(h, h.engine.resume())
    assert h.engine._loop.stall_detector.seconds_without == 0.0
    h.run()
    assert h.tokens("b") == expected_tokens(PROMPT, 20)


def test_the_end_of_the_engine_ends_pauses() -> None:
    h = Harness()
    h.submit("a", PROMPT, max_tokens=20)
    h.step()
    paused = h.engine.pause("wait")
    h.step()
    h.engine.stop()
    with pytest.raises(Unavailable, match="the engine has ended"):
        paused.result(0)
    with pytest.raises(Unavailable, match="the engine has ended"):
        h.engine.resume().result(0)


def test_kept_requests_end_before_a_shutdown() -> None:
    h = Harness()
    h.engine.start()
    try:
        h.submit("a", PROMPT, max_tokens=4)
        h.engine.pause("keep").result(60)
        assert h.engine.drain(60)
        assert h.tokens("a") == expected_tokens(PROMPT, 4)
    finally:
        h.engine.stop()


def test_kept_requests_of_an_engine_that_sleeps_are_aborted_before_a_shutdown() -> None:
    h = Harness()
    h.engine.start()
    try:
        h.submit("a", PROMPT, max_tokens=4)
        h.engine.sleep(1, "keep").result(60)
        assert h.engine.drain(60)
        assert finish_reason(h, "a") is FinishReason.ABORT
    finally:
        h.engine.stop()


def test_memory_that_cannot_be_restored_stays_released(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    done(h, h.engine.sleep(2))
    sleeper: Any = h.executor.sleeper

    def fail(tag: str) -> None:
        raise NotFound(f"no file of the {tag}")

    def vanish(tag: str) -> None:
        raise OSError("a gone disk")

    with monkeypatch.context() as patch:
        patch.setattr(sleeper, "wake_up", fail)
        with pytest.raises(NotFound, match="no file of the weights"):
            done(h, h.engine.wake_up())
        patch.setattr(sleeper, "wake_up", vanish)
        with pytest.raises(Unavailable, match=r"cannot be read again: OSError: a gone disk; they stay asleep"):
            done(h, h.engine.wake_up())
    assert h.engine.asleep == set(SLEEP_TAGS) and h.engine.sleep_level == 2
    with pytest.raises(Unavailable):
        h.submit("a", PROMPT, max_tokens=2)
    assert done(h, h.engine.wake_up()) is True
    assert not h.engine.asleep and h.engine.sleep_level == 0


def test_no_memory_is_released_while_prefixes_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness(executor=FakeExecutor(num_host_blocks=20))
    held: Any = h.engine._loop.memory.held
    with monkeypatch.context() as patch:
        patch.setattr(type(held), "tables", lambda self: iter([object()]))
        with pytest.raises(Unavailable, match="prefixes are being transferred"):
            done(h, h.engine.sleep(1))
    assert not h.engine.asleep
    done(h, h.engine.sleep(1))
    assert h.engine.asleep == set(SLEEP_TAGS)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("num_host_blocks", [0, 20], ids=["device", "host"])
def test_requests_that_are_kept_are_computed_again_after_a_sleep(level: int, num_host_blocks: int) -> None:
    h = Harness(
        executor=SeveralStepsExecutor(num_host_blocks=num_host_blocks),
        preemption_mode="swap" if num_host_blocks else "recompute",
    )
    h.submit("a", PROMPT, max_tokens=20, n=2, temperature=1.0, seed=3)
    h.submit("b", PROMPT[::-1], max_tokens=20)
    for _ in range(4):
        h.step()
    known = h.tokens("b")
    done(h, h.engine.sleep(level, "keep"))
    assert h.engine.asleep == set(SLEEP_TAGS) and h.executor.sleep_level == level
    h.submit("c", PROMPT, max_tokens=5)
    assert h.engine.step()
    with pytest.raises(Unavailable, match="the kv_cache and the weights are asleep: call wake_up"):
        done(h, h.engine.resume())
    assert done(h, h.engine.wake_up(["weights"])) is False
    assert h.engine.asleep == {"kv_cache"} and h.engine.is_paused
    assert done(h, h.engine.wake_up()) is True
    h.run()
    assert h.tokens("b") == expected_tokens(PROMPT[::-1], 20) and h.tokens("b")[: len(known)] == known
    assert h.tokens("c") == expected_tokens(PROMPT, 5)
    alone = Harness(executor=SeveralStepsExecutor())
    alone.submit("a", PROMPT, max_tokens=20, n=2, temperature=1.0, seed=3)
    alone.run()
    assert [h.tokens("a", i) for i in range(2)] == [alone.tokens("a", i) for i in range(2)]


def test_a_sleep_drops_cached_and_pinned_prefixes() -> None:
    h = Harness()
    pinned = h.engine.pin_prefix("p", PROMPT)
    h.submit("a", PROMPT, max_tokens=3)
    h.run()
    assert pinned.result(0) == 12
    done(h, h.engine.sleep())
    with pytest.raises(Unavailable, match="asleep: try again after wake_up"):
        h.submit("b", PROMPT, max_tokens=3)
    assert not h.engine.unpin_prefix("p")
    assert done(h, h.engine.wake_up(["kv_cache", "weights"])) is True
    h.submit("b", PROMPT, max_tokens=3)
    h.run()
    assert h.tokens("b") == expected_tokens(PROMPT, 3)
    assert h.last("b").usage.cached_tokens == 0


def test_a_prefix_that_is_unpinned_while_a_sleep_begins_is_dropped() -> None:
    h = Harness()
    pinned = h.engine.pin_prefix("p", PROMPT)
    h.run()
    assert pinned.result(0) == 12
    asleep = h.engine.sleep()
    assert h.engine.unpin_prefix("p")  # posted behind the sleep
    done(h, asleep)
    done(h, h.engine.wake_up())
    h.submit("a", PROMPT, max_tokens=3)
    h.run()
    assert h.tokens("a") == expected_tokens(PROMPT, 3) and h.last("a").usage.cached_tokens == 0


def test_adapters_are_loaded_again_after_the_weights_were_discarded() -> None:
    h = Harness(executor=with_adapters(2)())
    adapter = LoadedAdapter("a", "", 1, FakeAdapter(5))
    for level in (1, 2):
        h.submit(f"a{level}", PROMPT, adapter=adapter, max_tokens=8)
        h.step()
        done(h, h.engine.sleep(level, "keep"))
        done(h, h.engine.wake_up())
        h.run()
        assert h.tokens(f"a{level}") == expected_tokens(PROMPT, 8, weight=5)


def test_the_first_level_only_pauses() -> None:
    h = Harness()
    done(h, h.engine.sleep(0))
    assert h.engine.is_paused and not h.engine.asleep and not h.executor.sleep_level
    assert done(h, h.engine.wake_up(["scheduling"])) is True
    assert not h.engine.is_paused


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda engine: engine.sleep(3), "level: 3 is not 0, 1 or 2"),
        (lambda engine: engine.sleep(1, "stop"), "mode: 'stop' is not one of abort, wait, keep"),
        (lambda engine: engine.pause("stop"), "mode: 'stop' is not one of abort, wait, keep"),
        (lambda engine: engine.wake_up(["weight"]), "tags: 'weight' is not one of weights, kv_cache, scheduling"),
    ],
)
def test_a_call_that_cannot_be_is_refused(call: Callable[[Any], Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        call(Harness().engine)


def test_what_an_executor_cannot_do_is_refused() -> None:
    class Fixed(FakeExecutor):
        can_reload = False

    with pytest.raises(Unsupported, match="level 2 is not supported with several replicas"):
        Harness(executor=Fixed()).engine.sleep(2)


def test_all_replicas_sleep_and_wake_up() -> None:
    fleet = Fleet(2, engine_options={"enable_sleep_mode": True})
    for name in "ab":
        fleet.place(name, PROMPT)
    asleep = fleet.replicas.sleep(1, "keep")
    fleet.replicas.step()
    asleep.result(0)
    assert fleet.replicas.is_paused and fleet.replicas.asleep == set(SLEEP_TAGS)
    awake = fleet.replicas.wake_up()
    fleet.replicas.step()
    assert awake.result(0) is True and not fleet.replicas.is_paused
    fleet.run()
