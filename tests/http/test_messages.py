"""/v1/messages: bodies as chats, and answers whole and streamed, of a model whose answers are known."""

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import httpx2
import pytest

from jpaged.anthropic import (
    INVALID_JSON,
    MessageEvents,
    MessageFormat,
    parse_messages_request,
    tool_use_block,
)
from jpaged.chat import ToolCall, ToolCallPiece
from jpaged.errors import InvalidArgument
from jpaged.openai.request import LenientBody
from jpaged.openai.response import ResponseMetadata
from jpaged.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from jpaged.testing import FakeExecutor, scripted
from jpaged.types import FinishReason, OutputEvent, SequenceFinish, Usage
from tests.access.test_keys import FILE, TOKEN
from tests.server.harness import running

QWEN = AnswerFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
ARGUMENTS = '{"city": "Zürich 🏔"}'
TEXT = f'<think>\nLook.\n</think>\n\nSo: <tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
HINT = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
WEATHER: dict[str, Any] = {"name": "weather", "description": "Ask.", "input_schema": {"type": "object"}, **HINT}
USER: dict[str, Any] = {"role": "user", "content": "Weather?"}
BODY: dict[str, Any] = {"model": "fake", "max_tokens": 200, "messages": [USER], "temperature": 0}
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}


def messages_in(**body: Any) -> list[Mapping[str, Any]]:
    """The messages of the chat that a body becomes."""
    return list(parse_messages_request({**BODY, **body}).job.prompts[0].messages or ())


def options_in(**body: Any) -> Any:
    """The options of the chat that a body becomes."""
    return parse_messages_request({**BODY, **body}).job.prompts[0].chat_options


def events_in(text: str) -> list[dict[str, Any]]:
    """The events of a stream; the name of each is its type."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, whose events must come in order."""
    first, *blocks, delta, stop = [one for one in events if one["type"] != "ping"]
    assert (first["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message = first["message"]
    content: list[dict[str, Any]] = []
    texts: list[str] = []
    assert (message["type"], message["role"], message["content"]) == ("message", "assistant", [])
    for one in blocks:
        if one["type"] == "content_block_start":
            assert one["index"] == len(content)
            content.append(one["content_block"])
            texts.append("")
        elif one["type"] == "content_block_delta":
            assert one["index"] == len(content) - 1
            kind = one["delta"].pop("type")
            ((name, value),) = one["delta"].items()
            if kind == "input_json_delta":
                texts[-1] += value
            else:
                assert kind == {"signature": "signature_delta"}.get(name, f"{content[-1]['type']}_delta")
                content[-1][name] += value
        else:
            assert (one["type"], one["index"]) == ("content_block_stop", len(content) - 1)
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = json.loads(texts[-1])
    return {**message, "content": content, **delta["delta"], "usage": delta["usage"]}


def without_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


def test_a_conversation_becomes_a_chat() -> None:
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "?", **HINT}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "any"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "So: ", "citations": None},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Bern"}, "caller": None, **HINT},
                {"type": "tool_use", "id": "b", "name": "weather", "input": {INVALID_JSON: '{"city'}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "sun", **HINT},
                {"type": "text", "text": "And now?"},
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no", **HINT}, {"type": "text", "text": "city"}],
                },
            ],
        },
        USER,
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37; cch=fa690;"},
        {"type": "text", "text": "Be brief.", **HINT},
    ]
    assert messages_in(messages=turns, system=system) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "So: ",
            "reasoning_content": "Look.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
                {"id": "b", "type": "function", "function": {"name": "weather", "arguments": '{"city'}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no\ncity"},
        {"role": "user", "content": "And now?\nWeather?"},
    ]
    first = messages_in(system="Be brief.", messages=[{"role": "system", "content": "Be kind."}, USER])
    assert first[0] == {"role": "system", "content": "Be brief.\nBe kind."}
    assert messages_in(system="x-anthropic-billing-header: cch=1;\nBe brief.")[0]["content"] == "Be brief."


