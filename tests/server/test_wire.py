"""Every proto field is mapped, in both directions: none is accepted and ignored, none is left empty."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jpaged._proto.v1 import control_pb2, inference_pb2
from jpaged.chat import (
    ChatOptions,
    ReasoningOptions,
    Tool,
    ToolCallPiece,
    ToolChoice,
    ToolChoiceMode,
)
from jpaged.client import convert as client_wire
from jpaged.errors import InvalidArgument
from jpaged.http.batches.store import get_metadata, get_window_s
from jpaged.sampling_params import request_fields
from jpaged.server import servicer as server_wire
from jpaged.server_load import EngineLoad, Load
from jpaged.service.calls import Caller, require_name, require_salt
from jpaged.service.score_embed import CallerOptions, require_parts, require_score_size
from jpaged.structured import StructuredOutputs
from jpaged.types import (
    FinishReason,
    ModelInfo,
    OutputEvent,
    PositionLogprobs,
    PriorOutput,
    Prompt,
    RequestTimes,
    SamplingParams,
    SequenceFinish,
    TokenLogprob,
    Usage,
)
from tests.server.harness import BACKEND, MODEL

# A value for each field that is neither its default nor zero.
SAMPLING: dict[str, Any] = {
    "max_tokens": 77,
    "min_tokens": 3,
    "temperature": 0.3,
    "top_k": 11,
    "top_p": 0.4,
    "min_p": 0.05,
    "seed": 2**64 - 1,
    "logprobs": 5,
    "stop": ("a", "b"),
    "stop_token_ids": (9, 0),
    "ignore_eos": True,
    "skip_special_tokens": False,
    "n": 3,
    "best_of": 5,
    "beam_width": 4,
    "length_penalty": 0.5,
    "early_stopping": "never",
    "priority": -7,
    "cache_salt": "salt",
    "use_prefix_cache": False,
    "detokenize": False,
    "typical_p": 0.5,
    "top_n_sigma": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 1.25,
    "repetition_penalty": 1.5,
    "logit_bias": {7: -1.5, 0: 100.0},
    "allowed_token_ids": (5, 0),
    "bad_words": ("a", "b c"),
    "include_stop_str_in_output": True,
    "logprob_token_ids": (4, 9),
    "sampling_logprobs": True,
    "prompt_logprobs": -1,
    "truncate_prompt_tokens": 12,
    "thinking_token_budget": 6,
    "structured_outputs": StructuredOutputs(choice=["a", "b"], always_complete=True),
    "routed_experts_prompt_start": 3,
}
# What else must be set for a field to have its value.
NEEDED: dict[str, dict[str, Any]] = {
    "min_tokens": {"max_tokens": 4},
    "length_penalty": {"beam_width": 2},
    "early_stopping": {"beam_width": 2},
}


def names_of(message_type) -> set[str]:
    return {field.name for field in message_type.DESCRIPTOR.fields}


def test_the_proto_and_the_type_have_the_same_fields():
    assert names_of(inference_pb2.SamplingParams) == {f.name for f in request_fields()}
    assert SAMPLING.keys() == names_of(inference_pb2.SamplingParams)


@pytest.mark.parametrize("name", sorted(SAMPLING))
def test_a_sampling_field_crosses_to_the_server(name):
    changed: dict[str, Any] = {**NEEDED.get(name, {}), name: SAMPLING[name]}
    params = SamplingParams(**changed)
    assert getattr(params, name) != getattr(SamplingParams(), name)
    assert server_wire.sampling_from(client_wire.sampling_message(params)) == params
    if name == "early_stopping":
        changed[name] = inference_pb2.EARLY_STOPPING_NEVER
    if name == "allowed_token_ids":
        changed[name] = inference_pb2.TokenIds(ids=changed[name])
    if name == "structured_outputs":
        changed[name] = inference_pb2.StructuredOutputs(choice=["a", "b"], always_complete=True)
    bare = inference_pb2.SamplingParams(**changed)
    assert server_wire.sampling_from(bare) == params


@pytest.mark.parametrize("value", [True, False, "never"])
def test_every_way_to_stop_a_search_crosses(value):
    params = SamplingParams(beam_width=2, early_stopping=value)
    assert server_wire.sampling_from(client_wire.sampling_message(params)) == params


def test_a_way_to_stop_that_nobody_knows_is_refused():
    with pytest.raises(InvalidArgument, match=r"sampling.early_stopping: 9 is not"):
        server_wire.sampling_from(inference_pb2.SamplingParams(beam_width=2, early_stopping=9))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metadata", "tenant"),
    [((), ""), ((("other", "x"),), ""), ((("x-jpaged-tenant", "a b"),), "a b")],
)
def test_the_tenant_is_read_from_the_metadata(metadata, tenant):
    assert server_wire.tenant_from(metadata) == tenant
    assert client_wire.get_metadata(tenant) == tuple(pair for pair in metadata if pair[0] == client_wire.TENANT_KEY)


def test_a_tenant_that_cannot_be_is_refused_on_both_sides():
    for metadata in ((("x-jpaged-tenant", ""),), (("x-jpaged-tenant", "x" * 129),), (("x-jpaged-tenant", "a"),) * 2):
        with pytest.raises(InvalidArgument, match="x-jpaged-tenant"):
            server_wire.tenant_from(metadata)
    for tenant in ("\n", "é", "x" * 129, " a"):
        with pytest.raises(InvalidArgument, match="tenant"):
            client_wire.get_metadata(tenant)


def test_a_prefix_to_pin_crosses():
    for prefix in (Prompt(text="x"), Prompt(token_ids=(1, 2))):
        message = client_wire.pin_prefix_call("name", prefix, "salt", "adapter").request
        read = server_wire.prompt_from(message)
        assert (read.text, list(read.token_ids or ())) == (prefix.text, list(prefix.token_ids or ()))
        assert (message.name, message.cache_salt, message.adapter) == ("name", "salt", "adapter")


def test_no_field_set_is_the_default():
    assert server_wire.sampling_from(inference_pb2.SamplingParams()) == SamplingParams()


@pytest.mark.parametrize("value", [{"logprobs": 0}, {"seed": 0}, {"temperature": 0.0}, {"top_k": -1}])
def test_zero_and_minus_one_are_values_not_absence(value):
    params = SamplingParams(**value)
    assert server_wire.sampling_from(client_wire.sampling_message(params)) == params


def test_a_response_carries_everything_of_an_event_to_the_client():
    event = OutputEvent(
        request_id="r",
        index=1,
        text="text",
        token_ids=(1, 2),
        logprobs=(
            PositionLogprobs(TokenLogprob(1, -0.5, 2), (TokenLogprob(3, -0.25, 1),)),
            PositionLogprobs(TokenLogprob(2, -1.5), sampling_logprob=-1.25, entropy=0.0),
        ),
        finish=SequenceFinish(FinishReason.STOP, "END"),
        cumulative_logprob=-2.0,
        usage=Usage(5, 2, 4),
        is_last=True,
        times=RequestTimes(1.5, 2.5, 3.5, 4.5),
        prompt_logprobs=(PositionLogprobs(TokenLogprob(1, -0.5, 2), (), (TokenLogprob(3, -0.25),)),),
        reasoning_content="so",
        tool_calls=(ToolCallPiece(0, "{", "id", "f"), ToolCallPiece(0, "}"), ToolCallPiece(1, "", "", "")),
        routed_experts=np.arange(250, 262, dtype=np.uint16).reshape(2, 3, 2),
    )
    response = server_wire.build_response(event, "r", (7, 8), 2**64 - 1)
    assert {field.name for field, _ in response.ListFields()} == names_of(inference_pb2.GenerateResponse)
    chunk = client_wire.parse_chunk(response)
    for name in (
        "request_id",
        "index",
        "text",
        "token_ids",
        "logprobs",
        "finish",
        "cumulative_logprob",
        "usage",
        "times",
        "prompt_logprobs",
        "reasoning_content",
        "tool_calls",
    ):
        assert getattr(chunk, name) == getattr(event, name)
    np.testing.assert_array_equal(chunk.routed_experts, event.routed_experts)
    assert chunk.prompt_token_ids == (7, 8)
    assert chunk.seed == 2**64 - 1
    assert chunk.is_last
    assert chunk.finish_reason == "stop"


@pytest.mark.parametrize(
    "times",
    [
        None,
        RequestTimes(0.0),
        RequestTimes(0.0, 0.0, 0.0, 0.0),
        RequestTimes(3.0, first_scheduled_s=4.0, preempted_s=(4.5, 5.0)),
    ],
)
def test_times_that_are_not_told_are_none_and_not_zero(times):
    event = OutputEvent(request_id="r", is_last=True, times=times)
    assert client_wire.parse_chunk(server_wire.build_response(event, "r")).times == times
    assert names_of(inference_pb2.RequestTimes) == {field.name for field in dataclasses.fields(RequestTimes)}


@pytest.mark.parametrize("reason", FinishReason)
@pytest.mark.parametrize("matched", [None, "stop", 0, 12])
def test_every_finish_crosses(reason, matched):
    finish = SequenceFinish(reason, matched)
    event = OutputEvent(request_id="r", finish=finish, is_last=True)
    assert client_wire.parse_chunk(server_wire.build_response(event, "r")).finish == finish


def test_every_finish_reason_of_the_proto_has_a_value():
    named = set(inference_pb2.FinishReason.values()) - {inference_pb2.FINISH_REASON_UNSPECIFIED}
    assert len(named) == len(FinishReason)


GENERATED = (PriorOutput(0, (5, 2**31), -1.5), PriorOutput(2, (0,), 0.0, has_finished=True))


def test_a_generate_request_uses_every_field():
    message = client_wire.generate_request(
        Prompt(text="x", generated=GENERATED), SamplingParams(), request_id="r", model="m", whole=True, adapter="a"
    )
    assert server_wire.generated_from(message) == GENERATED
    assert {f.name for one in message.generated_token_ids for f, _ in one.ListFields()} == names_of(
        inference_pb2.GeneratedTokens
    )
    assert names_of(inference_pb2.GenerateRequest) - {field.name for field, _ in message.ListFields()} == {
        "token_ids",
        "chat",
        "prompt_embeds",
        "images",
    }
    by_ids = client_wire.generate_request(Prompt(token_ids=(1,)), None, request_id=None, model=None)
    assert list(by_ids.token_ids.ids) == [1]
    assert by_ids.request_id
    assert not by_ids.whole
    turns = ({"role": "user", "content": "hi"},)
    by_chat = client_wire.generate_request(Prompt(messages=turns), None, request_id=None, model=None)
    assert server_wire.prompt_from(by_chat).messages == turns


TURNS = (
    {"role": "user", "content": "hi", "name": "Ann"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": None, "type": "function", "function": {"name": "g", "arguments": '{"x": 1}'}},
        ],
    },
    {"role": "tool", "content": "12", "tool_call_id": "a"},
)
SCHEMA = {"type": "object", "properties": {"b": {"type": "number"}, "a": {"type": "string", "title": "é"}}}
OPTIONS = ChatOptions(
    tools=(Tool("f", "does", SCHEMA, is_strict=True), Tool("g")),
    template_kwargs={"e": [1, None, "é"]},
    tool_choice=ToolChoice(ToolChoiceMode.NAMED, "g"),
    parallel_tool_calls=False,
    reasoning=ReasoningOptions(effort="low", enabled=False, thinking_token_budget=0, include=False),
    documents=({"title": "é", "text": "b"},),
    add_generation_prompt=False,
    continue_final_message=True,
    chat_template="{{ messages }}",
)


def test_a_chat_crosses_whole():
    message = client_wire.generate_request(
        Prompt(messages=TURNS, chat_options=OPTIONS), None, request_id=None, model=None
    )
    assert {field.name for field, _ in message.chat.ListFields()} == names_of(inference_pb2.ChatPrompt)
    of_turns = {field.name for turn in message.chat.messages for field, _ in turn.ListFields()}
    assert of_turns == names_of(inference_pb2.ChatMessage) - {"parts"}
    read = server_wire.prompt_from(message)
    assert read.messages == TURNS
    assert read.chat_options == OPTIONS
    assert list(read.chat_options.tools[0].parameters["properties"]) == ["b", "a"]
    texts = (message.chat.tools[0].parameters, message.chat.chat_template_kwargs, *message.chat.documents)
    assert ["é" in text for text in texts] == [True] * 3  # the limits of a message count bytes
    tokenize = client_wire.tokenize_call(
        Prompt(messages=TURNS, chat_options=OPTIONS), add_special_tokens=None, model=None
    )
    assert server_wire.prompt_from(tokenize.request) == read


@pytest.mark.parametrize("mode", ToolChoiceMode)
def test_every_tool_choice_crosses(mode):
    choice = ToolChoice(mode, "f" if mode is ToolChoiceMode.NAMED else None)
    options = ChatOptions(tools=(Tool("f"),), tool_choice=choice)
    message = client_wire.generate_request(
        Prompt(messages=TURNS, chat_options=options), None, request_id=None, model=None
    )
    assert server_wire.prompt_from(message).chat_options == options
    assert len(ToolChoiceMode) == len(inference_pb2.ToolChoiceMode.values()) - 1


def test_a_chat_that_sets_nothing_is_the_default():
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    read = server_wire.prompt_from(inference_pb2.GenerateRequest(chat=chat))
    assert (read.messages, read.chat_options) == (({"role": "user", "content": "hi"},), ChatOptions())


async def test_a_request_without_optional_fields_has_the_documented_defaults():
    calls: list[tuple[Any, ...]] = []

    class Recorder:
        async def tokenize(self, read, size, *, add_special_tokens, model):
            calls.append((read().text, size, add_special_tokens, model))
            return [1]

        async def detokenize(self, token_ids, *, skip_special_tokens, model):
            calls.append((list(token_ids), skip_special_tokens, model))
            return "a"

    recorder: Any = Recorder()
    assert await server_wire.tokenized(recorder, inference_pb2.TokenizeRequest(text="ab")) == (
        inference_pb2.TokenizeResponse(token_ids=[1])
    )
    answer = await server_wire.detokenized(recorder, inference_pb2.DetokenizeRequest(token_ids=[7]))
    assert answer == inference_pb2.DetokenizeResponse(text="a")
    assert calls == [("ab", 2, True, None), ([7], True, None)]
    await server_wire.tokenized(recorder, inference_pb2.TokenizeRequest(text="ab", add_special_tokens=False))
    assert calls[2:] == [("ab", 2, False, None)]

    call = server_wire.call_from(inference_pb2.GenerateRequest(text="abc"), (), None)
    assert (call.request_id, call.model, call.tenant, call.remaining_s, call.size) == (None, None, "", None, 3)
    assert (call.is_whole, call.adapter, call.caller) == (False, "", Caller("grpc", "", "", {}))
    prompt, sampling = call.read()
    assert (prompt.generated, prompt, sampling) == (Prompt().generated, Prompt(text="abc"), SamplingParams())
    trace = {"traceparent": "00-1-2-01"}
    call = server_wire.call_from(inference_pb2.GenerateRequest(text="abc"), trace.items(), None, "ipv4:1.2.3.4:5")
    assert call.caller == Caller("grpc", "ipv4:1.2.3.4:5", "", trace)

    for message in (inference_pb2.ScoreRequest(), inference_pb2.EmbedRequest()):
        assert server_wire.parse_caller_options(message, "", None) == CallerOptions(
            model=None, tenant="", remaining_s=None, adapter="", cache_salt="", priority=0
        )


def chat_of(**fields: Any) -> inference_pb2.ChatPrompt:
    return inference_pb2.ChatPrompt(**fields)


def tools_of(count: int) -> list[inference_pb2.Tool]:
    return [inference_pb2.Tool(name=f"f{i}") for i in range(count)]


def turn_of_calls(count: int) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(role="assistant", tool_calls=[inference_pb2.ToolCall(name="f")] * count)


@pytest.mark.parametrize(
    ("read", "last", "out", "field"),
    [
        (
            lambda n: server_wire.messages_from(chat_of(messages=[inference_pb2.ChatMessage(role="user")] * n)),
            8192,
            8193,
            "chat.messages",
        ),
        (
            lambda n: server_wire.messages_from(chat_of(messages=[turn_of_calls(n)])),
            128,
            129,
            "chat.messages[0].tool_calls",
        ),
        (lambda n: server_wire.chat_options_from(chat_of(documents=["{}"] * n)), 128, 129, "documents"),
        (lambda n: server_wire.chat_options_from(chat_of(tools=tools_of(n))), 512, 513, "tools"),
        (lambda n: require_parts("inputs", n), 1, 0, "inputs"),
        (lambda n: require_parts("inputs", n), 1024, 1025, "inputs"),
        (require_score_size, 4 << 20, (4 << 20) + 1, "continuations"),
        (lambda n: require_name("model", "x" * n), 1, 0, "model"),
        (lambda n: require_name("model", "x" * n), 128, 129, "model"),
        (lambda n: require_salt("x" * n), 256, 257, "cache_salt"),
        (lambda n: get_metadata({f"k{i}": "" for i in range(n)}), 16, 17, "body.metadata"),
        (lambda n: get_metadata({"k" * n: ""}), 64, 65, f"body.metadata.{'k' * 64}"),
        (lambda n: get_metadata({"k": "v" * n}), 512, 513, "body.metadata.k"),
        (lambda n: get_window_s(f"{n}s"), 1, 0, "body.completion_window"),
        (lambda n: get_window_s(f"{n}d"), 30, 31, "body.completion_window"),
        (lambda n: get_window_s(f"{n}s"), 2_592_000, 2_592_001, "body.completion_window"),
    ],
)
def test_messages_pass_up_to_their_limits_and_no_further(read, last, out, field):
    read(last)
    with pytest.raises(InvalidArgument) as error:
        read(out)
    assert error.value.field == field


def test_a_default_length_fills_up_to_it_and_leaves_room_for_the_least():
    defaults = {"max_tokens": 50}
    cases: tuple[tuple[dict[str, Any], int | None], ...] = (({}, 1), ({"min_tokens": 5}, 5), ({"max_tokens": 3}, None))
    for sampling, max_tokens in cases:
        message = inference_pb2.GenerateRequest(text="a", sampling=inference_pb2.SamplingParams(**sampling))
        prompt, read = server_wire.call_from(message, (), None, defaults=defaults).read()
        if max_tokens is None:
            assert (prompt, read.max_tokens) == (Prompt(text="a"), 3)
        else:
            assert (prompt.fills_length, prompt.max_filled, read.max_tokens) == (True, 50, max_tokens)


def test_facts_and_load_cross_whole():
    info = server_wire.build_model_info(MODEL)
    assert names_of(control_pb2.GetModelInfoResponse) == {f.name for f in dataclasses.fields(ModelInfo)}
    assert dataclasses.asdict(client_wire._parse_model_info(info)) == dataclasses.asdict(MODEL)
    names = [f.name for f in dataclasses.fields(EngineLoad) if f.name != "speculation"]
    numbers: dict[str, Any] = {name: number for number, name in enumerate(names, start=1)}
    more: dict[str, Any] = {name: 100 + number for name, number in numbers.items()}
    other = EngineLoad(**more)
    load = client_wire._parse_load(server_wire.build_load(EngineLoad(**numbers), [EngineLoad(**numbers), other]))
    assert names_of(control_pb2.GetLoadResponse) == {f.name for f in dataclasses.fields(Load)}
    told = names_of(control_pb2.GetLoadResponse) - {"replicas"}
    assert {name: getattr(load, name) for name in told} == {name: numbers[name] for name in told}
    of_replica = names_of(control_pb2.ReplicaLoad)
    first, second = map(dataclasses.asdict, load.replicas)
    assert first == {name: numbers[name] for name in of_replica}
    assert second == {name: 100 + numbers[name] for name in of_replica}
    backend = server_wire.build_message(control_pb2.Backend, BACKEND)
    assert {field.name: value for field, value in backend.ListFields()} == dataclasses.asdict(BACKEND)
