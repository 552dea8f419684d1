"""One `LLM` for several threads and event loops, its end, and forked processes; its executor has no model."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine.engine import THREAD_NAME
from jpaged.errors import InternalError, InvalidArgument, Unavailable
from jpaged.llm import TokensPrompt
from jpaged.testing.fake_executor import FakeExecutor, Faults
from tests.server.harness import make_serving

NUM_CALLS, NUM_PROMPTS = 6, 5
PARAMS = [SamplingParams(temperature=0.9, seed=k, max_tokens=6 + k, ignore_eos=True) for k in range(NUM_PROMPTS)]
Open = Callable[..., LLM]


def prompts(call: int) -> list[TokensPrompt]:
    return [
        {"prompt_token_ids": [1 + (call * 5 + k * 3 + i) % 60 for i in range(4 + call)]} for k in range(NUM_PROMPTS)
    ]


@pytest.fixture(params=[1, 2], ids=["one-engine", "two-replicas"])
def open_llm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Makes an LLM whose engine takes fewer requests than a test sends."""
    opened: list[LLM] = []

    def open_one(faults: Faults | None = None) -> LLM:
        config = EngineConfig.load({"max_num_queued_reqs": 2})
        first, *others = (FakeExecutor(faults=faults, max_num_seqs=4) for _ in range(request.param))
        monkeypatch.setattr("jpaged.local_model.build", lambda *_, **__: make_serving(first, config, others=others))
        opened.append(LLM())
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()


def tokens(llm: LLM, call: int) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(call), PARAMS, use_tqdm=False)]


def test_calls_of_threads_and_event_loops_give_the_tokens_that_they_give_alone(open_llm: Open) -> None:
    llm = open_llm()
    alone = [tokens(llm, call) for call in range(NUM_CALLS)]

    async def two(call: int) -> list[list[tuple[int, ...]]]:
        return await asyncio.gather(*(asyncio.to_thread(tokens, llm, call + i) for i in range(2)))

    with ThreadPoolExecutor(6) as threads:
        loops = [threads.submit(asyncio.run, two(call)) for call in (0, 2)]
        plain = [threads.submit(tokens, llm, call) for call in range(4, NUM_CALLS)]
        together = [*loops[0].result(), *loops[1].result(), *(one.result() for one in plain)]
    assert together == alone
    assert llm.load().num_running == llm.load().num_waiting == 0


def test_concurrent_calls_join_one_batch(open_llm: Open) -> None:
    faults = Faults()
    llm = open_llm(faults)
    one: TokensPrompt = {"prompt_token_ids": [1, 2, 3]}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, use_prefix_cache=False)
    llm.generate(one, params, use_tqdm=False)
    num_alone = llm.load().num_steps
    entered, release = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        release.wait()

    llm._serving.engine.call_soon(hold)
    entered.wait()
    added, add = threading.Semaphore(0), llm._admission.add

    def count(call: Any) -> None:
        add(call)
        added.release()

    llm._admission.add = count  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(llm.generate, one, params, use_tqdm=False) for _ in range(4)]
        for _ in calls:
            added.acquire()
        release.set()
        assert len({call.result()[0].outputs[0].token_ids for call in calls}) == 1
    assert llm.load().num_steps - num_alone <= 2 * num_alone  # one after the other they would take four times as many


class Broken:
    """A bar that raises when the first prompt is done."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.postfix = ""

    def __call__(self, **options: Any) -> Broken:
        return self

    def update(self, count: int) -> None:
        raise self._error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of the bar")], ids=["ctrl-c", "error"])
def test_a_call_that_ends_early_leaves_its_places_to_others(open_llm: Open, error: BaseException) -> None:
    llm = open_llm()
    alone = tokens(llm, 1)
    with ThreadPoolExecutor(2) as threads:
        others = [threads.submit(tokens, llm, 1) for _ in range(2)]
        with pytest.raises(type(error)):
            llm.generate(prompts(0) * 8, use_tqdm=Broken(error))
        assert [other.result() for other in others] == [alone, alone]
    assert tokens(llm, 1) == alone
    assert llm.load().num_blocks_used == 0


def test_the_error_of_a_call_stays_in_it(open_llm: Open) -> None:
    llm = open_llm()
    alone = tokens(llm, 0)
    with ThreadPoolExecutor(2) as threads:
        good = [threads.submit(tokens, llm, 0) for _ in range(3)]
        bad = threads.submit(llm.generate, {"prompt_token_ids": [1, -1]}, use_tqdm=False)
        with pytest.raises(InvalidArgument, match="-1 is not a token id"):
            bad.result()
        assert [one.result() for one in good] == [alone] * 3


def test_when_the_engine_fails_every_call_ends_with_an_error(open_llm: Open) -> None:
    llm = open_llm(Faults(fail_at_step=3))
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(tokens, llm, call) for call in range(3)]
        assert all(isinstance(call.exception(), InternalError | Unavailable) for call in calls)
        assert any(isinstance(call.exception(), InternalError) for call in calls)
    with pytest.raises(Unavailable, match="failed"):
        tokens(llm, 0)
    assert llm.load().num_running >= 0


class Closing(Broken):
    """A bar that closes the LLM when the first prompt is done."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(ValueError())
        self._llm = llm

    def update(self, count: int) -> None:
        self._llm.close()


def test_after_close_calls_fail_at_once_and_the_thread_is_gone(open_llm: Open) -> None:
    llm = open_llm()
    with pytest.raises(Unavailable, match="the LLM was closed during the call"):
        llm.generate(prompts(0) * 8, SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=Closing(llm))
    llm.close()
    for call in (lambda: tokens(llm, 0), llm.reset_prefix_cache, lambda: llm.load_adapter("a", "b")):
        with pytest.raises(Unavailable, match="the LLM is closed"):
            call()
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]


@pytest.mark.thinned(2)
def test_the_thread_ends_with_an_object_that_is_collected(open_llm: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    open_llm().close()  # so that `build` is replaced
    executor = FakeExecutor()
    monkeypatch.setattr("jpaged.local_model.build", lambda *_, **__: make_serving(executor, EngineConfig.load({})))
    llm = LLM()
    tokens(llm, 0)
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]


def test_a_forked_child_gets_an_error_at_once(open_llm: Open) -> None:
    llm = open_llm()
    before = tokens(llm, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fork with threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in (lambda: tokens(llm, 0), llm.reset_prefix_cache, llm.load):
                with pytest.raises(Unavailable, match=r"belongs to process \d+.* do not survive fork"):
                    call()
            llm.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tokens(llm, 0) == before
