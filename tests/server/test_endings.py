"""However a call ends, it ends once, and its blocks come back."""

import asyncio
import functools
import random
import threading

import grpc
import pytest
from grpc import aio

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.testing import ByteTokenizer, FakeExecutor, expected_tokens
from tests.server.connections.raw_http2 import HEADERS, INITIAL_WINDOW_SIZE, Connection, message
from tests.server.harness import collect, eventually, failure_of, request, running


async def test_a_cancelled_call_frees_its_blocks(harness):
    harness.faults.hold_after(3)
    call = harness.inference.Generate(request(max_tokens=120))
    await call.read()
    call.cancel()
    await eventually(lambda: harness.num_open_calls == 0)
    harness.faults.release()
    await eventually(lambda: harness.num_blocks_used == 0)
    assert harness.serving.engine.load().num_generation_tokens < 120


@pytest.mark.long
async def test_a_cancelled_call_never_ends_a_later_one_of_the_same_id(harness):
    num_finished = 0
    for turn in range(30):
        request_id = f"again-{turn}"
        first = harness.inference.Generate(request(request_id=request_id, max_tokens=2))
        await first.read()
        first.cancel()
        try:
            messages = await collect(harness.inference.Generate(request(request_id=request_id, max_tokens=20)))
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:  # word of the cancelling had not come through
                raise
            continue
        assert messages[-1].usage.completion_tokens == 20
        num_finished += 1
    assert num_finished > 0


async def test_an_id_is_free_once_the_finish_has_come(harness):
    for _ in range(30):
        messages = await collect(harness.inference.Generate(request(request_id="again", max_tokens=2)))
        assert messages[-1].HasField("finish")