def test_documents_and_search_results_are_text() -> None:
    blocks: list[Any] = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "One."}, "title": "A"},
        {"type": "search_result", "title": "B", "source": "b.org", "content": [{"type": "text", "text": "Two."}]},
    ]
    (message,) = messages_in(messages=[{"role": "user", "content": blocks}])
    assert message["content"] == "A\nOne.B\nb.org\nTwo."


def test_an_assistant_at_the_end_is_continued() -> None:
    options = options_in(messages=[USER, {"role": "assistant", "content": "It is"}])
    assert options.continue_final_message and not options.add_generation_prompt
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    assert options_in(messages=[USER, {"role": "assistant", "content": [call]}]).add_generation_prompt


def test_late_system_messages_stay_in_their_place() -> None:
    turns: list[Any] = [
        USER,
        {"role": "system", "content": "Hurry."},
        {"role": "assistant", "content": "Yes."},
        {"role": "system", "content": [{"type": "text", "text": "Gone."}], "clear_at": "next_user_message"},
        USER,
        {"role": "system", "content": "Stay.", "clear_at": "next_user_message", "output_config": {"effort": "low"}},
    ]
    request = parse_messages_request({**BODY, "messages": turns, "output_config": {"effort": "max"}})
    assert [one["content"] for one in request.job.prompts[0].messages or ()] == [
        *("Weather?", "Hurry.", "Yes.", "Weather?", "Stay."),
    ]
    assert request.late_systems == (1, 4)
    assert request.job.prompts[0].chat_options.reasoning.effort == "low"
    rewritten = [(one["role"], one["content"]) for one in request.with_reminders().prompts[0].messages or ()]
    assert rewritten == [
        ("user", "Weather?\n<system-reminder>\nHurry.\n</system-reminder>"),
        ("assistant", "Yes."),
        ("user", "Weather?\n<system-reminder>\nStay.\n</system-reminder>"),
    ]


def test_turns_of_one_role_are_joined_and_results_of_tools_are_not() -> None:
    def result(name: str) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": name, "content": name}

    def turn(name: str) -> dict[str, Any]:
        thought = {"type": "thinking", "thinking": f"{name}?", "signature": ""}
        call = {"type": "tool_use", "id": name, "name": "weather", "input": {}}
        return {"role": "assistant", "content": [thought, {"type": "text", "text": name}, call]}

    asked = [{"role": "user", "content": f"{i}"} for i in range(3000)]
    turns = [*asked, turn("a"), turn("b"), {"role": "user", "content": [result("a"), result("b")]}]
    request = parse_messages_request({**BODY, "messages": [*turns, {"role": "system", "content": "Stay."}]})
    user, assistant, *results, system = request.job.prompts[0].messages or ()
    assert user["content"] == "\n".join(map(str, range(3000)))
    assert (assistant["content"], assistant["reasoning_content"]) == ("a\nb", "a?b?")
    assert [call["id"] for call in assistant["tool_calls"]] == ["a", "b"]
    assert [(one["tool_call_id"], one["content"]) for one in results] == [("a", "a"), ("b", "b")]
    reminder = {"role": "user", "content": f"<system-reminder>\n{system['content']}\n</system-reminder>"}
    assert request.with_reminders().prompts[0].messages == (user, assistant, *results, reminder)


def test_tools_and_their_choice() -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    tools = [hosted, {**WEATHER, "strict": True, "type": "custom", "eager_input_streaming": True}]
    request = parse_messages_request({**BODY, "tools": tools, "tool_choice": {"type": "any"}})
    options: Any = request.job.prompts[0].chat_options
    assert [(one.name, one.description, one.is_strict) for one in options.tools] == [("weather", "Ask.", True)]
    assert options.tool_choice.mode.value == "required" and options.parallel_tool_calls
    assert request.tool_numbers == (1,) and len(request.warnings) == 1
    assert "tools[0]: 'web_search' of type 'web_search_20250305' is ignored" in request.warnings[0]
    for choice, mode in (({"type": "auto"}, "auto"), ({"type": "none"}, "none")):
        assert options_in(tools=[WEATHER], tool_choice=choice).tool_choice.mode.value == mode
    named = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    options = options_in(tools=[WEATHER], tool_choice=named)
    assert (options.tool_choice.name, options.parallel_tool_calls) == ("weather", False)


