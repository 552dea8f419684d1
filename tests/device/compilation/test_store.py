"""The program store: what is waited for, what follows, and steps on whatever there is meanwhile."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.device.compilation import program_registry
from jpaged.device.compilation.compile import ProgramSpec
from jpaged.device.compilation.program_registry import NUM_BACKGROUND_THREADS, ProgramSource, ProgramStore
from jpaged.device.executor import JaxExecutor
from jpaged.engine.executor import COMPILER_THREAD, BlockMoves, Detail, Move, StepOutputs
from jpaged.errors import InternalError
from tests.device import tiny_model
from tests.device.driver import Driver, Row

TIMEOUT_S = 60
NUM_LEAST = 10
"""A forward, a sample, one that edits, three tells, a count, and a move of each kind."""
FIRST, SECOND, THIRD = (ProgramSpec("forward", size) for size in (3, 4, 5))


def compiled(size: int) -> jax.stages.Compiled:
    return jax.jit(lambda x: x * 2 + size).lower(jax.ShapeDtypeStruct((size,), jnp.float32)).compile()


def sources(*specs: ProgramSpec) -> dict[ProgramSpec, ProgramSource]:
    return {spec: ProgramSource(functools.partial(compiled, spec.size)) for spec in specs}


def broken() -> jax.stages.Compiled:
    raise ValueError("no such shape")


class Report:
    """Keeps what a store says; `is_complete` is set by its summary."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, int]] = []
        self.is_complete = threading.Event()

    def __call__(self, what: str, done: int, total: int) -> None:
        self.lines.append((what, done, total))
        if " programs: " in what:
            self.is_complete.set()

    @property
    def summary(self) -> str:
        assert self.is_complete.wait(TIMEOUT_S)
        return self.lines[-1][0]


def test_everything_is_compiled_and_accounted_for() -> None:
    report, store = Report(), ProgramStore(sources(FIRST, SECOND, THIRD))
    store.compile([FIRST, SECOND, THIRD], report)
    assert set(store.ready) == {FIRST, SECOND, THIRD}
    for spec, program in store.ready.items():
        np.testing.assert_array_equal(store.find(spec)(np.ones(spec.size, np.float32)), 2 + spec.size)
        assert program.seconds > 0
        assert program.origin == "compiled"
    assert report.lines == [("compiling", 0, 3), *(("compiled", done, 3) for done in (1, 2, 3))]
    store.compile_rest(report)
    assert report.summary == "3 programs: 3 compiled"


def test_a_failure_that_is_waited_for_ends_the_wait() -> None:
    store = ProgramStore({**sources(FIRST), SECOND: ProgramSource(broken)})
    with pytest.raises(ValueError, match="no such shape"):
        store.compile([FIRST, SECOND], tiny_model.quiet)


def test_the_rest_follows_in_order_while_the_first_are_in_use() -> None:
    gate, landed = threading.Event(), []

    def gated() -> jax.stages.Compiled:
        assert gate.wait(TIMEOUT_S)
        return compiled(SECOND.size)

    store = ProgramStore(
        {**sources(FIRST), SECOND: ProgramSource(gated), **sources(THIRD)}, lambda: landed.append(len(store.ready))
    )
    report = Report()
    store.compile([FIRST], report)
    store.compile_rest(report)
    assert SECOND not in store.ready
    with pytest.raises(InternalError, match=r"program forward\[4\] is not compiled; compiled are forward\[3\]"):
        store.find(SECOND)
    store.find(FIRST)
    gate.set()
    assert report.summary.startswith("3 programs: 3 compiled")
    assert store.sizes("forward") == (3, 4, 5)
    assert store.sizes("sample", detail=Detail.TOP_LOGPROBS) == ()
    assert landed == [1, 2, 3]


def test_a_failure_behind_is_logged_counted_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    store = ProgramStore({**sources(FIRST), SECOND: ProgramSource(broken), **sources(THIRD)})
    report = Report()
    store.compile([FIRST], report)
    with caplog.at_level(logging.ERROR, "jpaged"):
        store.compile_rest(report)
        assert "2 compiled, 1 failed" in report.summary
    assert "no such shape" in caplog.text
    assert (store.num_failed, store.sizes("forward")) == (1, (3, 5))


