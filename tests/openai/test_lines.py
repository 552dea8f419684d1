"""The batch file format: what a line means, and every field that cannot be honoured named."""

import dataclasses
import json
import math
from typing import Any

import pytest

from jpaged.chat import ChatOptions, ReasoningOptions, Tool, ToolCall, ToolChoice, ToolChoiceMode
from jpaged.errors import (
    Incompatible,
    InvalidArgument,
    JpagedError,
    ModelNotFound,
    NotFound,
    QueueFull,
    RequestTooLong,
    Unavailable,
)
from jpaged.openai.lines import (
    BadLine,
    Line,
    error_body,
    failure_line,
    get_status_code,
    parse_file,
    parse_job,
    parse_lines,
    success_line,
)
from jpaged.openai.request import Job
from jpaged.openai.response import ShownToken
from jpaged.structured import StructuredOutputs
from jpaged.types import (
    CompletionOutput,
    PositionLogprobs,
    Prompt,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    Usage,
)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
TOOL_CHOICE_NAME = "body.tool_choice.function.name"


def text_of(**changes: Any) -> str:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}, **changes}
    return json.dumps({name: value for name, value in line.items() if value is not ...})


def completion(**body: Any) -> Line:
    return Line(1, "a", "/v1/completions", {"prompt": "x", **body})


def shown(token_id: int) -> ShownToken:
    return ShownToken(chr(token_id).encode(), chr(token_id))


def chat(**body: Any) -> Line:
    return Line(1, "a", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **body})


def test_lines_are_read_and_empty_ones_passed_over():
    lines = parse_lines([text_of(), "", "  ", text_of(custom_id="b")])
    assert [(line.number, line.custom_id) for line in lines] == [(1, "a"), (4, "b")]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["{"], "line 1: is not JSON"),
        (["[]"], "line 1: is not a JSON object"),
        ([text_of(), text_of(custom_id="b"), text_of()], "line 3: custom_id: 'a' is also that of line 1"),
        ([text_of(custom_id=...)], "line 1: custom_id: is missing"),
        ([text_of(custom_id=7)], "line 1: custom_id: 7 is not a non-empty string"),
        (["nonsense", text_of(custom_id="")], "line 1: is not JSON"),
    ],
)
def test_a_file_without_ids_or_with_one_twice_is_refused(texts, message):
    with pytest.raises(InvalidArgument) as raised:
        parse_lines(texts)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"body": ...}, "line 1: body: is missing"),
        ({"body": []}, "line 1: body: is not a JSON object"),
        ({"body": {"prompt": "\ud800"}}, "line 1: body.prompt: has '\\ud800', half of"),
        ({"method": "GET"}, "line 1: method: 'GET' is not POST"),
        ({"url": "/v1/images"}, "line 1: url: '/v1/images' is not one of /v1/completions, /v1/chat"),
        ({"extra": 1}, "line 1: extra: unknown field"),
    ],
)
def test_a_file_of_one_line_that_has_an_id_is_a_failed_line(changes, message):
    (bad,) = parse_lines([text_of(**changes)])
    assert isinstance(bad, BadLine)
    assert bad.custom_id == "a"
    assert str(bad.error).startswith(message)


LONG = "x" * 100_000


