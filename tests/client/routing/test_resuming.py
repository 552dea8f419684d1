"""Streams whose server is cut off, drains or dies go on: here again or elsewhere, each token once."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio

from jpaged._proto.v1 import inference_pb2, inference_pb2_grpc
from jpaged.client import AsyncClient, Client, GenerateChunk, ResumePolicy
from jpaged.client.channel import MAX_ATTEMPTS
from jpaged.errors import DeadlineExceeded, InternalError, InvalidArgument, JpagedError, QueueFull, Unavailable
from jpaged.outputs import new_completions
from jpaged.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from jpaged.testing import FakeExecutor, scripted
from jpaged.types import Prompt, RequestOutput, SamplingParams
from tests.client.routing.cutting import Wire, wire
from tests.server.harness import Harness, eventually, running

FORMAT = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
TEXT = (
    f'<think>\n{"Look. " * 20}</think>\n\nSo: <tool_call>\n{{"name": "now", "arguments": {{"at": [1]}}}}\n</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
SAMPLED = SamplingParams(max_tokens=90, ignore_eos=True)
SHAPES: dict[str, SamplingParams] = {
    "greedy": replace(SAMPLED, temperature=0.0),
    "sampled": replace(SAMPLED, seed=5),
    "three": replace(SAMPLED, seed=6, n=3),
    "told": replace(SAMPLED, seed=7, n=2, max_tokens=40, logprobs=3, prompt_logprobs=1),
    "stopping": replace(SAMPLED, seed=8, n=3, stop_token_ids=[17, 99, 201], stop=["\x01"]),
}


class Sync:
    """A stream of a `Client` in the shape of an `AsyncGenerateStream`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __aiter__(self) -> "Sync":
        return self

    async def __anext__(self) -> GenerateChunk:
        chunk: GenerateChunk | None = await asyncio.to_thread(next, self._stream, None)
        if chunk is None:
            raise StopAsyncIteration
        return chunk


@pytest.fixture(params=["sync", "async"])
async def stream_of(request) -> AsyncIterator[Any]:
    """Begins streams of both kinds of clients: `stream_of(targets, client options)(arguments of generate)`."""
    made: list[Any] = []

    def make(targets: Any, **options: Any) -> Any:
        made.append((AsyncClient if request.param == "async" else Client)(targets, **options))
        client = made[-1]
        if request.param == "async":
            return client.generate
        return lambda *args, **keywords: Sync(client.generate(*args, **keywords))

    yield make
    for client in made:
        if isinstance(client, AsyncClient):
            await client.close()
        else:
            await asyncio.to_thread(client.close)


def folded(chunks: list[GenerateChunk], sampling: SamplingParams) -> RequestOutput:
    """What a caller has in the end, but for times and ids."""
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert sum(bool(chunk.prompt_token_ids) for chunk in chunks) <= 1
    assert sum(chunk.seed is not None for chunk in chunks) == 1
    counted = [chunk.usage.completion_tokens for chunk in chunks]
    assert counted == sorted(counted)
    assert len({chunk.usage.cached_tokens for chunk in chunks}) == 1
    completions = new_completions(sampling)
    for chunk in chunks:
        completions.add(chunk)
    output = completions.output("", None, ())
    # Versions of the weights are those of the tokens that the last server sampled.
    output = replace(output, outputs=tuple(replace(one, weight_versions=()) for one in output.outputs))
    calls = tuple(replace(call, id="") for call in output.outputs[0].tool_calls)
    if calls:
        output = replace(output, outputs=(replace(output.outputs[0], tool_calls=calls),))
    return replace(output, times=None, usage=replace(output.usage, cached_tokens=0))


def cuts(rng: random.Random) -> Callable[[], int]:
    """Bytes after which connections are cut: the first before any stream of these tests can be whole."""
    places = itertools.chain([300], iter(lambda: rng.randrange(300, 2500), None))
    return lambda: next(places)


async def all_of(stream: Any) -> list[GenerateChunk]:
    async with asyncio.timeout(120):
        return [chunk async for chunk in stream]


