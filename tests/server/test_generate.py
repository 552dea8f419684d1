"""What a Generate call says, message by message."""

import asyncio

import grpc
import pytest

from jpaged._proto.v1 import inference_pb2
from jpaged.testing import ByteTokenizer, expected_tokens
from tests.server.harness import collect, error_details, eventually, failure_of, request, running

TOKENIZER = ByteTokenizer()


async def test_the_stream_holds_the_tokens_and_one_finish(harness):
    messages = await collect(harness.inference.Generate(request("hello", max_tokens=20, logprobs=0)))
    token_ids = [token_id for message in messages for token_id in message.token_ids]
    assert token_ids == expected_tokens(TOKENIZER.encode("hello"), 20)
    assert "".join(message.text for message in messages) == TOKENIZER.decode(token_ids)
    assert [message.HasField("finish") for message in messages] == [False] * (len(messages) - 1) + [True]
    assert [message.is_last for message in messages] == [False] * (len(messages) - 1) + [True]
    finish = messages[-1].finish
    assert finish.reason == inference_pb2.FINISH_REASON_LENGTH
    assert finish.WhichOneof("matched_stop") is None
    assert finish.cumulative_logprob == pytest.approx(-0.125 * 20)
    assert messages[-1].usage == inference_pb2.Usage(prompt_tokens=5, completion_tokens=20)
    assert {message.index for message in messages} == {0}


@pytest.mark.long
async def test_a_request_to_be_told_whole_is_one_message_a_sequence(harness):
    streamed = request("hello", max_tokens=100, n=2, temperature=1.0, seed=5)
    whole = inference_pb2.GenerateRequest()
    whole.CopyFrom(streamed)
    whole.whole = whole.return_prompt_token_ids = True
    parts, told = await collect(harness.inference.Generate(streamed)), await collect(harness.inference.Generate(whole))
    assert [(message.index, message.is_last, list(message.prompt_token_ids)) for message in told] == [
        (0, False, TOKENIZER.encode("hello")),
        (1, True, []),
    ]
    for message in told:
        its = [part for part in parts if part.index == message.index]
        assert message.text == "".join(part.text for part in its)
        assert list(message.token_ids) == [token_id for part in its for token_id in part.token_ids]
        assert message.finish == its[-1].finish
    assert (told[-1].usage.prompt_tokens, told[-1].usage.completion_tokens) == (5, 200)


@pytest.mark.parametrize(
    ("params", "is_told"),
    [({}, False), ({"n": 2}, False), ({"logprobs": 0}, True), ({"best_of": 2}, True), ({"beam_width": 2}, True)],
)
async def test_sums_of_logprobs_are_told_to_those_who_need_some(harness, params, is_told):
    messages = await collect(harness.inference.Generate(request("hello", max_tokens=3, **params)))
    finishes = [message.finish for message in messages if message.HasField("finish")]
    assert [finish.HasField("cumulative_logprob") for finish in finishes] == [is_told] * params.get("n", 1)


async def test_token_ids_run_as_they_are(harness):
    message = request()
    message.token_ids.ids.extend([3, 1, 4, 1, 5])
    responses = await collect(harness.inference.Generate(message))
    assert [i for r in responses for i in r.token_ids] == expected_tokens([3, 1, 4, 1, 5], 8)


async def test_a_chat_is_laid_out_by_the_template(harness):
    message = request()
    message.chat.messages.add(role="user", content="hi")
    responses = await collect(harness.inference.Generate(message))
    prompt = TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}], max_bytes=1000)
    assert [i for r in responses for i in r.token_ids] == expected_tokens(prompt, 8)


async def test_the_first_message_alone_carries_the_prompt_when_asked(harness):
    message = request("abc")
    assert all(not r.prompt_token_ids for r in await collect(harness.inference.Generate(message)))
    message.return_prompt_token_ids = True
    first, *rest = await collect(harness.inference.Generate(message))
    assert list(first.prompt_token_ids) == [97, 98, 99]
    assert all(not r.prompt_token_ids for r in rest)


async def test_the_callers_id_comes_back_and_a_missing_one_is_made_up(harness):
    named = await collect(harness.inference.Generate(request(request_id="mine")))
    assert {message.request_id for message in named} == {"mine"}
    first = await collect(harness.inference.Generate(request()))
    second = await collect(harness.inference.Generate(request()))
    assert first[0].request_id
    assert second[0].request_id not in ("", first[0].request_id)