@pytest.mark.parametrize("changes", [{"method": LONG}, {"url": [LONG]}, {LONG: 1}, {"custom_id": [LONG]}])
def test_an_error_of_a_line_shows_the_beginning_of_what_is_long(changes):
    (_, bad) = parse_lines([text_of(custom_id="b"), text_of(**changes)])
    assert isinstance(bad, BadLine)
    assert "xxxx" in str(bad.error) and len(str(bad.error)) < 300


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize(
    ("text", "custom_id", "message"),
    [
        ("nonsense", None, "line 2: is not JSON"),
        (DEEP, None, "line 2: is nested deeper than the limit of 64"),
        (text_of(custom_id="far", body=...)[:-1] + ', "body": ' + "1" * 5000 + "}", None, "line 2: is not JSON"),
        (text_of(custom_id="bad", method="GET"), "bad", "line 2: method: 'GET' is not POST"),
        (text_of(custom_id="bad", body={"prompt": "\ud800"}), "bad", "line 2: body.prompt: has '\\ud800', half of"),
        (text_of(custom_id="bad", body={"\udfff": 1}), "bad", "line 2: body: has '\\udfff', half of"),
        (text_of(custom_id="\ud800"), "\ud800", "line 2: custom_id: has '\\ud800', half of"),
        (text_of(custom_id="bad", body={"prompt": "x", "seed": 10**400}), "bad", "line 2: body.seed: 1000"),
        (text_of(custom_id="bad", body={"prompt": [5, -(2**64)]}), "bad", "line 2: body.prompt: -184"),
        (text_of(custom_id="bad", body={"prompt": "x", "top_p": 1e400}), "bad", "line 2: body.top_p: inf is not"),
        (
            text_of(custom_id="bad", body={"prompt": "x", "top_p": float("nan")}),
            "bad",
            "line 2: body.top_p: nan is not",
        ),
        (text_of(custom_id="bad", body={"prompt": json.loads("[" * 70 + "]" * 70)}), "bad", "line 2: is nested deeper"),
    ],
)
def test_a_line_that_is_no_request_is_a_failed_line_between_others(text, custom_id, message):
    first, bad, last = parse_lines([text_of(), text, text_of(custom_id="b")])
    assert (first.custom_id, last.custom_id) == ("a", "b")
    assert isinstance(bad, BadLine)
    assert (bad.number, bad.custom_id) == (2, custom_id)
    assert str(bad.error).startswith(message)
    written = failure_line(bad.custom_id, bad.error).encode().decode()
    assert json.loads(written)["custom_id"] == custom_id
    assert json.loads(written)["response"]["body"]["error"]["code"] == "INVALID_ARGUMENT"


def test_lines_end_with_line_feeds_alone():
    texts = "\u2028 \u2029 \x85 \x0b \x0c"
    line = json.dumps(json.loads(text_of(body={"prompt": texts})), ensure_ascii=False)
    (read,) = parse_file(b"\xef\xbb\xbf" + line.encode() + b"\r\n\n")
    assert isinstance(read, Line)
    assert read.body["prompt"] == texts


def test_a_file_that_is_not_utf_8_names_the_line():
    with pytest.raises(InvalidArgument, match="line 2: is not UTF-8: byte 0xe9"):
        parse_file(text_of().encode() + b"\n" + text_of().encode().replace(b"x", b"\xe9"))


def test_a_completion_is_read_whole():
    body = {
        "model": "m",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.25,
        "seed": 3,
        "stop": "END",
        "logprobs": 2,
        "top_k": 4,
        "min_p": 0.1,
        "min_tokens": 1,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    sampling = SamplingParams(
        max_tokens=7,
        min_tokens=1,
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        min_p=0.1,
        seed=3,
        logprobs=2,
        stop=("END",),
        stop_token_ids=(5,),
        ignore_eos=True,
        skip_special_tokens=False,
    )
    assert parse_job(completion(**body)) == Job(sampling, (Prompt(text="x"),), model="m")
    assert parse_job(completion(prompt=[1, 2])).prompts == (Prompt(token_ids=(1, 2), fills_length=True),)


def test_what_changes_logits_is_read():
    body = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": -100, "7": 1.5}}
    wanted = SamplingParams(presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={5: -100, 7: 1.5})
    assert (
        parse_job(completion(max_tokens=16, **body)).sampling
        == parse_job(chat(max_tokens=16, **body)).sampling
        == wanted
    )


def test_sequences_beams_and_sharing_are_read():
    drawn = parse_job(
        completion(max_tokens=16, n=2, best_of=4, priority=-3, cache_salt="s", use_prefix_cache=False)
    ).sampling
    assert drawn == SamplingParams(n=2, best_of=4, priority=-3, cache_salt="s", use_prefix_cache=False)
    searched = parse_job(chat(n=2, beam_width=3, length_penalty=0.5, early_stopping="never", max_tokens=4)).sampling
    assert searched == SamplingParams(n=2, beam_width=3, length_penalty=0.5, early_stopping="never", max_tokens=4)


def test_a_chat_is_read_whole():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    job = parse_job(chat(messages=messages, max_completion_tokens=9, logprobs=True, top_logprobs=2))
    (prompt,) = job.prompts
    assert prompt.messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "ab"})
    assert (job.sampling.max_tokens, job.sampling.logprobs, prompt.fills_length) == (9, 2, False)
    assert parse_job(chat()).prompts[0].fills_length
    assert parse_job(chat(logprobs=True)).sampling.logprobs == 0
    assert parse_job(chat(logprobs=False)).sampling.logprobs is None