def server(**options: Any) -> Any:
    executor = options.pop("executor", None) or FakeExecutor(num_blocks=512)
    return running(executor=executor, max_messages_per_second=1_000_000, **options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.thinned(6)
async def test_a_stream_that_is_cut_again_and_again_is_as_if_it_had_not_been(stream_of, shape):
    rng, sampling = random.Random(shape), SHAPES[shape]
    async with server() as harness, wire(harness.port, cuts(rng)) as cut:
        undisturbed = await all_of(stream_of(harness.target)("hello", sampling))
        survived = await all_of(stream_of(cut.target)("hello", sampling))
        assert folded(survived, sampling) == folded(undisturbed, sampling)
        assert cut.num_cuts >= 1
        await eventually(lambda: harness.num_open_calls == 0)
        await eventually(lambda: harness.num_blocks_used == 0)


async def test_a_seed_that_the_server_chose_goes_along(stream_of):
    rng = random.Random(3)
    async with server() as harness, wire(harness.port, cuts(rng)) as cut:
        survived = await all_of(stream_of(cut.target)("hello", SAMPLED))
        assert cut.num_cuts >= 1
        again = replace(SAMPLED, seed=survived[0].seed)
        assert folded(survived, again) == folded(await all_of(stream_of(harness.target)("hello", again)), again)


@pytest.mark.long
async def test_a_chat_is_cut_within_a_thought_and_a_call():
    rng, sampling = random.Random(4), SamplingParams(max_tokens=400, temperature=0.0)
    executor = scripted(TEXT)(num_blocks=4096, max_model_len=1024)
    async with server(executor=executor, answer_format=FORMAT) as harness:
        async with wire(harness.port, cuts(rng)) as cut, AsyncClient(cut.target) as client:
            survived = await all_of(client.stream_chat([{"role": "user", "content": "When?"}], sampling, tools=TOOLS))
        assert cut.num_cuts >= 1
        (output,) = folded(survived, sampling).outputs
        assert (output.text, output.reasoning_content) == ("So: ", "Look. " * 20)
        assert [(call.name, call.arguments) for call in output.tool_calls] == [("now", '{"at": [1]}')]
        assert output.finish_reason == "tool_calls"


@pytest.mark.long
async def test_a_reader_that_is_slow_misses_nothing():
    rng, sampling = random.Random(5), SHAPES["three"]
    async with server() as harness, wire(harness.port, cuts(rng)) as cut:
        async with AsyncClient(harness.target) as direct, AsyncClient(cut.target) as client:
            undisturbed = await all_of(direct.generate("hello", sampling))
            survived = []
            async for chunk in client.generate("hello", sampling):
                survived.append(chunk)
                await asyncio.sleep(0.001)
        assert folded(survived, sampling) == folded(undisturbed, sampling)


class Two:
    """Two servers of one model, each behind a wire, and the one that has the stream."""

    def __init__(self, servers: dict[str, Harness], wires: dict[str, Wire]) -> None:
        self.servers, self.wires = servers, wires

    @property
    def targets(self) -> list[str]:
        return list(self.wires)

    async def busy(self) -> str:
        """The target of the server that runs something."""
        await eventually(lambda: any(one.num_open_calls for one in self.servers.values()))
        return next(target for target, one in self.servers.items() if one.num_open_calls)

    def other(self, target: str) -> Harness:
        return next(one for name, one in self.servers.items() if name != target)


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server(shutdown_timeout=0.05)) for _ in range(2)]
        wires = [await stack.enter_async_context(wire(one.port)) for one in servers]
        targets = [one.target for one in wires]
        yield Two(dict(zip(targets, servers, strict=True)), dict(zip(targets, wires, strict=True)))
        for one in servers:
            one.faults.release()


async def begun(two: Two, stream: Any) -> tuple[list[GenerateChunk], str]:
    """The first chunks of a stream, whose server then waits, and which one that is."""
    for harness in two.servers.values():
        harness.faults.hold_after(20)
    chunks = [await anext(aiter(stream))]
    return chunks, await two.busy()