async def test_an_id_is_free_once_its_request_has_ended_whether_or_not_its_reader_reads(harness):
    generate = b"/jpaged.v1.InferenceService/Generate"
    harness.faults.hold_after(3)
    async with Connection(harness.port, {INITIAL_WINDOW_SIZE: 0}) as connection:
        connection.begin(generate, message(request(request_id="again").SerializeToString()))
        while (await connection.read())[0] != HEADERS:  # then it is being told its first token
            pass
        harness.faults.release()
        await eventually(lambda: harness.serving.engine.num_ended_by_reason()["length"] == 1)
        error = await failure_of(harness.control.Abort(control_pb2.AbortRequest(request_id="again")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        harness.faults.hold_after(3)
        call = harness.inference.Generate(request(request_id="again", max_tokens=100))
        first = await call.read()
    await eventually(lambda: harness.server._service._num_calls == 1)
    await harness.control.Abort(control_pb2.AbortRequest(request_id="again"))  # the one that left took no id with it
    harness.faults.release()
    messages = [first, *await collect(call)]
    assert messages[-1].finish.reason == inference_pb2.FINISH_REASON_ABORT


async def test_answers_that_nobody_reads_are_bounded():
    executor = FakeExecutor(max_num_seqs=2)
    async with running(executor=executor, max_num_seqs=2, max_num_queued_reqs=1) as harness:
        async with Connection(harness.port, {INITIAL_WINDOW_SIZE: 0}) as connection:
            ended = harness.serving.engine.num_ended_by_reason
            for count in range(1, 7):
                generate = b"/jpaged.v1.InferenceService/Generate"
                connection.begin(generate, message(request(request_id=f"{count}").SerializeToString()))
                await eventually(functools.partial(lambda count: ended()["length"] == count, count))
            error = await failure_of(harness.inference.Generate(request()))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "6 calls are open, the limit is 6" in error.details()
        await eventually(lambda: harness.server._service._num_calls == 0)
        assert len(await collect(harness.inference.Generate(request()))) > 0


async def test_a_deadline_ends_a_running_request(harness):
    harness.faults.hold_after(3)
    call = harness.inference.Generate(request(max_tokens=120), timeout=2)
    await call.read()
    error = await failure_of(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    harness.faults.release()
    await eventually(lambda: harness.num_blocks_used == 0)
    ended = harness.serving.engine.num_ended_by_reason()
    assert ended == {"stop": 0, "length": 0, "abort": 0, "deadline": 1, "error": 0}


async def test_a_deadline_reaches_the_engine(harness, monkeypatch):
    deadlines = []
    engine = harness.serving.engine
    submit = engine.submit

    def noting(what, sink):
        deadlines.append(None if what.deadline_s is None else what.deadline_s - engine.clock())
        submit(what, sink)

    monkeypatch.setattr(engine, "submit", noting)
    await collect(harness.inference.Generate(request(), timeout=5000))
    await collect(harness.inference.Generate(request()))
    assert deadlines[0] == pytest.approx(5000, abs=100)
    assert deadlines[1] is None


async def test_a_deadline_that_has_passed_is_an_error_of_the_engine_too(harness):
    call = harness.inference.Generate(request(), timeout=1e-9)
    assert (await failure_of(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_abort_ends_the_stream_with_a_finish(harness):
    harness.faults.hold_after(3)
    call = harness.inference.Generate(request(request_id="doomed", max_tokens=120))
    first = await call.read()
    await harness.control.Abort(control_pb2.AbortRequest(request_id="doomed"))
    harness.faults.release()
    messages = [first, *await collect(call)]
    assert messages[-1].finish.reason == inference_pb2.FINISH_REASON_ABORT
    token_ids = [i for m in messages for i in m.token_ids]
    assert len(token_ids) == messages[-1].usage.completion_tokens < 120
    assert token_ids == expected_tokens(list(b"hello"), len(token_ids))


@pytest.mark.parametrize(
    ("request_id", "code"), [("nobody", grpc.StatusCode.NOT_FOUND), ("", grpc.StatusCode.INVALID_ARGUMENT)]
)
async def test_an_abort_of_nobody_says_so(harness, request_id, code):
    error = await failure_of(harness.control.Abort(control_pb2.AbortRequest(request_id=request_id)))
    assert error.code() is code


@pytest.mark.long
async def test_a_slow_reader_stalls_nobody_and_loses_nothing():
    executor = FakeExecutor(num_blocks=1024, block_size=16, max_model_len=8192)
    async with running(executor=executor) as harness:
        slow = harness.inference.Generate(request("slow", max_tokens=4000, logprobs=20))
        first = await slow.read()
        # 4000 tokens with 20 top log-probabilities each are megabytes: more than a connection holds for a slow reader.
        quick = await collect(harness.inference.Generate(request("quick", max_tokens=50)))
        assert quick[-1].usage.completion_tokens == 50
        await eventually(lambda: harness.num_blocks_used == 0)
        messages = [first, *await collect(slow)]
        token_ids = [i for m in messages for i in m.token_ids]
        assert token_ids == expected_tokens(list(b"slow"), 4000)
        assert len(messages) < 4000  # what waited was merged
        assert max(message.ByteSize() for message in messages) < 4 << 20


async def test_a_long_text_is_tokenised_off_the_event_loop():
    threads = []

    class Noting(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            threads.append(threading.current_thread() is threading.main_thread())
            return super().encode(text, add_special_tokens=add_special_tokens)

    executor = FakeExecutor(num_blocks=1024, max_model_len=4096)
    async with running(executor=executor, tokenizer=Noting()) as harness:
        await collect(harness.inference.Generate(request("x" * 3000)))
        await collect(harness.inference.Generate(request("x" * 30)))
        await harness.inference.Tokenize(inference_pb2.TokenizeRequest(text="x" * 3000))
        await harness.inference.Tokenize(inference_pb2.TokenizeRequest(text="x" * 30))
    assert threads == [False, True, False, True]


@pytest.mark.long
async def test_many_streams_end_once_each_and_every_block_comes_back():
    rng = random.Random(7)

    async def one(harness, number: int) -> str:
        how = rng.choice(["finish", "finish", "cancel", "deadline", "abort"])
        request_id = f"r{number}"
        timeout = rng.uniform(0.0, 0.05) if how == "deadline" else None
        message = request(f"prompt {number}", request_id=request_id, max_tokens=rng.randint(1, 100))
        call = harness.inference.Generate(message, timeout=timeout)
        num_finishes = 0
        try:
            async for response in call:
                assert num_finishes == 0, "a message followed the finish"
                num_finishes += response.HasField("finish")
                if how == "cancel" and (number % 2 or rng.random() < 0.3):
                    call.cancel()
                if how == "abort" and rng.random() < 0.3:
                    harness.control.Abort(control_pb2.AbortRequest(request_id=request_id))
        except (aio.AioRpcError, asyncio.CancelledError) as error:
            ended = error.code() if isinstance(error, aio.AioRpcError) else grpc.StatusCode.CANCELLED
            assert ended in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
            return ended.name
        assert num_finishes == 1
        return "finish"

    executor = FakeExecutor(num_blocks=128)  # too few for 8 long rows: some are preempted on the way
    async with running(executor=executor) as harness, asyncio.timeout(300):
        endings = await asyncio.gather(*(one(harness, number) for number in range(64)))
        assert {"finish", "DEADLINE_EXCEEDED", "CANCELLED"} <= set(endings)
        await eventually(lambda: harness.num_blocks_used == 0 and harness.serving.engine.load().num_waiting == 0)
        load = await harness.control.GetLoad(control_pb2.GetLoadRequest())
        assert load.num_blocks_free == load.num_blocks == 128
        assert load.num_running == 0
        last = await collect(harness.inference.Generate(request("still alive")))
        assert last[-1].HasField("finish")


class Held(ByteTokenizer):
    """Tokenises a long text when it is told to."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def encode(self, text, *, add_special_tokens=True):
        if len(text) > 1000:
            self.begun.set()
            self.go_on.wait(60)
        return super().encode(text, add_special_tokens=add_special_tokens)


async def test_an_id_can_be_aborted_while_its_text_is_tokenised_and_is_free_after_it():
    tokenizer = Held()
    executor = FakeExecutor(num_blocks=2048, max_model_len=4096)
    async with running(executor=executor, tokenizer=tokenizer) as harness:
        for _ in range(2):
            tokenizer.begun.clear()
            call = harness.inference.Generate(request("x" * 3000, request_id="doomed"))
            await asyncio.to_thread(tokenizer.begun.wait, 60)
            error = await failure_of(harness.inference.Generate(request(request_id="doomed")))
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS
            await harness.control.Abort(control_pb2.AbortRequest(request_id="doomed"))
            (last,) = await collect(call)  # although the tokenizer is still at it
            assert last.is_last
            assert last.request_id == "doomed"
            assert last.finish.reason == inference_pb2.FINISH_REASON_ABORT
            error = await failure_of(harness.control.Abort(control_pb2.AbortRequest(request_id="doomed")))
            assert error.code() is grpc.StatusCode.NOT_FOUND
        tokenizer.go_on.set()
        messages = await collect(harness.inference.Generate(request("short", request_id="doomed")))
        assert messages[-1].usage.completion_tokens == 8
        assert sum(harness.serving.engine.num_ended_by_reason().values()) == 1


async def test_a_call_that_is_cancelled_while_its_text_is_tokenised_never_reaches_the_engine():
    tokenizer = Held()
    executor = FakeExecutor(num_blocks=2048, max_model_len=4096)
    async with running(executor=executor, tokenizer=tokenizer) as harness:
        call = harness.inference.Generate(request("x" * 3000, request_id="left"))
        await asyncio.to_thread(tokenizer.begun.wait, 60)
        call.cancel()
        await eventually(lambda: harness.num_open_calls == 0)
        tokenizer.go_on.set()
        await collect(harness.inference.Generate(request("short")))
        assert sum(harness.serving.engine.num_ended_by_reason().values()) == 1


async def test_an_abort_that_comes_just_when_the_text_is_tokenised_keeps_the_request_from_the_engine(monkeypatch):
    aborts, submitted = [], []

    class Prompt(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            if text == "doomed":  # short, so this is the event loop, which hears of both before the call goes on
                asyncio.get_running_loop().call_soon(lambda: aborts.append(abort()))
            return super().encode(text, add_special_tokens=add_special_tokens)

    async with running(executor=FakeExecutor(), tokenizer=Prompt()) as harness:

        def abort():
            harness.server._service.abort("doomed")

        monkeypatch.setattr(harness.serving.engine, "submit", lambda request, sink: submitted.append(request))
        (last,) = await collect(harness.inference.Generate(request("doomed", request_id="doomed")))
        assert last.finish.reason == inference_pb2.FINISH_REASON_ABORT
        assert (aborts, submitted) == ([None], [])


async def test_a_drain_past_its_time_ends_a_call_whose_text_is_still_tokenised():
    tokenizer = Held()
    executor = FakeExecutor(num_blocks=2048, max_model_len=4096)
    async with running(executor=executor, tokenizer=tokenizer, shutdown_timeout=0.0) as harness:
        call = harness.inference.Generate(request("x" * 3000))
        await asyncio.to_thread(tokenizer.begun.wait, 60)
        harness.server.request_stop()
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        tokenizer.go_on.set()


async def test_logits_that_are_not_finite_end_their_request_alone(harness, caplog):
    harness.faults.hold_after(1)
    good = harness.inference.Generate(request("hello", max_tokens=20))
    await good.read()
    harness.faults.nan_token_ids = frozenset({ord("%")})
    bad = [harness.inference.Generate(request(f"{i}%", n=n)) for i, n in enumerate((1, 2, 3))]
    harness.faults.release()
    for call in bad:
        error = await failure_of(call)
        assert error.code() is grpc.StatusCode.INTERNAL
        context = "no token 1 can be sampled for sequence 0, after 2 tokens of context"
        assert error.details() == f"the model's logits are not finite: {context}"
    messages = await collect(good)
    assert messages[-1].finish.reason == inference_pb2.FINISH_REASON_LENGTH
    await eventually(lambda: harness.num_blocks_used == 0)
    load = await harness.control.GetLoad(control_pb2.GetLoadRequest())
    assert load.num_nonfinite_requests == 3
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("ERROR", None)]