def test_system_messages_add_and_remove_tools() -> None:
    def names(*blocks: Any) -> list[str]:
        turns = [USER, {"role": "system", "content": list(blocks)}]
        return [one.name for one in options_in(messages=turns, tools=[{**WEATHER, "defer_loading": True}]).tools]

    now = {"type": "tool_definition", "definition": {"name": "now", "input_schema": {}}}
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "weather"}}
    assert names({"type": "tool_addition", "tool": now}) == ["weather", "now"]
    assert names(removal) == []
    assert names(removal, {**removal, "type": "tool_addition"}) == ["weather"]
    with pytest.raises(InvalidArgument, match=r"^messages\[1\].content\[0\].tool.name: 'x' is the name of none"):
        names({"type": "tool_addition", "tool": {"type": "tool_reference", "name": "x"}})


def test_thinking_sets_the_switches_of_templates_and_a_budget_if_the_model_thinks() -> None:
    on = options_in(thinking={"type": "enabled", "budget_tokens": 1024})
    assert on.template_kwargs == {"enable_thinking": True, "thinking": True}
    assert on.reasoning.thinking_token_budget == 1024
    off = options_in(thinking={"type": "disabled"}, chat_template_kwargs={"thinking": True})
    assert off.template_kwargs == {"enable_thinking": False, "thinking": True} and not off.reasoning.include
    adaptive = options_in(thinking={"type": "adaptive"}, output_config={"effort": "high"})
    assert adaptive.reasoning.effort == "high" and adaptive.reasoning.thinking_token_budget is None
    assert options_in().template_kwargs == {}
    body = {**BODY, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    plain = parse_messages_request(body, can_think=False).job.prompts[0].chat_options
    assert plain.reasoning == options_in().reasoning and plain.template_kwargs == on.template_kwargs


def test_limits_samplings_and_formats() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    output = {"format": {"type": "json_schema", "schema": schema}, "task_budget": {"type": "tokens", "total": 9}}
    request = parse_messages_request({**BODY, "stop_sequences": ["END"], "top_k": 5, "output_config": output})
    prompt, sampling = request.job.prompts[0], request.job.sampling
    assert (prompt.fills_length, prompt.max_filled, sampling.max_tokens) == (True, 200, 1)
    assert (list(sampling.stop or ()), sampling.top_k, sampling.temperature) == (["END"], 5, 0)
    former = {"output_format": output["format"]}
    assert parse_messages_request({**BODY, **former}).job.sampling.structured_outputs == sampling.structured_outputs
    assert sampling.structured_outputs is not None
    assert parse_messages_request({**BODY, "metadata": {"user_id": "me"}}).job.user == "me"
    counted = {"messages": [USER], "model": "fake"}
    assert parse_messages_request(counted, counts=True).max_tokens is None
    with pytest.raises(InvalidArgument, match=r"^max_tokens: is missing"):
        parse_messages_request(counted)


IMAGE = {"type": "image", "source": {"type": "file", "file_id": "a"}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages: must be a list"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role: 'robot' is not one of"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
        ({"messages": [{**USER, "name": "me"}]}, "messages[0].name: is not supported"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].source.type: 'file' is not"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}
                ]
            },
            "messages[0].content[0].content[0].source.type: 'file' is not supported: only base64 and url are",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "messages[0].content[0].source.type: 'base64' is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "a", "input": {}}]}]},
            "messages[0].content[0].type: 'tool_use' is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": "yes"}]}]},
            "messages[0].content[0].cache_control: must be",
        ),
        ({"system": [{"type": "text", "text": 3}]}, "system[0].text: '3' is not a string"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: 'a b' is not 1 to"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema: must be a JSON schema"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name: 'weather' is the name of another tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: 'any' needs tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type: 'some' is not one of"),
        (
            {
                "tools": [{"type": "bash_20250124", "name": "bash"}],
                "tool_choice": {"type": "tool", "name": "bash"},
            },
            "tool_choice.name: 'bash' is of type 'bash_20250124', which is not supported",
        ),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: is missing"),
        ({"thinking": {"type": "deep"}}, "thinking.type: 'deep' is not one of"),
        ({"output_config": {"effort": "none"}}, "output_config.effort: 'none' is not one of"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format: must be"),
        ({"max_tokens": -1}, "max_tokens: -1 is not an integer"),
        ({"stop_sequences": 3}, "stop_sequences: 3 is not a list"),
        ({"temperature": -1}, "temperature: "),
        ({"container": "c"}, "container: is not supported: the server runs no code"),
        ({"metadata": {"user_id": "x" * 600}}, "metadata.user_id: 600 characters"),
        ({"stop": ["a"]}, "stop: is not supported: use `stop_sequences`"),
        ({"surprise": 1}, "surprise: is not supported"),
        ({"sampling_logprobs": True}, "sampling_logprobs: is not supported"),
    ],
)
def test_a_body_that_cannot_be_honored_names_the_field(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_messages_request({**BODY, **body})
    assert str(refused.value).startswith(message)


RICH: dict[str, Any] = {
    **BODY,
    "system": [{"type": "text", "text": "Be brief.", **HINT}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}]}},
                {"type": "search_result", "title": "b", "source": "c", "content": [], "citations": {"enabled": False}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "", "signature": "jpaged.YQ=="},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": ["Bern"]}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sun"}]}],
        },
        {
            "role": "system",
            "content": [{"type": "tool_addition", "tool": {"type": "tool_definition", "definition": WEATHER}}],
            "output_config": {"effort": "low"},
        },
    ],
    "tools": [WEATHER, {"type": "bash_20250124", "name": "bash"}],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "me"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}


