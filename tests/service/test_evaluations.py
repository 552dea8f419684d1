"""A call of several requests: let in once, bounded, ended whole, whatever ends it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from jpaged.config import EngineConfig
from jpaged.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    NotFound,
    QueueFull,
    RequestTooLong,
    Unavailable,
    Unsupported,
)
from jpaged.service.score_embed import CallerOptions, VectorOptions, embed, score
from jpaged.service.service import Service, ServiceState, Stage
from jpaged.testing import FakeExecutor, Faults
from jpaged.types import Embedding, Prompt, Request, Score
from tests.server.harness import eventually, make_serving


class Adapted(FakeExecutor):
    """It has a slot for adapters."""

    max_loras = 1


class Rig:
    """A service over a fake engine, whose requests are noted as the engine gets them."""

    def __init__(self, faults: Faults | None = None, **options: Any) -> None:
        self.faults = faults or Faults()
        config = EngineConfig.load(options)
        rows = config.scheduler.max_num_seqs or 8
        self.model = make_serving(Adapted(faults=self.faults, max_num_seqs=rows), config)
        self.engine = self.model.engine
        self.service = Service(ServiceState(config, self.model))
        self.requests: list[Request] = []
        submit = self.engine.submit

        def noting(request: Request, sink: Any) -> None:
            submit(request, sink)
            self.requests.append(request)

        self.engine.submit = noting  # type: ignore[method-assign]

    async def score(self, prompt: str, continuations: Sequence[str], **asker: Any) -> list[Score]:
        size = sum(len(prompt) + len(one) for one in continuations)
        return await score(self.service, CallerOptions(**asker), lambda: (Prompt(text=prompt), continuations), size)

    async def embed(self, texts: Sequence[str], **asker: Any) -> list[Embedding]:
        size = sum(map(len, texts))
        return await embed(
            self.service,
            CallerOptions(**asker),
            lambda: [Prompt(text=one) for one in texts],
            size,
            VectorOptions("last"),
        )

    def stop(self) -> None:
        self.faults.release()
        self.engine.stop()

    @property
    def is_at_rest(self) -> bool:
        load = self.engine.load()
        return self.service.is_idle.is_set() and (load.num_running, load.num_waiting, load.num_blocks_used) == (0, 0, 0)


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    rig = Rig(**getattr(request, "param", {}))
    rig.engine.start()
    yield rig
    rig.stop()


async def test_each_part_is_a_request_and_is_counted(rig):
    scores = await rig.score("prompt", ["x", "yz", "x"])
    assert [score.token_ids for score in scores] == [(120,), (121, 122), (120,)]
    assert scores[0].logprob == scores[2].logprob
    vectors = await rig.embed(["ab", "abc"])
    assert [one.values[:2] for one in vectors] == [(98.0, 2.0), (99.0, 3.0)]
    await eventually(lambda: rig.is_at_rest)
    assert rig.engine.num_ended_by_reason()["length"] == 5
    assert rig.engine.load().num_prompt_tokens == 7 + 8 + 7 + 2 + 3


async def test_what_the_asker_says_holds_for_every_request(rig):
    await rig.score("p", ["x", "y"], tenant="t", cache_salt="s", priority=-7, remaining_s=500.0)
    await rig.embed(["a"], tenant="u", priority=2)
    told = [(one.tenant, one.cache_tenant, one.sampling.cache_salt, one.sampling.priority) for one in rig.requests]
    assert told == [("t", "t", "s", -7)] * 2 + [("u", "u", "", 2)]
    assert [one.deadline_s is None for one in rig.requests] == [False, False, True]
    assert all(one.is_non_streaming for one in rig.requests)


async def test_tenants_and_salts_share_no_prefix(rig):
    prompt = "a prompt of several blocks"
    first = await rig.score(prompt, ["x"], tenant="a")
    again = await rig.score(prompt, ["x"], tenant="a")
    others = [
        await rig.score(prompt, ["x"], **asker) for asker in ({"tenant": "b"}, {}, {"tenant": "a", "cache_salt": "s"})
    ]
    assert first[0].usage.cached_tokens == 0 < again[0].usage.cached_tokens
    assert [one[0].usage.cached_tokens for one in others] == [0, 0, 0]
    assert {one[0].logprob for one in others} == {first[0].logprob}


@pytest.mark.parametrize(
    ("asker", "kind", "message"),
    [
        ({"model": "other"}, NotFound, "model: 'other' is not served here; 'fake' is"),
        ({"adapter": "none"}, NotFound, "adapter: no adapter 'none' is loaded"),
        ({"cache_salt": "s" * 257}, InvalidArgument, "cache_salt: 257 characters; at most 256"),
    ],
)
async def test_a_call_that_names_what_there_is_not_begins_nothing(rig, asker, kind, message):
    for call in (rig.score("p", ["x"], **asker), rig.embed(["x"], **asker)):
        with pytest.raises(kind, match=message):
            await call
    assert rig.requests == []
    assert rig.is_at_rest


async def test_a_part_that_cannot_be_is_found_before_any_runs(rig):
    with pytest.raises(InvalidArgument, match=r"^continuations\[2\]: is empty$"):
        await rig.score("p", ["x", "y", ""])
    with pytest.raises(RequestTooLong, match=r"^inputs\[1\]: 200 tokens are over max_model_len \(128\)$"):
        await rig.embed(["x", "y" * 200])
    with pytest.raises(InvalidArgument, match=r"^continuations: have 4195000 characters and token ids"):
        await score(rig.service, CallerOptions(), _unread, 4_195_000)
    with pytest.raises(InvalidArgument, match=r"^inputs: 1025 are given; must be from 1 to 1024$"):
        await rig.embed(["x"] * 1025)
    assert rig.requests == []
    assert rig.is_at_rest


def _unread() -> tuple[Prompt, Sequence[str]]:
    raise AssertionError("what is too large is not looked at")


async def test_a_prompt_that_no_pool_holds_names_its_part():
    executor = FakeExecutor(num_blocks=4, block_size=4, max_model_len=128)
    model = make_serving(executor, EngineConfig.load({}))
    model.engine.start()
    service = Service(ServiceState(model.config, model))
    try:
        with pytest.raises(RequestTooLong, match=r"^inputs\[0\]: .*over the whole pool \(16: 4 blocks of 4\)$"):
            await embed(service, CallerOptions(), lambda: [Prompt(text="x" * 40)], 40, VectorOptions("mean"))
        with pytest.raises(RequestTooLong, match=r"^continuations\[1\]: .*over the whole pool"):
            await score(service, CallerOptions(), lambda: (Prompt(text="p"), ["x", "x" * 40]), 50)
    finally:
        model.engine.stop()


async def test_adapters_that_are_off_are_unsupported():
    model = make_serving(FakeExecutor(), EngineConfig.load({}))
    with pytest.raises(Unsupported, match="adapters are off"):
        await embed(
            Service(ServiceState(model.config, model)), CallerOptions(adapter="a"), list, 1, VectorOptions("last")
        )


@pytest.mark.parametrize("rig", [{"max_num_seqs": 2}], indirect=True)
async def test_a_call_keeps_the_adapter_that_its_name_meant(rig, tmp_path):
    (tmp_path / "adapter").write_text("5")
    await rig.service.load_adapter("a", str(tmp_path / "adapter"))
    rig.faults.gate.clear()
    scoring = asyncio.create_task(rig.score("p", [*"abcdefgh"], adapter="a"))
    await eventually(lambda: len(rig.requests) == 2)
    rig.service.unload_adapter("a")
    rig.faults.release()
    assert len(await scoring) == 8
    assert {one.adapter_number for one in rig.requests} == {1}


@pytest.mark.parametrize("rig", [{"max_num_seqs": 2}], indirect=True)
async def test_no_more_run_at_once_than_steps_have_rows(rig):
    rig.faults.gate.clear()
    scoring = asyncio.create_task(rig.score("p", [*"abcdefgh"]))
    await eventually(lambda: len(rig.requests) == 2)
    assert rig.service._num_calls == 2
    rig.faults.release()
    assert [score.token_ids for score in await scoring] == [(ord(one),) for one in "abcdefgh"]


@pytest.mark.parametrize("rig", [{"max_num_seqs": 2}], indirect=True)
async def test_a_call_that_goes_away_takes_its_requests_along(rig):
    rig.faults.gate.clear()
    scoring = asyncio.create_task(rig.score("p", [*"abcdefgh"]))
    await eventually(lambda: len(rig.requests) == 2)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    rig.faults.release()
    await eventually(lambda: rig.is_at_rest)
    assert len(rig.requests) == 2


@pytest.mark.parametrize("rig", [{"max_num_seqs": 1}], indirect=True)
async def test_the_deadline_is_the_calls_own_and_not_each_requests(rig, monkeypatch):
    times = iter(range(0, 1000, 100))
    monkeypatch.setattr("jpaged.service.score_embed.time", SimpleNamespace(monotonic=lambda: float(next(times))))
    await rig.score("p", ["x", "y", "z"], remaining_s=1000.0)
    deadlines = [request.deadline_s for request in rig.requests]
    now_s = rig.engine.clock()
    assert [deadline_s - now_s for deadline_s in deadlines] == pytest.approx([900.0, 800.0, 700.0], abs=60)


@pytest.mark.parametrize("rig", [{"max_num_seqs": 1}], indirect=True)
async def test_a_deadline_that_passes_between_requests_ends_the_call(rig, monkeypatch):
    times = iter(range(0, 100_000, 100))
    monkeypatch.setattr("jpaged.service.score_embed.time", SimpleNamespace(monotonic=lambda: float(next(times))))
    with pytest.raises(DeadlineExceeded):
        await rig.score("p", ["x", "y", "z"], remaining_s=150.0)
    await eventually(lambda: rig.is_at_rest)
    ended = rig.engine.num_ended_by_reason()
    assert (ended["length"], ended["deadline"]) == (1, 1)


@pytest.mark.parametrize("rig", [{"max_num_seqs": 2}], indirect=True)
async def test_a_drain_waits_for_all_parts_and_takes_no_call(rig):
    rig.faults.gate.clear()
    scoring = asyncio.create_task(rig.score("p", [*"abcdefgh"]))
    await eventually(lambda: len(rig.requests) == 2)
    rig.service.state.enter(Stage.DRAINING)
    assert not rig.service.is_idle.is_set()
    with pytest.raises(Unavailable, match="draining"):
        await rig.embed(["x"])
    rig.faults.release()
    assert len(await scoring) == 8
    assert rig.service.is_idle.is_set()


@pytest.mark.parametrize("rig", [{"max_num_seqs": 2}], indirect=True)
async def test_a_drain_that_runs_out_of_time_ends_the_call(rig):
    rig.faults.gate.clear()
    scoring = asyncio.create_task(rig.score("p", [*"abcdefgh"]))
    await eventually(lambda: len(rig.requests) == 2)
    rig.service.end_open_calls(Unavailable("the server shut down before the request finished"))
    with pytest.raises(Unavailable, match="shut down before"):
        await scoring
    rig.faults.release()
    await eventually(lambda: rig.is_at_rest)
    assert len(rig.requests) == 2


async def test_an_engine_that_dies_ends_the_call():
    rig = Rig(Faults(fail_at_step=0))
    rig.engine.start()
    try:
        with pytest.raises(InternalError):
            await rig.score("p", ["x", "y"])
    finally:
        rig.stop()


def full_now_and_then(rig: Rig, is_full: Any) -> None:
    """Has the engine refuse requests for a full queue where `is_full` says so."""
    submit, tries = rig.engine.submit, iter(range(10_000))

    def refusing(request: Request, sink: Any) -> None:
        if is_full(next(tries)):
            raise QueueFull("the queue is full", retry_after_s=0.0)
        submit(request, sink)

    rig.engine.submit = refusing  # type: ignore[method-assign]


async def test_requests_wait_for_a_place_once_their_call_has_one(rig):
    full_now_and_then(rig, lambda number: number % 2 == 1)
    assert [score.token_ids for score in await rig.score("p", [*"abcdefgh"])] == [(ord(one),) for one in "abcdefgh"]
    assert len(rig.requests) == 8


async def test_a_call_is_refused_for_a_full_queue_when_none_of_it_has_a_place(rig):
    full_now_and_then(rig, lambda number: True)
    with pytest.raises(QueueFull, match="the queue is full"):
        await rig.embed(["a", "b", "c"])
    assert rig.is_at_rest


@pytest.mark.parametrize("rig", [{"max_num_seqs": 1, "max_num_queued_reqs": 1}], indirect=True)
async def test_calls_that_are_open_are_bounded(rig):
    rig.faults.gate.clear()
    open_calls = [asyncio.create_task(rig.score("p", ["a", "b"])) for _ in range(2)]
    await eventually(lambda: len(rig.requests) == 2)
    with pytest.raises(QueueFull, match="2 calls of several requests are open, the limit is 2"):
        await rig.score("p", ["x"])
    rig.faults.release()
    assert [len(scores) for scores in await asyncio.gather(*open_calls)] == [2, 2]
    assert len(await rig.score("p", ["x"])) == 1


async def test_a_bug_in_one_part_is_that_error_and_no_group(rig, monkeypatch):
    monkeypatch.setattr("jpaged.service.score_embed.get_score", lambda output: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await rig.score("p", ["x", "y"])
