"""Custom tools and older functions of chats: what the model reads, and the calls that the caller gets back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jpaged.chat import ToolCall, ToolCallPiece, ToolChoice, ToolChoiceMode
from jpaged.errors import InvalidArgument
from jpaged.openai.chat_tools import custom_input
from jpaged.openai.request import Job, LenientBody, chat_job
from jpaged.openai.response import build_message
from jpaged.types import CompletionOutput, FinishReason, OutputEvent, SequenceFinish
from tests.openai.test_chunks import chunks_of, read

CUSTOM = {"type": "custom", "custom": {"name": "run", "description": "Run code."}}
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Hi"}
OLDER = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}


def job_of(**fields: Any) -> Job:
    return chat_job({"messages": [USER], **fields})


def turns_of(messages: list[dict[str, Any]], **fields: Any) -> Any:
    return list(chat_job({"messages": messages, **fields}).prompts[0].messages or ())


def calls_of(*calls: tuple[str, str]) -> CompletionOutput:
    found = tuple(ToolCall(f"id{i}", name, text) for i, (name, text) in enumerate(calls))
    return CompletionOutput(0, "", (1,), None, None, "tool_calls", tool_calls=found)


def stream(job: Job, *pieces: ToolCallPiece) -> list[Any]:
    """Send each piece by itself; return the deltas and the reason for the end."""
    chunks = chunks_of(job)
    events = [OutputEvent("r", token_ids=(1,), tool_calls=(piece,)) for piece in pieces]
    events.append(OutputEvent("r", finish=SequenceFinish(FinishReason.TOOL_CALLS), is_last=True))
    sent = [one for event in events for one in read(chunks.of(0, event))]
    choices = [one["choices"][0] for one in sent if "role" not in one["choices"][0]["delta"]]
    assert all(choice["delta"] or choice["finish_reason"] for choice in choices)
    return [*(choice["delta"] for choice in choices if choice["delta"]), choices[-1]["finish_reason"]]


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    options = job_of(tools=[FUNCTION, CUSTOM], tool_choice={"type": "custom", "custom": {"name": "run"}}).prompts[0]
    assert options.chat_options is not None
    add, run = options.chat_options.tools
    assert (add.name, run.name, run.description) == ("add", "run", "Run code.")
    assert run.parameters["required"] == ["input"]
    assert options.chat_options.tool_choice == ToolChoice(ToolChoiceMode.NAMED, "run")


def test_allowed_tools_may_be_custom() -> None:
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "run"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    options = job_of(tools=[FUNCTION, CUSTOM], tool_choice=choice).prompts[0].chat_options
    assert options is not None
    assert [tool.name for tool in options.tools] == ["run"]


def test_a_call_of_a_custom_tool_has_its_text() -> None:
    job = job_of(tools=[FUNCTION, CUSTOM])
    message = build_message(calls_of(("run", '{"input": "1 + \\"é\\""}'), ("add", "{}")), form=job.call_form)
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "id0", "type": "custom", "custom": {"name": "run", "input": '1 + "é"'}},
        {"id": "id1", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ]
    read_back = turns_of([USER, message, {"role": "tool", "tool_call_id": "id0", "content": "2"}], tools=[CUSTOM])
    function = read_back[1]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("run", {"input": '1 + "é"'})
    assert turns_of([USER, message], tools=None) == read_back[:2]


def test_input_that_is_nested_too_deep_is_the_text_itself() -> None:
    assert custom_input("[" * 100_000) == "[" * 100_000


def test_a_streamed_custom_call_has_its_text_in_one_piece() -> None:
    job = job_of(tools=[FUNCTION, CUSTOM], stream=True)
    *deltas, reason = stream(
        job,
        ToolCallPiece(0, "", "id0", "run"),
        ToolCallPiece(0, '{"input": "a\\'),
        ToolCallPiece(0, 'n"}'),
        ToolCallPiece(1, '{"x"', "id1", "add"),
        ToolCallPiece(1, ": 1}"),
        ToolCallPiece(2, '{"input": "last"}', "id2", "run"),
    )
    calls = [call for delta in deltas for call in delta["tool_calls"]]
    assert calls == [
        {"index": 0, "id": "id0", "type": "custom", "custom": {"name": "run", "input": ""}},
        {"index": 0, "custom": {"input": "a\n"}},
        {"index": 1, "id": "id1", "type": "function", "function": {"name": "add", "arguments": '{"x"'}},
        {"index": 1, "function": {"arguments": ": 1}"}},
        {"index": 2, "id": "id2", "type": "custom", "custom": {"name": "run", "input": ""}},
        {"index": 2, "custom": {"input": "last"}},
    ]
    assert reason == "tool_calls"


def test_older_functions_are_tools_with_one_call() -> None:
    job = job_of(functions=[OLDER], function_call={"name": "add"})
    options = job.prompts[0].chat_options
    assert options is not None
    assert [tool.name for tool in options.tools] == ["add"]
    assert options.tool_choice == ToolChoice(ToolChoiceMode.NAMED, "add")
    assert not options.parallel_tool_calls
    message = build_message(calls_of(("add", '{"a": 1}')), form=job.call_form)
    assert message["function_call"] == {"name": "add", "arguments": '{"a": 1}'}
    assert "tool_calls" not in message
    answered = {"role": "function", "name": "add", "content": "3"}
    call, answer = turns_of([USER, message, answered], functions=[OLDER], function_call="auto")[1:]
    assert call["tool_calls"][0]["function"]["name"] == "add"
    assert (answer["role"], answer["tool_call_id"]) == ("tool", call["tool_calls"][0]["id"])
    assert turns_of([USER, message, answered]) == [USER, call, answer]


def test_a_streamed_older_call_ends_with_its_own_reason() -> None:
    job = job_of(functions=[OLDER], stream=True)
    assert stream(
        job, ToolCallPiece(0, "", "id0", "add"), ToolCallPiece(0, "{}"), ToolCallPiece(1, "{}", "b", "add")
    ) == [
        {"function_call": {"name": "add", "arguments": ""}},
        {"function_call": {"arguments": "{}"}},
        "function_call",
    ]


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_choice_without_functions_changes_nothing(choice: str | None) -> None:
    options = job_of(function_call=choice, functions=[]).prompts[0].chat_options
    assert options is not None
    assert options.tools == ()


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", "must be an object with a name"),
        ({"tools": [{"type": "custom", "custom": {"name": "run", "x": 1}}]}, "tools[0].custom.x", "is not supported"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "run", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.type",
            "'grammar' is not supported, only 'text'",
        ),
        ({"functions": "add"}, "functions", "must be a list of functions"),
        ({"functions": [OLDER], "tools": [FUNCTION]}, "functions", "conflicts with tools"),
        ({"functions": [OLDER], "function_call": "add"}, "function_call", "'add' is not 'none', 'auto'"),
        ({"functions": [OLDER], "function_call": {"name": "no"}}, "function_call.name", "is the name of none"),
        ({"tools": [FUNCTION, {"type": "custom", "custom": {"name": "a b"}}]}, "tools[1].custom.name", "letters"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name", "letters"),
        ({"tools": [{**CUSTOM, "nickname": 1}]}, "tools[0].nickname", "is not supported"),
        (
            {"tools": [CUSTOM], "tool_choice": {"type": "custom", "custom": {"name": "no"}}},
            "tool_choice.custom.name",
            "is the name of none",
        ),
        (
            {
                "tools": [CUSTOM],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "no"}}]},
                },
            },
            "tool_choice.allowed_tools.tools[0].custom.name",
            "is the name of none",
        ),
        (
            {"messages": [USER, {"role": "assistant", "function_call": {"name": 1, "arguments": "{}"}}]},
            "messages[1].function_call.name",
            "",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": OLDER, "tool_calls": [FUNCTION]}]},
            "messages[0].function_call",
            "conflicts with tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "run"}}]}]},
            "messages[0].tool_calls[0].custom",
            "must be an object of a name and an input",
        ),
    ],
)
def test_malformed_tools_of_other_forms_are_named(fields: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        job_of(**fields)
    assert error.value.field == field
    assert problem in error.value.problem


def test_unknown_fields_of_a_lenient_body_are_noted() -> None:
    body = LenientBody({"messages": [USER], "tools": [CUSTOM, {**FUNCTION, "nickname": "x"}]})
    assert chat_job(body).call_form is not None
    assert list(body.ignored) == ["tools.nickname"]