def test_tools_and_reasoning_of_a_chat_are_read():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "12"}]},
    ]
    (prompt,) = parse_job(
        chat(
            messages=messages,
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "f"}},
            parallel_tool_calls=False,
            chat_template_kwargs={"a": [1]},
            reasoning={"enabled": True},
            reasoning_effort="low",
            include_reasoning=False,
        )
    ).prompts
    assert prompt.messages == (
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "12"},
    )
    assert prompt.chat_options == ChatOptions(
        tools=(Tool("f", parameters={"type": "object"}, is_strict=True),),
        template_kwargs={"a": [1]},
        tool_choice=ToolChoice(ToolChoiceMode.NAMED, "f"),
        parallel_tool_calls=False,
        reasoning=ReasoningOptions(effort="low", enabled=True, include=False),
    )
    assert parse_job(chat(tools=[])).prompts[0].chat_options == ChatOptions()


def test_a_chat_line_has_calls_and_reasoning_beside_the_content():
    called = dataclasses.replace(
        OUTPUT.outputs[0],
        text="",
        reasoning_content="hm",
        tool_calls=(ToolCall("1", "f", "{}"),),
        finish_reason="tool_calls",
    )
    output = dataclasses.replace(OUTPUT, outputs=(called,))
    choice = json.loads(success_line("c", parse_job(chat()), output, model="m", token_text=shown))["response"]["body"][
        "choices"
    ][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }


@pytest.mark.parametrize(
    "body",
    [
        {"n": 1},
        {"n": None},
        {"best_of": None},
        {"stream": False},
        {"presence_penalty": 0.0},
        {"logit_bias": {}},
        {"stop": None},
        {"user": None},
    ],
)
def test_fields_that_ask_for_nothing_pass(body):
    assert parse_job(completion(**body)) == parse_job(completion())
    assert parse_job(chat(**body)) == parse_job(chat())


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (completion(n=0), "body.n"),
        (completion(n=3, best_of=2), "body.best_of"),
        (completion(use_beam_search=True, beam_width=2), "body.use_beam_search"),
        (completion(truncation_side="right"), "body.truncation_side"),
        (completion(add_special_tokens=False), "body.add_special_tokens"),
        (completion(guided_regex="a", structured_outputs={"regex": "b"}), "body.guided_regex"),
        (completion(beam_width=17), "body.beam_width"),
        (completion(length_penalty=2.0), "body.length_penalty"),
        (completion(beam_width=2, early_stopping="soon"), "body.early_stopping"),
        (completion(priority="high"), "body.priority"),
        (completion(cache_salt=5), "body.cache_salt"),
        (completion(use_prefix_cache=0), "body.use_prefix_cache"),
        (completion(n=True), "body.n"),
        (completion(echo=True), "body.echo"),
        (completion(stream=True), "body.stream"),
        (completion(frequency_penalty=2.5), "body.frequency_penalty"),
        (completion(logit_bias={"x": 1}), "body.logit_bias"),
        (completion(logit_bias={"5": 101}), "body.logit_bias[5]"),
        (completion(logit_bias=[5]), "body.logit_bias"),
        (completion(logit_bias={"5": 1, "05": 1}), "body.logit_bias"),
        (completion(logit_bias={"9" * 11: 1}), "body.logit_bias"),
        (completion(bad_words=5), "body.bad_words"),
        (completion(allowed_token_ids="5"), "body.allowed_token_ids"),
        (completion(logprob_token_ids=5), "body.logprob_token_ids"),
        (completion(prompt_logprobs=True), "body.prompt_logprobs"),
        (completion(detokenize=0), "body.detokenize"),
        (completion(messages=[]), "body.messages"),
        (completion(max_completion_tokens=5), "body.max_completion_tokens"),
        (completion(prompt=["a", "b"]), "body.prompt"),
        (completion(prompt=[]), "body.prompt"),
        (completion(prompt=None), "body.prompt"),
        (completion(temperature=-1), "body.temperature"),
        (completion(temperature="hot"), "body.temperature"),
        (completion(max_tokens=1.5), "body.max_tokens"),
        (completion(logprobs=True), "body.logprobs"),
        (completion(logprobs=-2), "body.logprobs"),
        (completion(stop=5), "body.stop"),
        (completion(stop_token_ids="5"), "body.stop_token_ids"),
        (completion(ignore_eos=1), "body.ignore_eos"),
        (completion(model=5), "body.model"),
        (chat(messages=[]), "body.messages"),
        (chat(messages=[{"role": "user"}]), "body.messages[0].content"),
        (chat(messages=[{"role": "user", "content": "x", "refusal": "y"}]), "body.messages[0].refusal"),
        (chat(messages=[{"role": "user", "content": "x", "tool_calls": [1]}]), "body.messages[0].tool_calls[0]"),
        (chat(messages=[{"role": "user", "content": None}]), "body.messages[0].content"),
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "body.messages[0].content[0].image_url",
        ),
        (chat(top_logprobs=2), "body.top_logprobs"),
        (chat(logprobs=2), "body.logprobs"),
        (chat(max_tokens=2, max_completion_tokens=3), "body.max_tokens"),
        (chat(tools=[{}]), "body.tools[0].function"),
        (chat(tools=[{"type": "function", "function": {"name": "a b"}}]), "body.tools[0].function.name"),
        (chat(tools=[TOOL] * 2), "body.tools[1].function.name"),
        (chat(tools=[TOOL], tool_choice="any"), "body.tool_choice"),
        (chat(tool_choice="required"), "body.tool_choice"),
        (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), TOOL_CHOICE_NAME),
        (chat(parallel_tool_calls=1), "body.parallel_tool_calls"),
        (chat(chat_template_kwargs=[]), "body.chat_template_kwargs"),
        (chat(chat_template_kwargs={"a b": 1}), "body.chat_template_kwargs"),
        (chat(reasoning="low"), "body.reasoning"),
        (chat(reasoning={"x": 1}), "body.reasoning.x"),
        (chat(reasoning_effort=3), "body.reasoning.effort"),
        (chat(reasoning={"effort": "low"}, reasoning_effort="low"), "body.reasoning_effort"),
        (chat(include_reasoning="no"), "body.reasoning.include"),
        (chat(reasoning={"thinking_token_budget": -1}), "body.reasoning.thinking_token_budget"),
        (completion(tools=[TOOL]), "body.tools"),
        (chat(response_format={"type": "xml"}), "body.response_format"),
        (chat(response_format={"type": "json_schema"}), "body.response_format.json_schema"),
        (chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}), "body.response_format"),
        (chat(prompt="x"), "body.prompt"),
    ],
)
def test_what_cannot_be_honoured_is_named(line, field):
    with pytest.raises(InvalidArgument) as raised:
        parse_job(line)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"whitespace_pattern": " ?"}},
            StructuredOutputs(json_object=True, whitespace_pattern=" ?"),
        ),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
            StructuredOutputs(regex="a"),
        ),
        (
            {"structured_outputs": {"disable_any_whitespace": True}},
            StructuredOutputs(disable_any_whitespace=True),
        ),
    ],
)
def test_a_response_format_takes_options_of_structured_outputs(body, wanted):
    assert parse_job(chat(**body)).sampling.structured_outputs == wanted


UNSET = {field.name: field.default for field in dataclasses.fields(StructuredOutputs)}
"""What clients send that write every field with its default."""


@pytest.mark.parametrize("line", [chat, completion])
@pytest.mark.parametrize("given", [{}, {"json": None, "json_object": False}, UNSET])
def test_structured_outputs_without_a_value_are_left_out(line, given):
    for more in ({}, {"response_format": {"type": "text"}}):
        assert parse_job(line(structured_outputs=given, **more)).sampling == parse_job(line()).sampling
    held = parse_job(line(structured_outputs=given, response_format={"type": "json_object"})).sampling
    assert held.structured_outputs == StructuredOutputs(json_object=True)
    with pytest.raises(InvalidArgument, match=r"structured_outputs.guided: is unknown"):
        parse_job(line(structured_outputs={"guided": None}))


