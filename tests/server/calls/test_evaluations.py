"""Score and Embed over gRPC: what they answer, what they refuse by name, and how a call of them ends."""

import asyncio
import functools
from typing import Any

import grpc
import pytest

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.client import AsyncClient, Client
from jpaged.errors import InvalidArgument
from jpaged.testing import FakeExecutor
from tests.server.harness import error_details, eventually, failure_of, running


def score_request(prompt: str = "hello", continuations: Any = ("x", "yz"), **fields: Any) -> inference_pb2.ScoreRequest:
    parts = [inference_pb2.Continuation(text=one) for one in continuations]
    return inference_pb2.ScoreRequest(text=prompt, continuations=parts, **fields)


def embed_request(texts: Any = ("hello", "hi"), **fields: Any) -> inference_pb2.EmbedRequest:
    return inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text=one) for one in texts], **fields)


async def test_a_score_tells_of_each_token_and_all_of_them(harness):
    response = await harness.inference.Score(score_request(continuations=["f", "fg", "x"]))
    assert [[token.token_id for token in score.tokens] for score in response.scores] == [[102], [102, 103], [120]]
    for score in response.scores:
        assert score.logprob == sum(token.logprob for token in score.tokens)
        assert score.is_greedy == all(token.rank == 1 for token in score.tokens)
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (6 + 7 + 6, 0)


@pytest.mark.parametrize("pooling", [inference_pb2.POOLING_UNSPECIFIED, inference_pb2.POOLING_LAST])
async def test_an_embedding_is_of_the_last_token_unless_the_mean_is_asked_for(harness, pooling):
    last = await harness.inference.Embed(embed_request(["ab"], pooling=pooling))
    mean = await harness.inference.Embed(embed_request(["ab"], pooling=inference_pb2.POOLING_MEAN))
    assert list(last.embeddings[0].values) == [98.0, 2.0, 195.0]
    assert list(mean.embeddings[0].values) == [97.5, 1.5, 146.0]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 0)


async def test_vectors_have_a_length_of_1_where_that_is_asked_for(harness):
    response = await harness.inference.Embed(embed_request(["ab", "c"], normalize=True))
    assert [sum(value * value for value in one.values) for one in response.embeddings] == pytest.approx([1.0, 1.0])


TOO_MANY = [""] * 1025


@pytest.mark.parametrize(
    ("message", "field", "problem"),
    [
        (inference_pb2.ScoreRequest(continuations=[inference_pb2.Continuation(text="x")]), "prompt", "is missing"),
        (score_request(continuations=[]), "continuations", "0 are given; must be from 1 to 1024"),
        (score_request(continuations=TOO_MANY), "continuations", "1025 are given; must be from 1 to 1024"),
        (score_request(continuations=["x", ""]), "continuations[1]", "is empty"),
        (score_request(continuations=["x" * 200]), "continuations[0]", "205 tokens are over max_model_len (128)"),
        (score_request("x" * 200), "prompt", "200 tokens are not below max_model_len (128)"),
        (score_request(cache_salt="s" * 257), "cache_salt", "257 characters; at most 256"),
        (
            inference_pb2.ScoreRequest(text="p", continuations=[inference_pb2.Continuation()]),
            "continuations[0]",
            "is missing: set text or token_ids",
        ),
        (embed_request([]), "inputs", "0 are given; must be from 1 to 1024"),
        (embed_request(TOO_MANY), "inputs", "1025 are given; must be from 1 to 1024"),
        (embed_request(["x", ""]), "inputs[1]", "is empty"),
        (embed_request(["x" * 200]), "inputs[0]", "200 tokens are over max_model_len (128)"),
        (embed_request(pooling=7), "pooling", "7 is not a value of Pooling"),
        (embed_request(cache_salt="s" * 257), "cache_salt", "257 characters; at most 256"),
        (inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput()]), "inputs[0]", "is missing: set text"),
    ],
)
async def test_a_refusal_names_a_field_of_the_request_its_value_and_the_limit(harness, message, field, problem):
    method = harness.inference.Score if isinstance(message, inference_pb2.ScoreRequest) else harness.inference.Embed
    error = await failure_of(method(message))
    (violation,) = error_details(error)["BadRequest"].field_violations
    assert (error.code().name, violation.field) == ("INVALID_ARGUMENT", field)
    assert problem in violation.description
    assert harness.serving.engine.load().num_prompt_tokens == 0