@pytest.mark.thinned(5)
@pytest.mark.parametrize("shape", ["greedy", "three", "told"])
async def test_a_stream_goes_on_at_the_other_server_when_its_own_is_killed(stream_of, two, shape):
    sampling = SHAPES[shape]
    stream = stream_of(two.targets)("hello", sampling)
    chunks, target = await begun(two, stream)
    two.wires[target].kill()
    two.other(target).faults.release()
    chunks += await all_of(stream)
    two.servers[target].faults.release()
    undisturbed = await all_of(stream_of(two.other(target).target)("hello", sampling))
    assert folded(chunks, sampling) == folded(undisturbed, sampling)
    await eventually(lambda: all(one.num_open_calls == 0 for one in two.servers.values()))


@pytest.mark.long
async def test_a_stream_goes_on_at_the_other_server_when_its_own_drains(stream_of, two):
    stream = stream_of(two.targets)("hello", SHAPES["three"])
    chunks, target = await begun(two, stream)
    two.servers[target].server.request_stop()  # its time to drain passes, for the engine waits
    two.other(target).faults.release()
    chunks += await all_of(stream)
    undisturbed = await all_of(stream_of(two.other(target).target)("hello", SHAPES["three"]))
    assert folded(chunks, SHAPES["three"]) == folded(undisturbed, SHAPES["three"])


async def test_a_stream_goes_on_at_the_other_server_when_its_own_engine_dies(stream_of, two):
    stream = stream_of(two.targets)("hello", SHAPES["sampled"])
    chunks, target = await begun(two, stream)
    two.servers[target].faults.fail_at_step = two.servers[target].executor.num_steps + 2
    for harness in two.servers.values():
        harness.faults.release()
    chunks += await all_of(stream)
    undisturbed = await all_of(stream_of(two.other(target).target)("hello", SHAPES["sampled"]))
    assert folded(chunks, SHAPES["sampled"]) == folded(undisturbed, SHAPES["sampled"])
    await asyncio.wait_for(two.servers[target].run, 60)


async def test_an_engine_that_dies_is_told_where_there_is_no_other(stream_of):
    async with server() as harness:
        harness.faults.fail_at_step = 20
        with pytest.raises(InternalError):
            await all_of(stream_of(harness.target)("hello", SHAPES["sampled"]))


@pytest.mark.long
async def test_what_is_told_whole_is_run_again_elsewhere(two):
    for sampling in (SHAPES["three"], replace(SAMPLED, temperature=0.0, ignore_eos=False, beam_width=3, n=2)):
        for one in two.servers.values():
            one.faults.hold_after(10)
        async with AsyncClient(two.targets) as client:
            running_ = asyncio.ensure_future(client.complete("hello", sampling))
            target = await two.busy()
            two.wires[target].kill()
            for one in two.servers.values():
                one.faults.release()
            output = await running_
        async with AsyncClient(two.other(target).target) as client:
            assert output.outputs == (await client.complete("hello", sampling)).outputs
        two.wires[target].restart()
        await eventually(lambda: all(one.num_open_calls == 0 for one in two.servers.values()))


@pytest.mark.long
async def test_a_single_server_that_comes_again_goes_on(stream_of):
    async with server() as harness, wire(harness.port) as cut:
        undisturbed = await all_of(stream_of(harness.target)("hello", SHAPES["three"]))
        harness.faults.hold_after(20)
        stream = stream_of(cut.target)("hello", SHAPES["three"])
        chunks = [await anext(aiter(stream))]
        cut.kill()
        rest = asyncio.ensure_future(all_of(stream))
        await eventually(lambda: harness.num_open_calls == 0)
        harness.faults.release()
        cut.restart()
        assert folded([*chunks, *await rest], SHAPES["three"]) == folded(undisturbed, SHAPES["three"])


@pytest.mark.long
@pytest.mark.parametrize("whole", [False, True])
async def test_a_request_that_was_accepted_waits_for_its_server_before_anything_has_come_of_it(whole):
    sampling = SHAPES["three"]
    async with server() as harness, wire(harness.port) as cut, AsyncClient(cut.target) as client:
        harness.faults.gate.clear()
        stream = client._begin(Prompt(text="hello"), sampling, None, None, whole=whole)
        await stream._course.call.initial_metadata()
        chunks = asyncio.ensure_future(all_of(stream))
        cut.kill()
        await eventually(lambda: harness.num_open_calls == 0)
        harness.faults.release()
        await eventually(lambda: cut.num_refused > MAX_ATTEMPTS)  # so often a call is tried that nobody has accepted
        cut.restart()
        async with AsyncClient(harness.target) as direct:
            undisturbed = await all_of(direct.generate("hello", sampling))
        assert folded(await chunks, sampling) == folded(undisturbed, sampling)