async def test_nothing_set_means_the_documented_defaults(harness):
    message = inference_pb2.GenerateRequest(text="hello")
    responses = await collect(harness.inference.Generate(message))
    finish = responses[-1].finish
    assert finish.reason in (inference_pb2.FINISH_REASON_LENGTH, inference_pb2.FINISH_REASON_STOP)
    assert responses[-1].usage.completion_tokens <= 16
    assert not any(message.logprobs for message in responses)


async def test_a_stop_string_is_named_and_not_sent(harness):
    tokens = expected_tokens(TOKENIZER.encode("stop here"), 40)
    letters = [i for i, token_id in enumerate(tokens) if token_id < 128 and tokens.index(token_id) == i]
    stop = chr(tokens[letters[2]])
    responses = await collect(harness.inference.Generate(request("stop here", max_tokens=40, stop=[stop])))
    assert responses[-1].finish.reason == inference_pb2.FINISH_REASON_STOP
    assert responses[-1].finish.matched_stop_string == stop
    assert stop not in "".join(message.text for message in responses)


async def test_a_stop_token_is_named_even_when_it_is_zero(harness):
    message = request(stop_token_ids=[7, 0])
    message.token_ids.ids.append(0)  # with zeros alone the fake samples zero
    responses = await collect(harness.inference.Generate(message))
    finish = responses[-1].finish
    assert finish.WhichOneof("matched_stop") == "matched_stop_token_id"
    assert finish.matched_stop_token_id == 0
    assert responses[-1].token_ids == [0]


async def test_the_end_of_sequence_stops_unless_ignored(harness):
    # With one token c the fake samples c: the prompt [256] samples the end of sequence at once.
    message = request(ignore_eos=False)
    message.token_ids.ids.append(ByteTokenizer.EOS)
    responses = await collect(harness.inference.Generate(message))
    assert responses[-1].usage.completion_tokens == 1
    assert responses[-1].finish.reason == inference_pb2.FINISH_REASON_STOP
    message.sampling.ignore_eos = True
    responses = await collect(harness.inference.Generate(message))
    assert responses[-1].usage.completion_tokens == 8


async def test_min_tokens_forbids_an_early_end(harness):
    message = request(ignore_eos=False, min_tokens=4)
    message.token_ids.ids.append(ByteTokenizer.EOS)
    responses = await collect(harness.inference.Generate(message))
    assert responses[-1].usage.completion_tokens >= 4


async def test_special_tokens_are_in_the_text_when_wanted(harness):
    message = request(ignore_eos=True, max_tokens=1, skip_special_tokens=False)
    message.token_ids.ids.append(ByteTokenizer.EOS)
    assert "".join(r.text for r in await collect(harness.inference.Generate(message))) == "<eos>"
    message.sampling.ClearField("skip_special_tokens")
    assert "".join(r.text for r in await collect(harness.inference.Generate(message))) == ""


async def test_a_seed_gives_the_same_tokens_and_another_gives_others(harness):
    async def tokens(seed: int) -> list[int]:
        responses = await collect(harness.inference.Generate(request("hello", temperature=0.7, seed=seed)))
        return [i for r in responses for i in r.token_ids]

    assert await tokens(2**63 + 7) == expected_tokens(TOKENIZER.encode("hello"), 8, seed=2**63 + 7)
    assert await tokens(1) != await tokens(2)


async def test_logprobs_come_with_every_token(harness):
    responses = await collect(harness.inference.Generate(request(logprobs=3)))
    positions = [position for message in responses for position in message.logprobs]
    token_ids = [i for r in responses for i in r.token_ids]
    assert [position.chosen.token_id for position in positions] == token_ids
    assert [len(position.top) for position in positions] == [3] * 8
    assert positions[0].chosen.rank == 1
    assert [token.logprob for token in positions[0].top] == pytest.approx([-0.125, -0.25, -0.375])
    assert [token.rank for token in positions[0].top] == [1, 2, 3]


