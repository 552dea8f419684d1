"""A replica answers as the server does, without a port, and ends what its host lets go of."""

import asyncio
import pickle
import urllib.request
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest

from jpaged._proto.v1 import inference_pb2
from jpaged.config import EngineConfig
from jpaged.server.replica import Refused, Replica
from jpaged.testing import ByteTokenizer, FakeExecutor, Faults, expected_tokens
from tests.server.harness import eventually, make_serving, request


@pytest.fixture
async def faults() -> Faults:
    return Faults()


@pytest.fixture
async def replica(faults: Faults) -> AsyncIterator[Replica]:
    replica = Replica(make_serving(FakeExecutor(faults=faults), EngineConfig.load({})))
    yield replica
    faults.release()
    replica.stop()


async def all_of(
    replica: Replica, message: inference_pb2.GenerateRequest, metadata: tuple[tuple[str, str], ...] = ()
) -> list[inference_pb2.GenerateResponse]:
    async with asyncio.timeout(300):
        return [response async for response in replica.generate(message, metadata)]


def token_ids(messages: list[inference_pb2.GenerateResponse]) -> list[int]:
    return [token_id for message in messages for token_id in message.token_ids]


async def test_a_request_streams_the_models_tokens(replica):
    messages = await all_of(replica, request("hello", max_tokens=8))
    prompt = ByteTokenizer().encode("hello")
    assert token_ids(messages) == list(expected_tokens(prompt, 8))
    assert [message.HasField("finish") for message in messages] == [False] * (len(messages) - 1) + [True]
    await eventually(lambda: replica.load().num_blocks_used == 0)


async def test_many_requests_run_at_once(replica):
    texts = [f"request {number}" for number in range(8)]
    answers = await asyncio.gather(*(all_of(replica, request(text, max_tokens=20)) for text in texts))
    expected = [list(expected_tokens(ByteTokenizer().encode(text), 20)) for text in texts]
    assert [token_ids(messages) for messages in answers] == expected


async def test_a_closed_iterator_frees_its_blocks(replica, faults):
    faults.hold_after(3)
    async with aclosing(replica.generate(request(max_tokens=120))) as stream:
        await anext(stream)
        await eventually(lambda: replica.load().num_blocks_used > 0)  # counted after the message has gone out
    faults.release()
    await eventually(lambda: replica.load().num_blocks_used == 0)
    assert replica.load().num_generation_tokens < 120


async def test_a_cancelled_reader_frees_its_blocks(replica, faults):
    faults.gate.clear()
    reading = asyncio.create_task(all_of(replica, request(max_tokens=120)))
    await eventually(lambda: replica.load().num_running == 1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    faults.release()
    await eventually(lambda: replica.load().num_blocks_used == 0)


async def test_a_bad_request_is_refused_as_over_grpc_and_survives_pickling(replica):
    with pytest.raises(Refused, match=r"INVALID_ARGUMENT: sampling.max_tokens") as refusal:
        await all_of(replica, request(max_tokens=100_000))
    copy = pickle.loads(pickle.dumps(refusal.value))
    assert copy.code is grpc.StatusCode.INVALID_ARGUMENT
    assert copy.details == refusal.value.details
    assert dict(copy.trailing_metadata).keys() == {"grpc-status-details-bin"}


async def test_the_tenant_comes_with_the_metadata(replica):
    with pytest.raises(Refused, match="x-jpaged-tenant: is given 2 times"):
        await all_of(replica, request(), (("x-jpaged-tenant", "a"), ("x-jpaged-tenant", "b")))


async def test_texts_and_tokens_are_turned_into_each_other(replica):
    tokens = await replica.tokenize(inference_pb2.TokenizeRequest(text="hello"))
    text = await replica.detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
    assert (list(tokens.token_ids), text.text) == (list(b"hello"), "hello")
    asked = inference_pb2.DetokenizeRequest(token_ids=[0xC3, ByteTokenizer.EOS], return_token_bytes=True)
    assert list((await replica.detokenize(asked)).token_bytes) == [b"\xc3", b""]
    with pytest.raises(Refused, match="INVALID_ARGUMENT: token_ids: 9999"):
        await replica.detokenize(inference_pb2.DetokenizeRequest(token_ids=[9999]))


async def test_continuations_are_scored_and_texts_embedded_with_the_tenant_of_the_metadata(replica):
    scoring = inference_pb2.ScoreRequest(text="hello", continuations=[inference_pb2.Continuation(text="x")] * 2)
    scores = (await replica.score(scoring, (("x-jpaged-tenant", "a"),))).scores
    assert [[token.token_id for token in score.tokens] for score in scores] == [[120], [120]]
    embedding = inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="hi")])
    assert list((await replica.embed(embedding)).embeddings[0].values) == [105.0, 2.0, 209.0]
    for call, message in ((replica.score, scoring), (replica.embed, embedding)):
        with pytest.raises(Refused, match="x-jpaged-tenant: is given 2 times"):
            await call(message, (("x-jpaged-tenant", "a"), ("x-jpaged-tenant", "b")))
    with pytest.raises(Refused, match="INVALID_ARGUMENT: continuations: 0 are given"):
        await replica.score(inference_pb2.ScoreRequest(text="hello"))
    with pytest.raises(Refused, match=r"INVALID_ARGUMENT: inputs\[0\]: is missing: set text or token_ids"):
        await replica.embed(inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput()]))


async def test_a_drain_finishes_what_runs_and_refuses_what_comes(replica):
    stream = replica.generate(request(max_tokens=40))
    first = await anext(stream)
    draining = asyncio.create_task(replica.drain(20))
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="UNAVAILABLE: the server is draining"):
        await all_of(replica, request())
    rest = [message async for message in stream]
    assert len(token_ids([first, *rest])) == 40
    assert await draining


async def test_a_drain_past_its_timeout_ends_what_is_left(replica, faults):
    faults.hold_after(3)
    stream = replica.generate(request(max_tokens=120))
    await anext(stream)
    assert not await replica.drain(0.01)
    with pytest.raises(Refused, match="UNAVAILABLE: the server shut down before the request finished"):
        async for _ in stream:
            pass


async def test_an_engine_that_has_died_refuses_everything():
    replica = Replica(make_serving(FakeExecutor(faults=Faults(fail_at_step=1)), EngineConfig.load({})))
    try:
        with pytest.raises(Refused, match="INTERNAL"):
            await all_of(replica, request(max_tokens=50))
        with pytest.raises(Refused, match="UNAVAILABLE: the engine has died"):
            await all_of(replica, request())
    finally:
        replica.stop()


async def test_metrics_are_answered(replica):
    port = replica.serve_metrics("127.0.0.1", 0)

    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    assert 'jpaged:blocks_referenced{model_name="fake"} 0.0' in await asyncio.to_thread(scrape)
