"""Both clients against a real server: what they return, what they raise, what they cancel."""

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpaged._proto.v1 import inference_pb2, inference_pb2_grpc
from jpaged.client import AsyncClient, Client
from jpaged.client.channel import MAX_ATTEMPTS
from jpaged.client.errors import build_error
from jpaged.client.routing.retry import RetryState
from jpaged.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    JpagedError,
    LimitExceeded,
    NotFound,
    QueueFull,
    RequestTooLong,
    Unavailable,
    Unsupported,
)
from jpaged.server.servicer import InferenceServicer
from jpaged.testing import ByteTokenizer, FakeExecutor, expected_tokens
from jpaged.types import SamplingParams
from tests.server.harness import eventually, running

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)


class Threaded:
    """`Client` in the shape of `AsyncClient`: every call on a thread, for tests that run both."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **keywords: asyncio.to_thread(getattr(self._client, name), *args, **keywords)


@pytest.fixture(params=["sync", "async"])
async def client_of(request) -> AsyncIterator[Any]:
    """Makes clients of both kinds for a target."""
    made: list[Any] = []

    def make(target: str, **options: Any) -> Any:
        if request.param == "async":
            made.append(AsyncClient(target, **options))
            return made[-1]
        made.append(Client(target, **options))
        return Threaded(made[-1])

    yield make
    for client in made:
        if isinstance(client, AsyncClient):
            await client.close()
        else:
            await asyncio.to_thread(client.close)


def test_both_clients_have_the_same_methods():
    def signatures(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in vars(kind).items()
            if inspect.isfunction(member) and not name.startswith("_")
        }

    assert signatures(Client) == signatures(AsyncClient)


async def test_complete_asks_for_one_message(client_of, monkeypatch):
    asked: list[bool] = []
    generate = InferenceServicer.Generate

    async def note(self: InferenceServicer, message: inference_pb2.GenerateRequest, context: Any) -> None:
        asked.append(message.whole)
        await generate(self, message, context)

    monkeypatch.setattr(InferenceServicer, "Generate", note)
    async with running() as harness:
        client = client_of(harness.target)
        await client.complete("hello", GREEDY)
    assert asked == [True]


async def test_complete_returns_everything(client_of):
    async with running() as harness:
        client = client_of(harness.target)
        output = await client.complete(
            "hello", SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=2)
        )
        (sequence,) = output.outputs
        assert list(sequence.token_ids) == expected_tokens(list(b"hello"), 5)
        assert sequence.text == ByteTokenizer().decode(sequence.token_ids)
        assert sequence.finish_reason == "length"
        assert sequence.logprobs is not None
        assert [len(position.top) for position in sequence.logprobs] == [2] * 5
        assert sequence.cumulative_logprob == pytest.approx(-0.125 * 5)
        assert output.prompt == "hello"
        assert output.prompt_token_ids == tuple(b"hello")
        assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (5, 5)
        by_ids = await client.complete(prompt_token_ids=[104, 105], sampling=GREEDY, request_id="mine")
        assert by_ids.request_id == "mine"
        assert by_ids.prompt_token_ids == (104, 105)
        assert by_ids.outputs[0].logprobs is None
        chat = await client.complete(messages=[{"role": "user", "content": "hi"}], sampling=GREEDY)
        assert bytes(chat.prompt_token_ids) == b"user: hi\nassistant: "


async def test_the_other_calls(client_of):
    async with running() as harness:
        client = client_of(harness.target)
        assert await client.tokenize("abc") == (97, 98, 99)
        chat = await client.tokenize(messages=[{"role": "user", "content": "x"}])
        assert bytes(chat) == b"user: x\nassistant: "
        assert await client.detokenize([104, 105, ByteTokenizer.EOS]) == "hi"
        assert await client.detokenize([104, ByteTokenizer.EOS], skip_special_tokens=False) == "h<eos>"
        parts = [0xC3, 104, ByteTokenizer.EOS]
        assert await client.token_bytes(parts) == (b"\xc3", b"h", b"")
        assert await client.token_bytes(parts, skip_special_tokens=False) == (b"\xc3", b"h", b"<eos>")
        info = await client.server_info()
        assert (info.state, info.api_version, info.platform, info.startup) == ("serving", "v1", "cpu", None)
        assert info.options["port"] == "0"
        model = await client.model_info()
        assert (model.name, model.vocab_size, model.eos_token_ids) == ("fake", 257, (256,))
        load = await client.load()
        assert (load.num_blocks, load.num_running) == (64, 0)
        with pytest.raises(NotFound, match="nobody"):
            await client.abort("nobody")


@pytest.mark.parametrize(
    ("arguments", "error", "field"),
    [
        ({"prompt": ""}, InvalidArgument, "prompt"),
        ({}, InvalidArgument, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, InvalidArgument, "prompt"),
        ({"prompt_token_ids": [999]}, InvalidArgument, "prompt.token_ids"),
        ({"prompt_token_ids": [-1]}, InvalidArgument, "prompt.token_ids"),
        ({"prompt": "x" * 500}, RequestTooLong, "prompt"),
        ({"messages": [{"role": "user"}]}, InvalidArgument, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 1}]}, InvalidArgument, "messages[0].content"),
        ({"prompt": "x", "request_id": "\n"}, InvalidArgument, "request_id"),
        ({"prompt": "x", "sampling": SamplingParams(max_tokens=1 << 32)}, InvalidArgument, "sampling.max_tokens"),
    ],
)
async def test_a_bad_argument_comes_back_with_its_field(client_of, arguments, error, field):
    async with running() as harness:
        with pytest.raises(error) as raised:
            await client_of(harness.target).complete(**arguments)
        assert type(raised.value) is error
        assert raised.value.field == field


async def test_errors_come_back_as_they_were(client_of):
    class Plain(ByteTokenizer):
        def apply_chat_template(self, messages, *, max_bytes):
            raise Unsupported("no chat template here")

    executor = FakeExecutor(max_num_seqs=2)
    async with running(executor=executor, max_num_queued_reqs=1, tokenizer=Plain()) as harness:
        client = client_of(harness.target)
        with pytest.raises(Unsupported, match="no chat template here"):
            await client.complete(messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(NotFound, match="'fake' is"):
            await client_of(harness.target, model="other").complete("hi")
        harness.faults.gate.clear()
        first = asyncio.ensure_future(client.complete("hi", GREEDY, request_id="twin"))
        await eventually(lambda: harness.executor.num_steps > 0)
        with pytest.raises(AlreadyExists):
            await client.complete("hi", GREEDY, request_id="twin")
        with pytest.raises(DeadlineExceeded):
            await client.complete("hi", GREEDY, timeout_s=0.05)
        fillers = [asyncio.ensure_future(client.complete("hi", GREEDY)) for _ in range(3)]
        done, _ = await asyncio.wait(fillers, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        full = done.pop().exception()
        assert isinstance(full, QueueFull)
        assert full.retry_after_s > 0
        harness.faults.release()
        await asyncio.gather(first, *fillers, return_exceptions=True)


@pytest.mark.long
async def test_closing_a_stream_cancels_its_request():
    async with running() as harness, AsyncClient(harness.target) as client:
        for how in ("close", "with", "break"):
            harness.faults.hold_after(3)
            if how == "with":
                async with client.generate("hello", LONG) as stream:
                    await anext(stream)
                assert [chunk async for chunk in stream] == []
            elif how == "close":
                stream = client.generate("hello", LONG)
                await anext(stream)
                stream.close()
            else:
                async for _ in client.generate("hello", LONG):
                    break
                gc.collect()
            await eventually(lambda: harness.num_open_calls == 0)
            harness.faults.release()
            await eventually(lambda: harness.num_blocks_used == 0)
        assert harness.serving.engine.load().num_generation_tokens < 3 * 120


async def test_leaving_a_sync_stream_cancels_its_request():
    async with running() as harness:

        def leave_early() -> None:
            with Client(harness.target) as client:
                for chunk in client.generate("hello", LONG, request_id="early"):
                    assert chunk.request_id == "early"
                    break

        harness.faults.hold_after(3)
        await asyncio.to_thread(leave_early)
        await eventually(lambda: harness.num_open_calls == 0)
        harness.faults.release()
        await eventually(lambda: harness.num_blocks_used == 0)
        assert harness.serving.engine.load().num_generation_tokens < 120


async def test_an_abort_ends_a_stream_with_its_reason():
    async with running() as harness, AsyncClient(harness.target) as client:
        harness.faults.hold_after(3)
        stream = client.generate("hello", LONG)
        await anext(stream)
        await client.abort(stream.request_id)
        harness.faults.release()
        assert [chunk.finish_reason async for chunk in stream][-1] == "abort"


async def test_waiting_for_a_server_that_comes_later(client_of):
    async with running() as harness:
        target = harness.target
    client = client_of(target)
    with pytest.raises(DeadlineExceeded, match=f"{target} was not ready after 0.2 s"):
        await client.wait_until_ready(0.2)
    waiting = asyncio.ensure_future(client.wait_until_ready(10))
    async with running(port=int(target.partition(":")[2])):
        await waiting


class Ending(health_pb2_grpc.HealthServicer):
    """Cuts its first watches in the ways in which a server that ends does, and serves then."""

    def __init__(self) -> None:
        self.codes = [grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, None]

    async def Watch(self, request: Any, context: Any) -> None:
        if self.codes:
            code = self.codes.pop(0)
            await context.write(health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING))
            if code is not None:
                await context.abort(code, "the server ends")
            return
        await context.write(health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING))


async def test_waiting_outlasts_a_server_that_ends_and_comes_again(client_of):
    ending = Ending()
    server = aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(ending, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await client_of(f"127.0.0.1:{port}").wait_until_ready(60)
    assert ending.codes == []
    await server.stop(None)


async def test_closing_a_client_ends_what_waits_with_cancelled():
    async with running() as harness:
        harness.faults.hold_after(3)
        client = AsyncClient(harness.target)
        stream = client.generate("hello", LONG)
        await anext(stream)

        async def read() -> None:
            async for _ in stream:
                pass

        waits: list[Any] = [read(), client.complete("hello", LONG)]
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        await eventually(lambda: harness.num_open_calls == 2)
        await client.close()
        for task in tasks:
            with pytest.raises(Cancelled, match="the client was closed"):
                await task
        harness.faults.release()
    nobody = AsyncClient("127.0.0.1:1")
    waiting = asyncio.ensure_future(nobody.wait_until_ready(60))
    await asyncio.sleep(0)
    await nobody.close()
    with pytest.raises(Cancelled, match="the client was closed"):
        await waiting


@pytest.mark.parametrize("call", [lambda client: client.generate("hi"), Client.load])
def test_a_client_that_another_thread_closes_as_a_call_begins_says_so(monkeypatch, call):
    client, enter = Client("127.0.0.1:1"), RetryState.enter

    def close_first(tries: RetryState) -> Any:
        endpoint = enter(tries)
        client.close()
        return endpoint

    monkeypatch.setattr(RetryState, "enter", close_first)
    with pytest.raises(Cancelled, match="the client was closed"):
        call(client)


async def test_a_closed_client_says_so(client_of):
    client = client_of("127.0.0.1:1")
    await client.close()
    for call in (client.load, lambda: client.complete("hi"), lambda: client.wait_until_ready(60)):
        with pytest.raises(Cancelled, match="the client was closed"):
            await call()


async def test_a_task_that_is_cancelled_while_it_reads_is_cancelled():
    async with running() as harness, AsyncClient(harness.target) as client:
        harness.faults.hold_after(3)
        reading = asyncio.ensure_future(client.complete("hello", LONG))
        await eventually(lambda: harness.num_open_calls == 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        harness.faults.release()


async def test_no_server_is_unavailable(client_of):
    async with running() as harness:
        target = harness.target
    with pytest.raises(Unavailable):
        await client_of(target).complete("hi")


class Flaky(inference_pb2_grpc.InferenceServiceServicer):
    """Fails with UNAVAILABLE: its first calls before any message, or every call after one."""

    def __init__(self, num_failures: int, *, inside: bool) -> None:
        self.num_calls = 0
        self._num_failures = num_failures
        self._inside = inside

    async def Generate(self, request: Any, context: Any) -> None:
        self.num_calls += 1
        if self._inside:
            await context.write(inference_pb2.GenerateResponse(text="begun"))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        if self.num_calls <= self._num_failures:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        finish = inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_STOP)
        await context.write(inference_pb2.GenerateResponse(text="done", finish=finish, is_last=True))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("inside", "num_calls"), [(False, 3), (True, MAX_ATTEMPTS)])
async def test_what_is_told_whole_is_tried_again_also_when_some_of_it_had_come(client_of, inside, num_calls):
    flaky = Flaky(2, inside=inside)
    server = aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(flaky, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = client_of(f"127.0.0.1:{port}")
    if inside:
        with pytest.raises(Unavailable, match="lost"):
            await client.complete("hi")
    else:
        assert (await client.complete("hi")).outputs[0].text == "done"
    assert flaky.num_calls == num_calls
    await server.stop(None)


async def test_many_streams_share_a_client():
    async with running(executor=FakeExecutor(num_blocks=256)) as harness, AsyncClient(harness.target) as client:
        prompts = [f"prompt {i}" for i in range(40)]
        outputs = await asyncio.gather(*(client.complete(prompt, GREEDY) for prompt in prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == expected_tokens(list(prompt.encode()), 12)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS, None])
def test_a_code_that_is_not_ours_keeps_its_name(code):
    error = build_error(code, "from a proxy", None)
    assert type(error) is JpagedError
    assert str(error) == f"{'UNKNOWN' if code is None else code.name}: from a proxy"


def test_details_of_others_do_no_harm():
    trailers: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", b"\xff\xff"), ("other", "x")]
    assert str(build_error(grpc.StatusCode.INVALID_ARGUMENT, "wrong", trailers)) == "request: wrong"


def test_only_a_full_queue_is_a_full_queue():
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL")
    status = status_pb2.Status(code=8)
    status.details.add().Pack(info)
    trailers: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status.SerializeToString())]
    full = build_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "later", trailers)
    assert isinstance(full, QueueFull)
    assert full.retry_after_s > 0
    larger = build_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max", ())
    assert (type(larger), larger.grpc_status) == (LimitExceeded, "RESOURCE_EXHAUSTED")