async def test_zero_logprobs_report_the_chosen_token_alone(harness):
    responses = await collect(harness.inference.Generate(request(logprobs=0)))
    positions = [position for message in responses for position in message.logprobs]
    assert len(positions) == 8
    assert all(not position.top for position in positions)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "sampling.min_tokens"),
        ({"temperature": -0.5}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"temperature": 101.0}, "sampling.temperature"),
        ({"top_k": -2}, "sampling.top_k"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.5}, "sampling.top_p"),
        ({"min_p": -0.1}, "sampling.min_p"),
        ({"logprobs": 21}, "sampling.logprobs"),
        ({"stop": [""]}, "sampling.stop"),
        ({"stop": ["x" * 1025]}, "sampling.stop"),
        ({"stop": ["x"] * 17}, "sampling.stop"),
        ({"stop_token_ids": [257]}, "sampling.stop_token_ids"),
        ({"max_tokens": 124}, "sampling.max_tokens"),
    ],
)
async def test_a_parameter_out_of_bounds_is_named(harness, sampling, field):
    error = await failure_of(harness.inference.Generate(request("hello", **sampling)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = error_details(error)
    assert details["BadRequest"].field_violations[0].field == field
    assert error.details().startswith(f"{field}: ")
    assert details["ErrorInfo"].domain == "jpaged"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (inference_pb2.GenerateRequest(), "prompt"),
        (inference_pb2.GenerateRequest(text=""), "prompt"),
        (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds()), "prompt"),
        (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 257])), "prompt.token_ids"),
        (inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt()), "chat.messages"),
        (inference_pb2.GenerateRequest(text="x", request_id=""), "request_id"),
        (inference_pb2.GenerateRequest(text="x", request_id="é"), "request_id"),
        (inference_pb2.GenerateRequest(text="x", request_id="x" * 129), "request_id"),
    ],
)
async def test_a_prompt_or_an_id_that_cannot_be_is_named(harness, message, field):
    error = await failure_of(harness.inference.Generate(message))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_details(error)["BadRequest"].field_violations[0].field == field
    assert error_details(error)["ErrorInfo"].reason == "INVALID_ARGUMENT"


async def test_special_tokens_are_asked_for_of_a_text_alone(harness):
    turn = inference_pb2.ChatMessage(role="user", content="hi")
    message = inference_pb2.TokenizeRequest(chat=inference_pb2.ChatPrompt(messages=[turn]))
    assert bytes((await harness.inference.Tokenize(message)).token_ids) == b"user: hi\nassistant: "
    for value in (True, False):
        message.add_special_tokens = value
        error = await failure_of(harness.inference.Tokenize(message))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_details(error)["BadRequest"].field_violations[0].field == "add_special_tokens"


async def test_a_request_that_can_never_fit_says_so(harness):
    error = await failure_of(harness.inference.Generate(request("x" * 200)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_details(error)["ErrorInfo"].reason == "REQUEST_TOO_LONG"
    assert "max_model_len (128)" in error.details()


async def test_a_huge_message_is_cut_so_that_the_status_arrives(harness):
    message = request("x")
    message.model = "\N{SNOWMAN}" * 1025
    error = await failure_of(harness.inference.Generate(message))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert " ... " in error.details()
    assert error.details().endswith("'fake' is")


async def test_another_models_name_is_not_found(harness):
    message = request()
    message.model = "other"
    error = await failure_of(harness.inference.Generate(message))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "'other'" in error.details()
    assert "'fake'" in error.details()
    message.model = "fake"
    assert (await collect(harness.inference.Generate(message)))[-1].HasField("finish")


async def test_an_id_in_flight_is_refused(harness):
    harness.faults.gate.clear()
    first = harness.inference.Generate(request(request_id="twin"))
    await eventually(lambda: harness.executor.num_steps > 0)
    error = await failure_of(harness.inference.Generate(request(request_id="twin")))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    harness.faults.release()
    assert (await collect(first))[-1].HasField("finish")
    assert (await collect(harness.inference.Generate(request(request_id="twin"))))[-1].HasField("finish")


async def test_a_full_queue_says_when_to_come_back():
    async with running(max_num_queued_reqs=1) as harness:
        harness.faults.gate.clear()
        num_accepted = 1 + harness.serving.engine.geometry.max_num_seqs
        calls = [asyncio.ensure_future(collect(harness.inference.Generate(request()))) for _ in range(num_accepted + 1)]
        (refused,), accepted = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        error = refused.exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_details(error)["RetryInfo"].retry_delay.ToNanoseconds() > 0
        assert int(dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"]) > 0
        assert error_details(error)["ErrorInfo"].reason == "QUEUE_FULL"
        harness.faults.release()
        for messages in await asyncio.gather(*accepted):
            assert messages[-1].HasField("finish")
        assert len(accepted) == num_accepted