OUTPUT = RequestOutput(
    request_id="r",
    prompt="x",
    prompt_token_ids=(1, 2),
    outputs=(
        CompletionOutput(
            index=0,
            text="ab",
            token_ids=(97, 98),
            cumulative_logprob=-3.0,
            logprobs=(
                PositionLogprobs(TokenLogprob(97, -1.0, 1), (TokenLogprob(97, -1.0, 1), TokenLogprob(99, -1.5, 2))),
                PositionLogprobs(TokenLogprob(98, -2.0, 1), (TokenLogprob(98, -2.0, 1),)),
            ),
            finish_reason="stop",
            matched_stop="END",
        ),
    ),
    usage=Usage(2, 2, 1),
)


def test_a_completion_line_is_openais():
    value = json.loads(
        success_line(completion().custom_id, parse_job(completion()), OUTPUT, model="m", token_text=shown)
    )
    assert (value["custom_id"], value["error"]) == ("a", None)
    assert (value["response"]["status_code"], value["response"]["request_id"]) == (200, "r")
    body = value["response"]["body"]
    assert (body["object"], body["model"], body["id"]) == ("text_completion", "m", "cmpl-r")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "ab",
            "logprobs": {
                "tokens": ["a", "b"],
                "token_logprobs": [-1.0, -2.0],
                "top_logprobs": [{"a": -1.0, "c": -1.5}, {"b": -2.0}],
                "text_offset": [0, 1],
                "bytes": [[97], [98]],
            },
            "finish_reason": "stop",
            "stop_reason": "END",
            **dict.fromkeys(("token_ids", "prompt_token_ids", "prompt_logprobs")),
        }
    ]
    assert body["usage"]["total_tokens"] == 4
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_a_chat_line_is_openais():
    body = json.loads(success_line("c", parse_job(chat()), OUTPUT, model="m", token_text=shown))["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "ab", "reasoning": None}
    first = body["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"], first["logprob"]) == ("a", [97], -1.0)
    assert [token["token"] for token in first["top_logprobs"]] == ["a", "c"]


@pytest.mark.parametrize("line", [completion(), chat()], ids=["completion", "chat"])
def test_a_log_probability_that_is_not_finite_is_null(line):
    impossible = TokenLogprob(99, -math.inf, 3)
    position = PositionLogprobs(TokenLogprob(97, -1.0, 1), (TokenLogprob(97, -1.0, 1), impossible))
    one = dataclasses.replace(OUTPUT.outputs[0], cumulative_logprob=-math.inf, logprobs=(position,))
    text = success_line(
        line.custom_id, parse_job(line), dataclasses.replace(OUTPUT, outputs=(one,)), model="m", token_text=shown
    )
    (choice,) = json.loads(text)["response"]["body"]["choices"]
    assert "Infinity" not in text
    if line.url == "/v1/completions":
        assert choice["logprobs"]["top_logprobs"] == [{"a": -1.0, "c": None}]
    else:
        likeliest = choice["logprobs"]["content"][0]["top_logprobs"]
        assert [token["logprob"] for token in likeliest] == [-1.0, None]


def test_a_failed_line_carries_code_and_message():
    value = json.loads(failure_line("a", InvalidArgument("body.top_p", "is too much")))
    assert value["error"] is None and value["response"]["status_code"] == 400
    assert value["response"]["body"]["error"] == {
        "message": "top_p: is too much",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": "INVALID_ARGUMENT",
    }
    assert value["id"] == f"batch_req_{value['response']['request_id']}"


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (RequestTooLong("messages", "x"), 400, "context_length_exceeded", "messages"),
        (RequestTooLong("body", "x"), 413, "REQUEST_TOO_LONG", "body"),
        (ModelNotFound("model: x"), 404, "model_not_found", None),
        (NotFound("adapter: x"), 404, "NOT_FOUND", None),
        (QueueFull("x", retry_after_s=1.0), 429, "QUEUE_FULL", None),
        (Unavailable("x"), 503, "UNAVAILABLE", None),
        (Incompatible("x"), 409, "INCOMPATIBLE", None),
        (JpagedError("x"), 500, "JPAGED_ERROR", None),
    ],
)
def test_an_error_has_openais_status_and_code(error, status, code, param):
    told = error_body(error)["error"]
    assert (get_status_code(error), told["code"], told["param"]) == (status, code, param)
