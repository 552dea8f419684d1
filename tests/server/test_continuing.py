"""Requests that go on behind what another server has generated, over gRPC: seeds, chats, statuses."""

from typing import Any

import pytest

from jpaged._proto.v1 import inference_pb2
from jpaged.client.routing.resumable_stream import Progress
from jpaged.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from jpaged.testing import expected_tokens, scripted
from tests.server.harness import Harness, collect, error_details, failure_of, request, running

FORMAT = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
TEXT = '<think>\nLook.\n</think>\n\nSo: <tool_call>\n{"name": "now", "arguments": {"at": [1]}}\n</tool_call>'


def continued(message: inference_pb2.GenerateRequest, came: list[Any]) -> inference_pb2.GenerateRequest:
    """The request that goes on behind what came of it, without a seed of its own with the one that was told."""
    progress, again = Progress(), inference_pb2.GenerateRequest()
    again.CopyFrom(message)
    for response in came:
        progress.add(response, response.HasField("finish"))
    for one in progress.generated():
        again.generated_token_ids.add(index=one.index, ids=one.token_ids, finished=one.has_finished)
    again.sampling.seed = came[0].seed
    return again


async def check_cuts(harness: Harness, message: inference_pb2.GenerateRequest) -> list[Any]:
    """Wherever its messages are cut, what comes goes on; they are returned."""
    sent = await collect(harness.inference.Generate(message))
    for cut in range(1, len(sent)):
        rest = await collect(harness.inference.Generate(continued(message, sent[:cut])))
        assert folded([*sent[:cut], *rest]) == folded(sent)
        assert [one.is_last for one in rest] == [False] * (len(rest) - 1) + [True]
        assert rest[-1].usage.completion_tokens == sent[-1].usage.completion_tokens
    return sent


def folded(messages: list[Any]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for message in messages:
        ids, text, thought, calls, finishes = found.setdefault(message.index, ([], [], [], [], []))
        ids += message.token_ids
        text += message.text
        thought += message.reasoning_content
        calls += [piece.name + piece.arguments for piece in message.tool_calls]
        if message.HasField("finish"):
            finish = type(message.finish)()
            finish.CopyFrom(message.finish)
            finish.ClearField("weight_versions")  # of the tokens that this server sampled
            finishes.append(finish.SerializeToString())
    return {
        index: (ids, "".join(text), thought, "".join(calls), end)
        for index, (ids, text, thought, calls, end) in found.items()
    }


@pytest.mark.long
async def test_the_first_message_tells_the_seed_that_the_server_chose():
    async with running(max_messages_per_second=1_000_000) as harness:
        sent = await check_cuts(harness, request("hello", temperature=1.0, max_tokens=24))
        assert sent[0].seed
        assert [message.HasField("seed") for message in sent] == [True] + [False] * (len(sent) - 1)
        ids = [token_id for message in sent for token_id in message.token_ids]
        assert ids == expected_tokens(list(b"hello"), 24, seed=sent[0].seed)
        (own,) = await collect(harness.inference.Generate(request("hello", temperature=1.0, seed=9, max_tokens=1)))
        assert own.seed == 9
        beams = await collect(harness.inference.Generate(request("hello", beam_width=2)))
        assert not any(message.HasField("seed") for message in beams)


@pytest.mark.long
async def test_sequences_that_have_ended_are_counted_and_not_run_again():
    async with running(max_messages_per_second=1_000_000) as harness:
        message = request("hello", n=3, temperature=1.0, max_tokens=24, stop_token_ids=[7, 21, 99])
        sent = await check_cuts(harness, message)
        assert {one.index for one in sent} == {0, 1, 2}
        again = continued(message, sent)
        error = await failure_of(harness.inference.Generate(again))
        assert error.code().name == "INVALID_ARGUMENT"
        assert error_details(error)["BadRequest"].field_violations[0].field == "generated_token_ids"


@pytest.mark.long
async def test_a_chat_goes_on_in_the_middle_of_a_thought_or_a_call():
    executor = scripted(TEXT)(num_blocks=4096, max_model_len=1024)
    async with running(executor=executor, answer_format=FORMAT, max_messages_per_second=1_000_000) as harness:
        message = inference_pb2.GenerateRequest(
            chat=inference_pb2.ChatPrompt(
                messages=[inference_pb2.ChatMessage(role="user", content="When?")],
                tools=[inference_pb2.Tool(name="now")],
            ),
            sampling=inference_pb2.SamplingParams(max_tokens=300, temperature=0.0),
        )
        sent = await check_cuts(harness, message)
        ((_, text, thought, calls, _),) = folded(sent).values()
        assert (text, "".join(thought), calls) == ("So: ", "Look.", 'now{"at": [1]}')


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": 1.0}, "sampling.seed"),
        ({"beam_width": 2}, "generated_token_ids"),
        ({"max_tokens": 2}, "generated_token_ids[0].ids"),
        ({"stop": ["b"]}, "generated_token_ids[0].ids"),
    ],
)
async def test_what_cannot_be_gone_on_with_is_refused_by_its_field(harness, fields, field):
    message = request("hello", **fields)
    message.generated_token_ids.add(ids=b"ab")
    error = await failure_of(harness.inference.Generate(message))
    assert error.code().name == "INVALID_ARGUMENT"
    assert error_details(error)["BadRequest"].field_violations[0].field == field
    assert harness.num_open_calls == 0