@pytest.mark.parametrize("resuming", [None, ResumePolicy(within_s=0.2)])
async def test_a_stream_ends_with_unavailable_where_nobody_comes_again(stream_of, resuming):
    async with server() as harness, wire(harness.port) as cut:
        harness.faults.hold_after(20)
        stream = stream_of(cut.target, resuming=resuming)("hello", SHAPES["greedy"])
        assert (await anext(aiter(stream))).token_ids
        cut.kill()
        with pytest.raises(Unavailable):
            await all_of(stream)
        assert await all_of(stream) == []
        harness.faults.release()


async def test_a_timeout_is_of_all_tries_together(stream_of):
    async with server() as harness, wire(harness.port) as cut:
        harness.faults.hold_after(20)
        stream = stream_of(cut.target)("hello", SHAPES["greedy"], timeout_s=2.0)

        async def read() -> None:
            await anext(aiter(stream))
            cut.kill()
            await all_of(stream)

        with pytest.raises((Unavailable, DeadlineExceeded)):
            await read()
        harness.faults.release()


async def test_a_stream_that_loses_server_after_server_ends(stream_of):
    executor = FakeExecutor(num_blocks=1024, max_model_len=1024)
    async with server(executor=executor) as harness, wire(harness.port, lambda: 400) as cut:
        sampling = replace(SAMPLED, max_tokens=1000, seed=1)  # far more than fits into three connections
        with pytest.raises(Unavailable):
            await all_of(stream_of(cut.target, resuming=ResumePolicy(max_times=2))("hello", sampling))
        assert cut.num_cuts >= 3


async def test_scores_are_asked_for_elsewhere_when_their_server_is_killed(two):
    for one in two.servers.values():
        one.faults.gate.clear()
    async with AsyncClient(two.targets) as client:
        asking = asyncio.ensure_future(client.score("a prompt", ["b", "c"]))
        await eventually(lambda: any(len(one.serving.engine.in_flight) for one in two.servers.values()))
        target = next(name for name, one in two.servers.items() if len(one.serving.engine.in_flight))
        two.wires[target].kill()
        for one in two.servers.values():
            one.faults.release()
        scores = await asking
    async with AsyncClient(two.other(target).target) as client:
        assert tuple(scores) == tuple(await client.score("a prompt", ["b", "c"]))


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """Answers each call as it is told to: messages, and then the end of the call."""

    def __init__(self, *turns: Any) -> None:
        self.requests: list[Any] = []
        self._turns = list(turns)

    async def Generate(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        messages, end = self._turns.pop(0)
        for message in messages:
            await context.write(message)
        if end is not None:
            await context.abort(*end)


def part(*token_ids: int, is_last: bool = False, total: int = 0, **fields: Any) -> inference_pb2.GenerateResponse:
    if is_last:
        fields["finish"] = inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_LENGTH)
    usage = inference_pb2.Usage(prompt_tokens=5, completion_tokens=total or len(token_ids))
    return inference_pb2.GenerateResponse(token_ids=token_ids, is_last=is_last, usage=usage, **fields)


GONE = (grpc.StatusCode.UNAVAILABLE, "gone")


async def answered(
    stream_of: Any, *turns: Any, **sampling: Any
) -> tuple[list[GenerateChunk], list[Any], JpagedError | None]:
    """What comes of a stream that is answered so, what was asked, and what the stream ended with."""
    scripted_, scripted_server = Scripted(*turns), aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(scripted_, scripted_server)
    port = scripted_server.add_insecure_port("127.0.0.1:0")
    await scripted_server.start()
    chunks, failure = [], None
    try:
        async for chunk in stream_of(f"127.0.0.1:{port}")("hello", SamplingParams(**sampling), request_id="r"):
            chunks.append(chunk)
    except JpagedError as error:
        failure = error
    await scripted_server.stop(None)
    return chunks, scripted_.requests, failure