def test_unknown_fields_of_a_lenient_body_are_noted_in_every_place() -> None:
    new = {"nickname": 1}
    text = {"type": "text", "text": "a", **new}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text], **new}
    given = {**BODY, **new, "messages": [{"role": "user", "content": [text, result], **new}], "tools": [WEATHER | new]}
    body = LenientBody(given)
    plain = [{"type": "tool_result", "tool_use_id": "a", "content": "a"}, {"type": "text", "text": "a"}]
    expected = parse_messages_request({**BODY, "messages": [{"role": "user", "content": plain}], "tools": [WEATHER]})
    assert parse_messages_request(body) == expected
    names = ("nickname", "messages.nickname", "messages.content.nickname", "messages.content.content.nickname")
    assert body.ignored.keys() == {*names, "tools.nickname"}
    with pytest.raises(InvalidArgument, match=r"^tools\[0\].nickname: is not supported"):
        parse_messages_request({**given, "nickname": None})


def test_unknown_fields_of_a_tool_that_a_message_adds_are_noted_too() -> None:
    def adding(definition: dict[str, Any]) -> list[dict[str, Any]]:
        block = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}}
        return [*BODY["messages"], {"role": "system", "content": [block]}]

    body = LenientBody({**BODY, "messages": adding(WEATHER | {"nickname": 1})})
    assert parse_messages_request(body) == parse_messages_request({**BODY, "messages": adding(WEATHER)})
    assert body.ignored.keys() == {"tools.nickname"}
    with pytest.raises(InvalidArgument, match=r"definition.nickname: is not supported"):
        parse_messages_request({**BODY, "messages": adding(WEATHER | {"nickname": 1})})


ODD: tuple[Any, ...] = (None, 7, "x", [[]], {"type": []})


def variants(value: Any) -> Iterator[Any]:
    """A value with each of its parts replaced by each odd value."""
    yield from ODD
    if isinstance(value, dict):
        for name, one in value.items():
            yield from ({**value, name: odd} for odd in variants(one))
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from ([*value[:i], odd, *value[i + 1 :]] for odd in variants(one))


def test_a_body_of_any_shape_is_read_or_refused_by_name() -> None:
    num_read, fields = 0, set()
    for name, value in RICH.items():
        for odd in [value, *variants(value)]:
            try:
                parse_messages_request({**RICH, name: odd})
                num_read += 1
            except InvalidArgument as error:
                fields.add(error.field.partition(".")[0].partition("[")[0])
    assert num_read > 50
    assert fields == RICH.keys()