def test_a_released_ledger_makes_nothing_more_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun, made = threading.Event(), threading.Semaphore(0), []

    def gated(size: int) -> jax.stages.Compiled:
        begun.release()
        assert gate.wait(TIMEOUT_S)
        made.append(size)
        return compiled(size)

    specs = [ProgramSpec("sample", size) for size in range(3, 20)]
    store = ProgramStore({spec: ProgramSource(functools.partial(gated, spec.size)) for spec in specs})
    store.compile_rest(tiny_model.quiet)
    for _ in range(NUM_BACKGROUND_THREADS):
        assert begun.acquire(timeout=TIMEOUT_S)
    monkeypatch.setattr(program_registry, "_RELEASE_S", TIMEOUT_S)  # it waits for those that its threads have begun
    release = threading.Thread(target=store.release)
    release.start()
    release.join(0.05)
    assert release.is_alive()
    gate.set()
    release.join(TIMEOUT_S)
    assert not release.is_alive()
    assert len(made) == NUM_BACKGROUND_THREADS
    assert not store.ready


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_long_compilation_does_not_delay_a_release(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_broken: bool
) -> None:
    monkeypatch.setattr(program_registry, "_RELEASE_S", 0.01)
    gate, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def gated() -> jax.stages.Compiled:
        begun.set()
        assert gate.wait(2 * TIMEOUT_S)
        ended.set()
        return broken() if is_broken else compiled(FIRST.size)

    store = ProgramStore({FIRST: ProgramSource(gated)}, num_threads=1)
    store.compile_rest(tiny_model.quiet)
    assert begun.wait(TIMEOUT_S)
    release = threading.Thread(target=store.release)
    release.start()
    try:
        release.join(TIMEOUT_S)
        assert not (release.is_alive() or ended.is_set())
        assert any(thread.name.startswith(COMPILER_THREAD) for thread in threading.enumerate())
    finally:
        gate.set()
    for threads in store._threads:
        threads.shutdown(wait=True)
    assert not (store.ready or store.num_failed or caplog.records)