async def test_the_old_request_that_is_still_in_flight_is_waited_for(stream_of):
    in_flight: Any = ([], (grpc.StatusCode.ALREADY_EXISTS, "in flight"))
    turns = ([part(7, seed=11)], GONE), in_flight, in_flight, ([part(8, is_last=True, total=2)], None)
    chunks, requests, failure = await answered(stream_of, *turns)
    assert failure is None
    assert [chunk.token_ids for chunk in chunks] == [(7,), (8,)]
    assert {request.request_id for request in requests} == {"r"}
    assert [list(request.generated_token_ids) for request in requests[:1]] == [[]]
    for request in requests[1:]:
        assert request.sampling.seed == 11
        assert [list(one.ids) for one in request.generated_token_ids] == [[7]]


@pytest.mark.parametrize(
    "code", ["INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "PERMISSION_DENIED", "ALREADY_EXISTS"]
)
async def test_what_is_the_requests_own_fault_is_told_at_once(stream_of, code):
    _, requests, failure = await answered(stream_of, ([], (grpc.StatusCode[code], "no")))
    assert failure is not None
    assert failure.grpc_status == code
    assert len(requests) == 1


async def test_a_server_that_does_not_know_how_to_go_on_is_not_believed(stream_of):
    chunks, _, failure = await answered(stream_of, ([part(7, 8, seed=1)], GONE), ([part(7)], None))
    assert isinstance(failure, InternalError)
    assert "does not support generated_token_ids" in str(failure)
    assert [chunk.token_ids for chunk in chunks] == [(7, 8)]


async def test_a_stream_whose_last_message_has_come_is_whole_however_its_call_ends(stream_of):
    chunks, requests, failure = await answered(stream_of, ([part(7, is_last=True, seed=1)], GONE))
    assert failure is None
    assert [chunk.is_last for chunk in chunks] == [True]
    assert len(requests) == 1


async def test_a_stream_without_a_known_seed_does_not_go_on(stream_of):
    _, requests, failure = await answered(stream_of, ([part(7)], GONE))
    assert isinstance(failure, Unavailable)
    assert len(requests) == 1
    turns = ([part(7)], GONE), ([part(8, is_last=True, total=2)], None)
    chunks, _, failure = await answered(stream_of, *turns, temperature=0.0)
    assert failure is None
    assert len(chunks) == 2


async def test_other_tokens_of_the_prompt_are_another_request(stream_of):
    turns = ([part(7, seed=1, prompt_token_ids=[1, 2])], GONE), ([part(8, prompt_token_ids=[1, 3], total=2)], None)
    _, _, failure = await answered(stream_of, *turns)
    assert isinstance(failure, InternalError)
    assert "tokenizes the prompt differently" in str(failure)


@pytest.mark.long
async def test_a_full_queue_is_passed_over_where_there_is_another_server_and_told_where_there_is_none(two):
    narrow = FakeExecutor(max_num_seqs=1)
    async with (
        AsyncClient(two.targets[0]) as direct,
        server(executor=narrow, max_num_queued_reqs=1) as full,
        AsyncClient(full.target) as client,
        AsyncClient([full.target, two.targets[0]]) as several,
    ):
        full.faults.gate.clear()
        waiting = [asyncio.ensure_future(client.complete("a", SHAPES["greedy"])) for _ in range(2)]
        await eventually(lambda: full.serving.engine.is_full)
        with pytest.raises(QueueFull):
            await client.complete("b", SHAPES["greedy"])
        outputs = [await several.complete(text, SHAPES["greedy"]) for text in "abcdefgh"]
        for text, output in zip("abcdefgh", outputs, strict=True):
            assert output.outputs == (await direct.complete(text, SHAPES["greedy"])).outputs
        full.faults.release()
        await asyncio.gather(*waiting)


@pytest.mark.parametrize("fields", [{"within_s": 0}, {"within_s": float("inf")}, {"max_times": 0}])
def test_bounds_of_resuming_are_checked(fields):
    with pytest.raises(InvalidArgument, match=next(iter(fields))):
        ResumePolicy(**fields)
