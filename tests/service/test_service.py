"""The service without a protocol: what it lets in, and what becomes of a request whose reader leaves."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from jpaged.access.authenticator import CallContext, enter
from jpaged.access.keys import ApiKey, Role
from jpaged.config import EngineConfig
from jpaged.errors import AlreadyExists, InvalidArgument, NotFound, PermissionDenied, Unavailable
from jpaged.service import loaded_model
from jpaged.service.calls import Call
from jpaged.service.loaded_model import IgnoredFields, RoleCounts
from jpaged.service.service import BlockingPools, Service, ServiceState, Stage
from jpaged.testing import ByteTokenizer, FakeExecutor, Faults, expected_tokens
from jpaged.types import FinishReason, Prompt, SamplingParams
from tests.server.harness import eventually, make_serving


def call(text: str = "hello", *, max_tokens: int = 8, **fields) -> Call:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Call(read=lambda: (Prompt(text=text), sampling), size=len(text), **fields)


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
async def service(faults: Faults) -> AsyncIterator[Service]:
    config = EngineConfig.load({})
    model = make_serving(FakeExecutor(faults=faults), config)
    model.engine.start()
    yield Service(ServiceState(config, model))
    faults.release()
    model.engine.stop()


async def test_events_come_one_by_one_until_the_last(service):
    async with service.generate(call()) as generation:
        assert not service.is_idle.is_set()
        events = [event async for event in generation]
    token_ids = [token_id for event in events for token_id in event.token_ids]
    assert token_ids == list(expected_tokens(ByteTokenizer().encode("hello"), 8))
    assert [event.is_last for event in events] == [False] * (len(events) - 1) + [True]
    assert service.is_idle.is_set()


async def test_a_reader_that_leaves_takes_its_request_along(service, faults):
    engine = service.state.loaded().engine
    faults.hold_after(3)
    async with service.generate(call(max_tokens=100)) as generation:
        await anext(generation)
    faults.release()
    await eventually(lambda: engine.num_ended_by_reason()["abort"] == 1)
    await eventually(lambda: engine.load().num_blocks_used == 0)


async def test_an_id_is_a_tenants_own_and_in_flight_once(service, faults):
    faults.hold_after(3)
    async with service.generate(call(max_tokens=100, request_id="r", tenant="a")) as generation:
        await anext(generation)
        async with service.generate(call(max_tokens=1, request_id="r", tenant="b")):
            with pytest.raises(AlreadyExists, match="request_id: a request 'r' is in flight"):
                await service.generate(call(request_id="r", tenant="a")).__aenter__()
        with pytest.raises(NotFound):
            service.abort("r")
        service.abort("r", "a")
        faults.release()
        events = [event async for event in generation]
    assert events[-1].finish is not None
    assert events[-1].finish.reason is FinishReason.ABORT


@pytest.mark.parametrize(
    ("name", "salt", "message"),
    [("", "", "name: '' is not 1 to 128"), ("n" * 129, "", "name: "), ("n", "x" * 257, "cache_salt: 257 characters")],
)
async def test_a_pin_has_a_name_and_a_bounded_salt(service, name, salt, message):
    with pytest.raises(InvalidArgument, match=message):
        await service.pin_prefix(name, Prompt(text="x" * 40), salt)


async def test_what_is_not_served_here_is_refused(service):
    with pytest.raises(NotFound, match="model: 'other' is not served here; 'fake' is"):
        await service.detokenize([1], model="other")
    with pytest.raises(InvalidArgument, match="request_id"):
        async with service.generate(call(request_id="é")):
            raise AssertionError


async def test_a_service_says_why_it_does_not_serve():
    config = EngineConfig.load({"disable_control": True})
    state = ServiceState(config)
    service = Service(state)
    state.note_progress("weights", 1, 3)
    with pytest.raises(Unavailable, match="the server is starting: weights, 1 of 3"):
        await service.detokenize([1])
    state.note_loaded(make_serving(FakeExecutor(), config))
    with pytest.raises(PermissionDenied, match="Abort is turned off"):
        service.abort("r")
    state.enter(Stage.DRAINING)
    with pytest.raises(Unavailable, match="is draining"):
        await service.detokenize([1])
    state.note_failure(ValueError("first"))
    state.note_failure(ValueError("second"))
    state.enter(Stage.FAILED)
    with pytest.raises(Unavailable, match="the engine has died: first"):
        await service.detokenize([1])


async def test_what_fails_after_its_caller_went_away_is_no_complaint_of_the_loop():
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
    may_end, ended = threading.Event(), threading.Event()

    def fail():
        assert may_end.wait(60)
        ended.set()
        raise InvalidArgument("path", "holds no adapter")

    workers = BlockingPools()
    reading = asyncio.create_task(workers.read(fail))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    del reading
    may_end.set()
    await eventually(ended.is_set)
    with pytest.raises(InvalidArgument, match="path: holds no adapter"):
        await workers.read(fail)  # behind the other, whose end the loop has seen by now
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("length", [4, 3000])
async def test_a_prefix_is_pinned_for_the_tenant_of_the_key_however_long_it_is(length):
    model = make_serving(FakeExecutor(num_blocks=4096, max_model_len=4096), EngineConfig.load({}))
    model.engine.start()
    service = Service(ServiceState(model.config, model))

    async def act() -> None:
        key = ApiKey("acme-1", "acme", Role.CONTROL)
        enter(CallContext(face="grpc", method="PinPrefix", peer="", key=key, tenant="acme"))
        await service.pin_prefix("system", Prompt(text="x" * length))
        service.unpin_prefix("system")

    await asyncio.create_task(act())
    model.engine.stop()


def test_unknown_fields_are_logged_once_and_beyond_a_number_counted_together(caplog: pytest.LogCaptureFixture) -> None:
    fields = IgnoredFields()
    fields.add(f"field{i}" for i in range(64))
    fields.add(["field0", "more", "most"])
    assert len(caplog.records) == 64 and "'field63'" in caplog.records[-1].getMessage()
    assert (fields.counts["field0"], fields.counts["field1"], fields.counts["other"]) == (2, 1, 2)
    assert len(fields.counts) == 65


def test_failures_of_a_reason_are_counted_and_logged_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(loaded_model, "time", SimpleNamespace(monotonic=lambda: now[0]))
    counts = RoleCounts()
    for pause_s, error in ((0.0, TimeoutError()), (9.9, TimeoutError()), (0.1, Unavailable("no server"))):
        now[0] += pause_s
        counts.failed("prefill", error)
    counts.failed("transfer", TimeoutError("late"))
    counts.here("short")
    counts.add(num_asked=2, prefill_wait_s=0.5)
    counts.add(num_asked=1)
    assert [one.getMessage().rpartition("(")[2] for one in caplog.records] == [
        "1 so far): TimeoutError",
        "3 so far): no server",
        "1 so far): late",
    ]
    assert (counts.num_failed, counts.num_here) == ({"prefill": 3, "transfer": 1}, {"short": 1})
    assert (counts.load().num_asked, counts.load().prefill_wait_s) == (3, 0.5)