def test_a_program_that_a_thread_took_but_did_not_begin_is_not_made_after_a_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its future is not cancelled, because it left the queue, and not running either."""
    taken, waited, gate, ended = (threading.Event() for _ in range(4))
    made: list[ProgramSpec] = []
    begin, wait = Future.set_running_or_notify_cancel, concurrent.futures.wait

    def begin_late(future: Future[None]) -> bool:
        taken.set()
        assert waited.wait(TIMEOUT_S)
        return begin(future)

    def noted_wait(futures: Collection[Future[None]], timeout_s: float) -> Any:
        waited.set()
        return wait(futures, timeout_s)

    def gated() -> jax.stages.Compiled:
        made.append(FIRST)
        assert gate.wait(2 * TIMEOUT_S)
        return compiled(FIRST.size)

    def release() -> None:
        store.release()
        ended.set()

    monkeypatch.setattr(Future, "set_running_or_notify_cancel", begin_late)
    monkeypatch.setattr(program_registry, "wait", noted_wait)
    monkeypatch.setattr(program_registry, "_RELEASE_S", TIMEOUT_S)
    store = ProgramStore({FIRST: ProgramSource(gated)}, num_threads=1)
    store.compile_rest(tiny_model.quiet)
    assert taken.wait(TIMEOUT_S)
    thread = threading.Thread(target=release)
    thread.start()
    try:
        assert ended.wait(TIMEOUT_S / 2)
    finally:
        gate.set()
        thread.join(TIMEOUT_S)
    assert not (made or store.ready)


def test_what_is_waited_for_is_compiled_at_the_usual_priority_and_the_rest_below_it() -> None:
    priorities: dict[ProgramSpec, int] = {}

    def noted(spec: ProgramSpec) -> jax.stages.Compiled:
        priorities[spec] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return compiled(spec.size)

    store = ProgramStore({spec: ProgramSource(functools.partial(noted, spec)) for spec in (FIRST, SECOND, THIRD)})
    report = Report()
    store.compile([FIRST], report)
    store.compile_rest(report)
    assert report.summary.startswith("3 programs: 3 compiled")
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert priorities[FIRST] == usual
    # Elsewhere threads have no priorities of their own.
    assert priorities[SECOND] == priorities[THIRD] == (max(usual, 5) if sys.platform == "linux" else usual)


NUM_LEAST = 10
"""Programs that a server begins with: one that steps, one that samples, one that edits, what counts, what is told three
ways, and moves three ways."""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds back every program behind the least set, until it is set."""
    gate = threading.Event()
    begun: list[Callable[[], jax.stages.Lowered]] = []

    def held(lowering: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        begun.append(lowering)
        if len(begun) > NUM_LEAST:
            assert gate.wait(TIMEOUT_S)
        return lowering().compile()

    monkeypatch.setattr(ProgramSource, "of", lambda lowering: ProgramSource(lambda: held(lowering)))
    return gate


def tokens_of(executor: JaxExecutor, *, detail: Detail) -> list[int]:
    """Two sequences: prefill of one, then both at once, one of their blocks out to the host, copied, and in again."""
    driver = Driver(executor)
    first, second = driver.sequence([5, 6, 7, 8, 9, 10, 11, 12, 13]), driver.sequence([3, 4])
    sampled: list[int] = driver.run([Row(first, 9)], detail=detail).token_ids_rn[:1, 0].tolist()
    first.tokens += sampled
    executor.move_blocks(BlockMoves(Move.SWAP_OUT, list(range(1, 12)), list(range(1, 12))))
    executor.move_blocks(BlockMoves(Move.SWAP_IN, list(range(1, 12)), list(range(1, 12))))
    copies = driver.free[: len(first.blocks) + 3]
    executor.move_blocks(BlockMoves(Move.COPY, [*first.blocks, *second.blocks[:3]], copies))
    first.blocks = copies[: len(first.blocks)]
    return sampled + driver.run([Row(first, 1), Row(second, 2)], detail=detail).token_ids_rn[:2, 0].tolist()


@pytest.mark.long
@pytest.mark.parametrize("detail", list(Detail))
def test_steps_run_on_the_least_set_as_on_all(gate: threading.Event, detail: Detail) -> None:
    early = JaxExecutor.create(tiny_model.model(), tiny_model.params(), tiny_model.WITHOUT_WAITING)
    report = Report()
    early.warm_up(report)
    least = early.geometry.buckets
    assert (least.tokens, least.rows) == ((16,), (8,))
    assert len(early._programs.ready) == NUM_LEAST < len(early._programs.specs)
    on_least = tokens_of(early, detail=detail)
    gate.set()
    assert report.is_complete.wait(TIMEOUT_S)
    assert (early.geometry.buckets.tokens, len(early._programs.ready)) == ((8, 16), len(early._programs.specs))
    assert tokens_of(early, detail=detail) == on_least
    assert early.num_compiles_after_warm_up == 0
    early.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_of_a_row_depends_on_the_sizes_of_its_programs(gate: threading.Event, dtype: str) -> None:
    model = tiny_model.model(dtype)
    scheduler = dataclasses.replace(tiny_model.OPTIONS.scheduler, max_num_seqs=12, max_num_batched_tokens=20)
    options = dataclasses.replace(tiny_model.WITHOUT_WAITING, scheduler=scheduler)
    executor = JaxExecutor.create(model, tiny_model.params(dtype=dtype, of=model), options)
    assert executor.step.linear_backend == "cpu"
    report = Report()
    executor.warm_up(report)

    def outputs() -> list[StepOutputs]:
        driver = Driver(executor)
        first, second = driver.sequence([5, 6, 7, 8, 9]), driver.sequence([3, 4])
        rows = [Row(first, 5)], [Row(first, 1), Row(second, 2)]
        first.tokens.append(11)
        return [driver.run(list(step), detail=Detail.TOP_LOGPROBS) for step in rows]

    assert (executor.geometry.buckets.tokens, executor.geometry.buckets.rows) == ((20,), (12,))
    on_largest = outputs()
    gate.set()
    assert report.is_complete.wait(TIMEOUT_S)
    assert (executor.geometry.buckets.tokens, executor.geometry.buckets.rows) == ((8, 16, 20), (8, 12))
    for num_rows, of_largest, of_small in zip((1, 2), on_largest, outputs(), strict=True):
        for field in dataclasses.fields(StepOutputs):
            small, large = getattr(of_small, field.name), getattr(of_largest, field.name)
            assert (small is None) == (large is None)
            if small is not None:
                np.testing.assert_array_equal(small[:num_rows], large[:num_rows])
    executor.shutdown()