async def test_a_call_that_goes_away_or_is_late_leaves_nothing(harness):
    for end in ("cancel", "deadline"):
        harness.faults.gate.clear()
        timeout = 0.5 if end == "deadline" else None
        call = asyncio.ensure_future(
            harness.inference.Score(score_request(continuations="abcdefghijklmnop"), timeout=timeout)
        )
        await eventually(functools.partial(lambda call: harness.num_open_calls == 8 or call.done(), call))
        if end == "cancel":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            assert (await failure_of(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: harness.num_open_calls == 0 and harness.server._service.is_idle.is_set())
        harness.faults.release()
        await eventually(lambda: harness.num_blocks_used == 0)


async def test_a_stopping_server_answers_all_of_a_call_that_it_has_let_in():
    async with running(executor=FakeExecutor(max_num_seqs=2), max_num_seqs=2) as harness:
        harness.faults.gate.clear()
        call = asyncio.ensure_future(harness.inference.Score(score_request(continuations="abcdefgh")))
        await eventually(lambda: harness.num_open_calls == 2)
        harness.server.request_stop()
        await eventually(lambda: harness.server.state.stage.name == "DRAINING")
        assert (await failure_of(harness.inference.Embed(embed_request()))).code() is grpc.StatusCode.UNAVAILABLE
        harness.faults.release()
        assert len((await call).scores) == 8
        assert await harness.run == 0


async def test_a_load_counts_what_a_call_runs(harness):
    harness.faults.gate.clear()
    call = asyncio.ensure_future(harness.inference.Embed(embed_request("abc")))
    await eventually(lambda: harness.serving.engine.load().num_running == 3)
    load = await harness.control.GetLoad(control_pb2.GetLoadRequest())
    assert load.num_running == 3
    harness.faults.release()
    assert len((await call).embeddings) == 3
    await eventually(lambda: harness.num_blocks_used == 0)


async def test_clients_tell_what_all_parts_took_and_refuse_one_text_for_many(harness):
    async with AsyncClient(harness.target, tenant="t") as client:
        scores = await client.score("hello", ["x", [5, 6]], priority=-1)
        vectors = await client.embed(["ab", [99]], normalize=True, cache_salt="s")
        assert [score.token_ids for score in scores] == [(120,), (5, 6)]
        assert (scores.usage.prompt_tokens, vectors.usage.prompt_tokens) == (6 + 7, 3)
        assert all(isinstance(vector, tuple) for vector in vectors)

    def refused() -> list[str]:
        problems = []
        with Client(harness.target) as client:
            calls: list[Any] = [
                lambda: client.score("p", "xyz"),
                lambda: client.embed("xyz"),
                lambda: client.embed([5]),  # type: ignore[list-item]
                lambda: client.embed(["x"], pooling="median"),  # type: ignore[arg-type]
                lambda: client.score("p", ["x"], priority=2**31),
                lambda: client.score("p", ["\udc00"]),
            ]
            for call in calls:
                with pytest.raises(InvalidArgument) as raised:
                    call()
                problems.append(str(raised.value))
        return problems

    problems = await asyncio.to_thread(refused)
    assert problems[:5] == [
        "continuations: 'xyz' is one string: give a list of strings, or of lists of token ids",
        "inputs: 'xyz' is one string: give a list of strings, or of lists of token ids",
        "inputs[0]: 5 is neither a string nor a list of token ids",
        "pooling: 'median' is neither 'last' nor 'mean'",
        "priority: 2147483648 is not a 32-bit integer",
    ]
    assert problems[5].startswith("continuations[0]: ")