def test_an_input_that_is_no_object_is_kept_as_text() -> None:
    for arguments in ('{"city": "Be', '{"a": "\\ud800"}', "[1]", '{"a": NaN}'):
        assert tool_use_block(ToolCall("a", "f", arguments))["input"] == {INVALID_JSON: arguments}
    assert tool_use_block(ToolCall("a", "f", ""))["input"] == {}


def test_counts_of_input_tokens_add_up_and_reasons_are_anthropics() -> None:
    how = MessageFormat(ResponseMetadata("a", "fake"), parse_messages_request(BODY), block_size=16)
    usage = how.usage(Usage(prompt_tokens=100, completion_tokens=7, cached_tokens=64))
    assert usage == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 32,
        "cache_read_input_tokens": 64,
        "output_tokens": 7,
    }
    reasons = {
        ("stop", None, 3): ("end_turn", None),
        ("stop", 7, 3): ("end_turn", None),
        ("stop", "END", 3): ("stop_sequence", "END"),
        ("tool_calls", "END", 3): ("tool_use", None),
        ("length", None, 200): ("max_tokens", None),
        ("length", None, 199): ("model_context_window_exceeded", None),
        ("abort", None, 3): ("max_tokens", None),
    }
    assert {one: tuple(how.stop(*one).values()) for one in reasons} == reasons


def test_events_of_an_omitted_thought_have_it_in_the_signature() -> None:
    body = {**BODY, "thinking": {"type": "adaptive", "display": "omitted"}}
    events = MessageEvents(MessageFormat(ResponseMetadata("a", "fake"), parse_messages_request(body)))
    usage = Usage(prompt_tokens=5, completion_tokens=2)
    sent = events.of(OutputEvent("a", reasoning_content="Zürich", usage=usage))
    sent += events.of(OutputEvent("a", text="So", usage=usage, finish=SequenceFinish(FinishReason.STOP), is_last=True))
    message = assembled(events_in((sent + events.end(1)).decode()))
    thought, text = message["content"]
    assert (thought["thinking"], text["text"], message["stop_reason"]) == ("", "So", "end_turn")
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 1}
    back = messages_in(messages=[USER, {"role": "assistant", "content": message["content"]}])
    assert back[1] == {"role": "assistant", "content": "So", "reasoning_content": "Zürich"}
    with pytest.raises(InvalidArgument, match=r"^messages\[0\].content\[0\].signature"):
        messages_in(messages=[{"role": "assistant", "content": [{**thought, "signature": "jpaged.?"}]}])


async def test_a_whole_answer_and_a_stream_are_the_same_message() -> None:
    executor = scripted(TEXT)(num_blocks=4096, max_model_len=1024)
    async with (
        running(executor=executor, answer_format=QWEN, http_port=0, max_messages_per_second=1_000_000) as harness,
        httpx2.AsyncClient(base_url=harness.http_url, headers=HEADERS) as client,
    ):
        hosted = {"type": "web_search_20250305", "name": "web_search"}
        asked = {**BODY, "tools": [hosted, WEATHER], "context_management": {"edits": []}, "service_tier": "auto"}
        whole = await client.post("/v1/messages?beta=true", json=asked)
        assert whole.status_code == 200, whole.text
        assert whole.headers["request-id"] == whole.headers["x-request-id"]
        assert "web_search_20250305" in whole.headers["x-jpaged-warning"]
        message = whole.json()
        assert message["id"] == f"msg_{whole.headers['request-id']}"
        assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
        assert message["content"][2]["input"] == json.loads(ARGUMENTS)
        assert (message["stop_reason"], message["stop_sequence"], message["role"]) == ("tool_use", None, "assistant")
        assert message["usage"]["output_tokens"] == len(TEXT.encode()) + 1
        counted = await client.post("/v1/messages/count_tokens", json=asked)
        num_tokens = counted.json()["input_tokens"]
        assert message["usage"]["input_tokens"] == num_tokens
        streamed = await client.post("/v1/messages", json={**asked, "stream": True})
        events = events_in(streamed.text)
        assert [one["type"] for one in events].count("ping") == 1
        start = events[0]["message"]["usage"]
        assert start["output_tokens"] == 0 and start["input_tokens"] + start["cache_read_input_tokens"] == num_tokens
        last = assembled(events)
        assert last["usage"]["cache_read_input_tokens"] > num_tokens - 32
        assert without_ids({**last, "usage": 0}) == without_ids({**message, "usage": 0})

        results = [{"type": "tool_result", "tool_use_id": last["content"][2]["id"], "content": "sun"}]
        turns = [USER, {"role": "assistant", "content": last["content"]}, {"role": "user", "content": results}]
        second = await client.post("/v1/messages", json={**asked, "messages": turns})
        usage = second.json()["usage"]
        assert second.status_code == 200 and usage["cache_read_input_tokens"] >= num_tokens - 32


