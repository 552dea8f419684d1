"""Several sequences a request, and several tenants a server, as a caller sees them."""

import asyncio
import math
from collections import defaultdict
from typing import Any

import pytest

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.client import AsyncClient
from jpaged.engine.engine import Engine
from jpaged.engine.sequence import OutputCallback
from jpaged.errors import InvalidArgument
from jpaged.service.calls import MAX_TOKENS_PER_MESSAGE, OutputDispatcher, OutputStream
from jpaged.testing import ByteTokenizer, FakeExecutor, expected_tokens
from jpaged.types import (
    FinishReason,
    OutputEvent,
    PositionLogprobs,
    Request,
    SamplingParams,
    SequenceFinish,
    TokenLogprob,
    Usage,
)
from tests.server.harness import collect, eventually, request, running

PROMPT = ByteTokenizer().encode("hello")


def by_index(messages: list[Any]) -> dict[int, list[int]]:
    token_ids: dict[int, list[int]] = defaultdict(list)
    for message in messages:
        token_ids[message.index] += message.token_ids
    return dict(token_ids)


def check_ends(messages: list[Any], num_sequences: int) -> None:
    """One `is_last`, at the end, and one `finish` a sequence, after which it says nothing."""
    assert [message.is_last for message in messages] == [False] * (len(messages) - 1) + [True]
    finished = [message.index for message in messages if message.HasField("finish")]
    assert sorted(finished) == list(range(num_sequences))
    for index in range(num_sequences):
        assert [m for m in messages if m.index == index][-1].HasField("finish")
    completed = [message.usage.completion_tokens for message in messages]
    assert completed == sorted(completed)


async def test_n_sequences_share_a_stream(harness):
    messages = await collect(harness.inference.Generate(request("hello", n=3, temperature=1.0, seed=5)))
    check_ends(messages, 3)
    assert by_index(messages) == {i: expected_tokens(PROMPT, 8, seed=5, sequence_index=i) for i in range(3)}
    assert messages[-1].usage == inference_pb2.Usage(prompt_tokens=5, completion_tokens=24)


async def test_best_of_sends_the_likeliest_at_the_end(harness):
    sampled = [expected_tokens(PROMPT, 8, seed=5, sequence_index=i) for i in range(3)]
    stop = next(t for t in sampled[2][:4] if t not in sampled[0] and t not in sampled[1])
    short = sampled[2][: sampled[2].index(stop) + 1]  # every token costs the same, so the shortest is the likeliest
    message = request("hello", n=2, best_of=3, temperature=1.0, seed=5, stop_token_ids=[stop])
    messages = await collect(harness.inference.Generate(message))
    check_ends(messages, 2)
    assert len(messages) == 2
    assert by_index(messages) == {0: short, 1: sampled[0]}
    assert messages[-1].usage.completion_tokens == 16 + len(short)


async def test_beams_come_at_the_end_the_best_first(harness):
    message = request("hello", n=2, beam_width=3, max_tokens=4)
    messages = await collect(harness.inference.Generate(message))
    check_ends(messages, 2)
    assert by_index(messages)[0] == expected_tokens(PROMPT, 4)
    assert [m.finish.cumulative_logprob for m in messages] == [-0.125 * 4, -0.125 * 5]


async def test_an_abort_ends_every_sequence(harness):
    harness.faults.gate.clear()
    call = harness.inference.Generate(request("hello", n=3, max_tokens=40, request_id="three"))
    await eventually(lambda: harness.executor.num_steps > 0)
    await harness.control.Abort(control_pb2.AbortRequest(request_id="three"))
    harness.faults.release()
    messages = await collect(call)
    check_ends(messages, 3)
    reasons = {m.finish.reason for m in messages if m.HasField("finish")}
    assert reasons == {inference_pb2.FINISH_REASON_ABORT}
    await eventually(lambda: harness.num_blocks_used == 0)


async def test_clients_put_the_sequences_in_order():
    async with running() as harness, AsyncClient(harness.target) as client:
        output = await client.complete("hello", SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True))
        assert [list(one.token_ids) for one in output.outputs] == [
            expected_tokens(PROMPT, 8, seed=5, sequence_index=i) for i in range(3)
        ]
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert output.usage.completion_tokens == 24
        with pytest.raises(InvalidArgument, match=r"sampling.n: 9 is over max_num_seqs \(8\)"):
            await client.complete("hello", SamplingParams(n=9))