async def test_an_answer_that_is_cut_or_stopped_gives_the_reason() -> None:
    async with (
        running(executor=scripted("a long story")(num_blocks=64, max_model_len=64), http_port=0) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        for fields, text, reason, sequence in (
            ({}, "a long story", "end_turn", None),
            ({"max_tokens": 4}, "a lo", "max_tokens", None),
            ({"stop_sequences": [" st"]}, "a long", "stop_sequence", " st"),
            ({"max_tokens": 5000, "ignore_eos": True}, None, "model_context_window_exceeded", None),
        ):
            given = {**BODY, **fields}
            message = (await client.post("/v1/messages", json=given)).json()
            streamed = await client.post("/v1/messages", json={**given, "stream": True})
            for one in (message, assembled(events_in(streamed.text))):
                assert (one["stop_reason"], one["stop_sequence"]) == (reason, sequence)
                assert text is None or one["content"] == [{"type": "text", "text": text}]
        long = {**BODY, "request_id": "mine", "messages": [{"role": "user", "content": "a" * 4000}]}
        refused = await client.post("/v1/messages", json=long)
        assert refused.headers["request-id"] == refused.json()["request_id"] == "mine"
        empty = (await client.post("/v1/messages", json={**BODY, "max_tokens": 0})).json()
        assert (empty["content"], empty["stop_reason"], empty["usage"]["output_tokens"]) == ([], "max_tokens", 0)


async def test_errors_have_anthropics_format_and_statuses(tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(FILE)
    async with (
        running(http_port=0, api_keys=str(keys)) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):

        async def failed(path: str, status: int, body: Any = BODY, **options: Any) -> str:
            answer = await client.post(path, json=body, **options)
            error = answer.json()
            assert (answer.status_code, error["type"]) == (status, "error"), answer.text
            assert error["request_id"] == answer.headers["request-id"]
            return str(error["error"]["type"])

        assert await failed("/v1/messages", 401) == "authentication_error"
        assert await failed("/v1/messages", 401, headers={"x-api-key": "wrong"}) == "authentication_error"
        other = {"x-jpaged-tenant": "bolt", "x-api-key": TOKEN}
        assert await failed("/v1/messages", 403, headers=other) == "permission_error"
        client.headers["x-api-key"] = TOKEN
        assert (await client.post("/v1/messages", json={**BODY, "max_tokens": 2})).status_code == 200
        assert (await client.get("/v1/models")).json()["object"] == "list"
        assert await failed("/v1/messages", 400, {**BODY, "max_tokens": None}) == "invalid_request_error"
        assert await failed("/v1/messages", 404, {**BODY, "model": "other"}) == "not_found_error"
        assert await failed("/v1/messages/batches", 404) == "not_found_error"
        assert await failed("/v1/completions", 400, {"prompt": 3}, headers=HEADERS) == "invalid_request_error"
        wrong = await client.get("/v1/messages")
        assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
        listed = (await client.get("/v1/models", headers=HEADERS)).json()
        assert listed["first_id"] == listed["last_id"] == "fake" and not listed["has_more"]
        assert (await client.get("/v1/models/fake", headers=HEADERS)).json() == listed["data"][0]
        assert listed["data"][0]["type"] == "model" and listed["data"][0]["display_name"] == "fake"


async def test_an_error_in_the_middle_is_the_last_event() -> None:
    executor = FakeExecutor()
    async with (
        running(executor=executor, http_port=0) as harness,
        httpx2.AsyncClient(base_url=harness.http_url) as client,
    ):
        executor.faults.hold_after(2)
        body = {**BODY, "max_tokens": 20, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/messages", json=body) as answer:
            text = ""
            async for piece in answer.aiter_text():
                if not text:
                    harness.serving.engine.fail(RuntimeError("the device is gone"))
                    executor.faults.release()
                text += piece
        *_, last = events_in(text)
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        assert last["request_id"] == answer.headers["request-id"]


async def test_a_stream_without_output_has_pings() -> None:
    options: dict[str, Any] = {"http_port": 0, "http_keep_alive": 0.05}
    async with running(**options) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        harness.faults.hold_after(0)
        async with client.stream("POST", "/v1/messages", json={**BODY, "max_tokens": 4, "stream": True}) as answer:
            lines = answer.aiter_lines()
            assert [await anext(lines) for _ in range(3)] == ["event: ping", 'data: {"type":"ping"}', ""]
            harness.faults.release()
            rest = [line async for line in lines]
        assert rest[-3:] == ["event: message_stop", 'data: {"type":"message_stop"}', ""]


@pytest.mark.parametrize("is_omitted", [False, True])
async def test_a_template_without_late_system_messages_gets_reminders(
    monkeypatch: pytest.MonkeyPatch, is_omitted: bool
) -> None:
    turns = [USER, {"role": "system", "content": "Hurry."}, {"role": "user", "content": "Now."}]
    async with running(http_port=0) as harness, httpx2.AsyncClient(base_url=harness.http_url) as client:
        seen: list[list[str]] = []
        tokenizer: Any = harness.serving.tokenizer
        render = tokenizer.chat_ids

        def chat_ids(messages: Any, options: Any, **limits: Any) -> list[int]:
            roles = [one["role"] for one in messages]
            seen.append(roles)
            if any(role == "system" for role in roles[1:]):
                if not is_omitted:
                    raise InvalidArgument("chat.messages", "system messages must be first")
                messages = [one for one in messages[1:] if one["role"] != "system"]
            ids: list[int] = render(messages, options, **limits)
            return ids

        counted = []
        for renders in (render, chat_ids, chat_ids):
            monkeypatch.setattr(tokenizer, "chat_ids", renders)
            asked = {"messages": [USER]} if renders is render else {"messages": turns}
            answer = await client.post("/v1/messages/count_tokens", json={"model": "fake", **asked})
            assert answer.status_code == 200, answer.text
            counted.append(answer.json()["input_tokens"])
        probe = ["system", "user", "system", "user"]
        assert seen == [*([probe] * (1 + is_omitted)), ["user"], ["user"]]
        assert all(one < other for one, other in pairwise(counted[:2]))


def test_a_stream_that_only_fills_the_cache_has_no_content() -> None:
    request = parse_messages_request({**BODY, "max_tokens": 0, "stream": True})
    events = MessageEvents(MessageFormat(ResponseMetadata("r", "fake"), request))
    finish = SequenceFinish(FinishReason.LENGTH)
    piece = ToolCallPiece(0, id="c", name="f", arguments="{")
    event = OutputEvent("r", text="a", reasoning_content="b", tool_calls=(piece,), finish=finish, usage=Usage(3, 1))
    found = events_in((events.of(event) + events.end(0)).decode())
    assert [one["type"] for one in found] == ["message_start", "message_delta", "message_stop"]


def test_tools_of_odd_types_and_names_of_hosted_ones() -> None:
    hosted, own = {"type": "bash_20250124", "name": "w"}, {"name": "w", "input_schema": {"type": "object"}}
    chosen = parse_messages_request({**BODY, "tools": [hosted, own], "tool_choice": {"type": "tool", "name": "w"}})
    assert chosen.job.prompts[0].chat_options.tools
    kinds: tuple[Any, ...] = ("function", 3, {"a": 1})
    for kind in kinds:
        with pytest.raises(InvalidArgument, match=r"tools\[0\].type: .* is no type of a tool"):
            parse_messages_request({**BODY, "tools": [{"type": kind, "name": "w"}]})
    many = parse_messages_request({**BODY, "tools": [{"type": "x_20250101"}] * 40_000})
    assert len(many.warnings) == 16