async def test_a_tenant_with_one_request_does_not_wait_for_all_of_another(monkeypatch: pytest.MonkeyPatch):
    async with running(executor=FakeExecutor(max_num_seqs=1), policy="fair") as harness:
        ended: list[str] = []
        engine = harness.serving.engine
        assert isinstance(engine, Engine)
        submit = engine.submit

        def submit_and_note_the_end(request: Request, sink: OutputCallback) -> None:
            def take(event: OutputEvent) -> None:
                if event.is_last:
                    ended.append(request.tenant)
                sink(event)

            submit(request, take)

        # On the engine's thread: in which order two clients read their last messages is another matter.
        monkeypatch.setattr(engine, "submit", submit_and_note_the_end)
        async with (
            AsyncClient(harness.target, tenant="many") as many,
            AsyncClient(harness.target, tenant="one") as one,
        ):
            harness.faults.gate.clear()
            runs = []
            for client in (*[many] * 5, one):
                sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
                runs.append(asyncio.ensure_future(client.complete("hello", sampling)))
                await eventually(lambda: len(engine._in_flight) == len(runs))
            harness.faults.release()
            await asyncio.gather(*runs)
    assert ended == ["many", "one", "many", "many", "many", "many"]


def event(index: int, *token_ids: int, sampled: int, finish: bool = False, **fields: Any) -> OutputEvent:
    end = SequenceFinish(FinishReason.LENGTH) if finish else None
    usage = Usage(completion_tokens=sampled)
    return OutputEvent("r", index, token_ids=token_ids, usage=usage, finish=end, **fields)


async def read_all(stream: OutputStream) -> list[tuple[int, tuple[int, ...], int, bool]]:
    read: list[tuple[int, tuple[int, ...], int, bool]] = []
    while not read or not read[-1][3]:
        one = await stream.read()
        read.append((one.index, one.token_ids, one.usage.completion_tokens, one.is_last))
    return read


async def test_a_slow_reader_gets_a_message_a_sequence_and_the_last_one_last():
    stream = OutputStream(OutputDispatcher(asyncio.get_running_loop(), math.inf))
    stream.add(event(0, 1, sampled=1))
    stream.add(event(1, 11, sampled=2))
    stream.add(event(0, 2, sampled=3))
    stream.add(event(1, 12, sampled=4, finish=True))
    stream.add(event(0, 3, sampled=5, finish=True, is_last=True))
    assert await read_all(stream) == [(1, (11, 12), 4, False), (0, (1, 2, 3), 5, True)]


async def test_usage_never_falls_when_sequences_are_merged():
    stream = OutputStream(OutputDispatcher(asyncio.get_running_loop(), math.inf))
    stream.add(event(0, 1, sampled=1))
    stream.add(event(1, 11, sampled=2, finish=True))
    stream.add(event(0, 2, sampled=3))
    assert (await stream.read()).usage.completion_tokens == 3
    assert (await stream.read()).usage.completion_tokens == 3


async def test_a_message_has_a_bound_and_an_error_comes_after_what_was_said():
    stream = OutputStream(OutputDispatcher(asyncio.get_running_loop(), math.inf))
    half = tuple(range(MAX_TOKENS_PER_MESSAGE // 2))
    for i in range(3):
        stream.add(event(0, *half, sampled=i))
    stream.add(event(0, sampled=3, is_last=True, error=InvalidArgument("field", "problem")))
    assert len((await stream.read()).token_ids) == MAX_TOKENS_PER_MESSAGE
    assert len((await stream.read()).token_ids) == MAX_TOKENS_PER_MESSAGE // 2
    with pytest.raises(InvalidArgument, match="problem"):
        await stream.read()


async def test_alternatives_count_in_the_bound_of_a_message():
    stream = OutputStream(OutputDispatcher(asyncio.get_running_loop(), math.inf))
    token = TokenLogprob(1, -1.0, 1)
    position, num_tokens = PositionLogprobs(token, (token,) * 20), MAX_TOKENS_PER_MESSAGE // 22
    for is_last in (False, True):
        ids = [1] * num_tokens
        stream.add(event(0, *ids, sampled=0, finish=is_last, is_last=is_last, logprobs=(position,) * num_tokens))
    assert [len(token_ids) for _, token_ids, _, _ in await read_all(stream)] == [num_tokens] * 2
