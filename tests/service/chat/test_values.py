"""Tools and choices are read from JSON, and what is wrong with them is named."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.chat import (
    MAX_TEMPLATE_KWARGS,
    MAX_TOOL_BYTES,
    MAX_TOOLS,
    ChatAnswer,
    ChatOptions,
    ContentPiece,
    Piece,
    ReasoningOptions,
    ReasoningPiece,
    Tool,
    ToolCall,
    ToolCallPiece,
    ToolChoice,
    ToolChoiceMode,
    _checked_bytes,
    json_bytes,
    json_object,
    parse_tool_choice,
    parse_tools,
    read_message,
)
from jpaged.errors import InvalidArgument
from jpaged.service.chat.template import messages_bytes

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}
TOOLS = (Tool("weather", "Tells it.", SCHEMA), Tool("now"))


def wrapped(**function):
    return [{"type": "function", "function": {"name": "f", **function}}]


def nested_lists(depth):
    return [nested_lists(depth - 1)] if depth > 1 else []


def nested(depth):
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_tools_are_read_and_written_as_openai_has_them():
    value = [{"type": "function", "function": FUNCTION}, {"function": {"name": "now", "strict": None}}]
    assert parse_tools(value) == TOOLS
    assert TOOLS[0].as_json() == value[0]
    empty = {"type": "object", "properties": {}}
    assert TOOLS[1].as_json() == {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": empty},
    }
    assert parse_tools(None) == parse_tools([]) == ()
    assert parse_tools(wrapped(strict=True))[0].is_strict


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({}, "tools"),
        ("x", "tools"),
        (wrapped() * (MAX_TOOLS + 1), "tools"),
        ([1], "tools[0]"),
        ([{"type": "retrieval", "function": FUNCTION}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": FUNCTION, "x": 1}], "tools[0].x"),
        ([{"function": {}}], "tools[0].function.name"),
        (wrapped(name="two words"), "tools[0].function.name"),
        (wrapped(name="x" * 129), "tools[0].function.name"),
        (wrapped(name="caf\u00e9"), "tools[0].function.name"),
        (wrapped(name="f\n"), "tools[0].function.name"),
        (wrapped(name=7), "tools[0].function.name"),
        (wrapped(description=1), "tools[0].function.description"),
        (wrapped(description="\ud800"), "tools[0].function.description"),
        (wrapped(description="x" * (MAX_TOOL_BYTES + 1)), "tools[0].function.description"),
        (wrapped(parameters=[]), "tools[0].function.parameters"),
        (wrapped(parameters={"a": "x" * MAX_TOOL_BYTES}), "tools[0].function.parameters"),
        (wrapped(parameters=nested(64)), "tools[0].function.parameters"),
        (wrapped(parameters={"a": float("nan")}), "tools[0].function.parameters.a"),
        (wrapped(parameters={"a": [{}, object()]}), "tools[0].function.parameters.a[1]"),
        (wrapped(parameters={"a": {1: 2}}), "tools[0].function.parameters.a"),
        (wrapped(strict="yes"), "tools[0].function.strict"),
        (wrapped(more=1), "tools[0].function.more"),
        ([*wrapped(), *wrapped(name="g"), *wrapped()], "tools[2].function.name"),
    ],
)
def test_a_bad_tool_is_named(value, field):
    with pytest.raises(InvalidArgument) as error:
        parse_tools(value)
    assert error.value.field == field


def test_what_is_at_the_limits_passes():
    assert len(parse_tools([one for i in range(MAX_TOOLS) for one in wrapped(name=f"f{i}")])) == MAX_TOOLS
    assert parse_tools(wrapped(name="a-Z_9" + "x" * 59, parameters=nested(63)))


def test_choices_are_read():
    auto, none = ToolChoice(ToolChoiceMode.AUTO), ToolChoice(ToolChoiceMode.NONE)
    assert parse_tool_choice(None, TOOLS) == parse_tool_choice("auto", TOOLS) == auto
    assert parse_tool_choice(None, ()) == parse_tool_choice("auto", ()) == parse_tool_choice("none", TOOLS) == none
    assert parse_tool_choice("required", TOOLS) == ToolChoice(ToolChoiceMode.REQUIRED)
    named = {"type": "function", "function": {"name": "now"}}
    assert parse_tool_choice(named, TOOLS) == ToolChoice(ToolChoiceMode.NAMED, "now")


@pytest.mark.parametrize(
    ("value", "tools", "field"),
    [
        ("required", (), "tool_choice"),
        ("any", TOOLS, "tool_choice"),
        (7, TOOLS, "tool_choice"),
        ({"type": "tool"}, TOOLS, "tool_choice.type"),
        ({"type": "function"}, TOOLS, "tool_choice.function"),
        ({"type": "function", "function": {"name": "other"}}, TOOLS, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": ["now"]}}, TOOLS, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "now"}}, (), "tool_choice.function.name"),
    ],
)
def test_a_bad_choice_is_named(value, tools, field):
    with pytest.raises(InvalidArgument) as error:
        parse_tool_choice(value, tools)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": [Tool("f"), Tool("f")]}, "tools[1].function.name"),
        ({"tools": [Tool(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"template_kwargs": []}, "chat_template_kwargs"),
        ({"template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"template_kwargs": {1: 1}}, "chat_template_kwargs"),
        ({"template_kwargs": {"a": object()}}, "chat_template_kwargs.a"),
        ({"template_kwargs": {"a": "x" * (16 << 10)}}, "chat_template_kwargs"),
        ({"template_kwargs": {f"a{i}": 1 for i in range(MAX_TEMPLATE_KWARGS + 1)}}, "chat_template_kwargs"),
    ],
)
def test_options_are_bounded(options, field):
    with pytest.raises(InvalidArgument) as error:
        ChatOptions(**options)
    assert error.value.field == field


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("make", "last", "out", "field"),
    [
        (lambda n: ReasoningOptions(effort="x" * n), 1, 0, "reasoning.effort"),
        (lambda n: ReasoningOptions(effort="x" * n), 64, 65, "reasoning.effort"),
        (lambda n: ReasoningOptions(thinking_token_budget=n), 0, -1, "reasoning.thinking_token_budget"),
        (
            lambda n: ReasoningOptions(thinking_token_budget=n),
            1 << 20,
            (1 << 20) + 1,
            "reasoning.thinking_token_budget",
        ),
        (lambda n: ChatOptions(documents=[{}] * n), 128, 129, "documents"),
        (lambda n: ChatOptions(chat_template="x" * n), (256 << 10) - 2, (256 << 10) - 1, "chat_template"),
        (lambda n: ChatOptions(chat_template="x" * n), 1, 0, "chat_template"),
        (lambda n: ChatOptions(template_kwargs={"x" * n: 1}), 64, 65, "chat_template_kwargs"),
        (lambda n: ChatOptions(template_kwargs={f"a{i}": 1 for i in range(n)}), 32, 33, "chat_template_kwargs"),
        (lambda n: ChatOptions(tools=[Tool(f"f{i}") for i in range(n)]), 512, 513, "tools"),
        (lambda n: Tool("x" * n), 1, 0, "function.name"),
        (lambda n: Tool("x" * n), 128, 129, "function.name"),
        (lambda n: Tool("f", "x" * n), (64 << 10) - 2, (64 << 10) - 1, "function.description"),
        (lambda n: Tool("f", parameters=nested(n)), 63, 64, "function.parameters"),
        (lambda n: read_message("m", {"role": "assistant", "tool_calls": [CALL] * n}), 128, 129, "m.tool_calls"),
        (
            lambda n: messages_bytes([{"role": "assistant", "tool_calls": [{**CALL, "id": "x" * n}]}]),
            256,
            257,
            "chat.messages[0].tool_calls[0].id",
        ),
        (
            lambda n: messages_bytes([{"role": "tool", "content": "a", "tool_call_id": "x" * n}]),
            256,
            257,
            "chat.messages[0].tool_call_id",
        ),
        (lambda n: json_bytes("a", nested_lists(n), max_bytes=1000), 64, 65, "a"),
        (lambda n: json_bytes("a", [0.5] * n, max_bytes=1002), 100, 101, "a"),  # 8, and 2 for the list's comma
        (lambda n: json_bytes("a", [None] * n, max_bytes=602), 100, 101, "a"),
        (lambda n: json_bytes("a", {"é": n * "é"}, max_bytes=108), 50, 51, "a"),
        (lambda n: json_object("a", json.dumps({"b": n * "x"}), max_bytes=100), 93, 94, "a"),
        (lambda n: ChatOptions(documents=[{"a": "x" * n}]), (1 << 20) - 11, (1 << 20) - 10, "documents"),
    ],
)
def test_values_pass_up_to_their_limits_and_no_further(make, last, out, field):
    make(last)
    with pytest.raises(InvalidArgument) as error:
        make(out)
    assert error.value.field == field


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.just("\ud800")
    | st.just(b"")
    | st.just(1j),
    lambda parts: st.lists(parts) | st.tuples(parts) | st.dictionaries(st.text() | st.integers(0, 3), parts),
    max_leaves=12,
)


@settings(max_examples=40)
@given(VALUES, st.integers(0, 99))
def test_the_size_of_values_is_that_of_the_walk_that_names_fields(value, max_bytes):
    def outcome(measure):
        try:
            return measure("a", value, max_bytes=max_bytes)
        except InvalidArgument as error:
            return str(error)

    assert outcome(json_bytes) == outcome(_checked_bytes)


def test_a_refusal_is_the_content_of_an_assistant_that_has_no_other():
    assert read_message("m", {"role": "assistant", "content": None, "refusal": "No."})["content"] == "No."
    for message in ({"role": "assistant", "content": "x"}, {"role": "user", "content": None}):
        with pytest.raises(InvalidArgument, match=r"^m.refusal: does not go with content"):
            read_message("m", {**message, "refusal": "No."})


def test_what_is_not_set_of_a_tool_and_of_reasoning_has_its_default():
    assert Tool("f") == Tool("f", "", {"type": "object", "properties": {}}, is_strict=False)
    assert ReasoningOptions() == ReasoningOptions(None, None, None, include=True)
    call = {**CALL, "function": {"name": "f", "strict": True}}
    with pytest.raises(InvalidArgument, match=r"^m.tool_calls\[0\].function.strict: is not supported"):
        read_message("m", {"role": "assistant", "tool_calls": [call]})


def test_the_size_of_options_is_about_that_of_their_json():
    options = ChatOptions(tools=TOOLS, template_kwargs={"enable_thinking": False, "n": 10**40, "x": 0.5, "y": None})
    size = len(json.dumps({"tools": [tool.as_json() for tool in TOOLS], "kwargs": options.template_kwargs}))
    assert 0.8 * size < options.num_bytes < 1.2 * size


def test_pieces_make_an_answer():
    pieces: list[Piece] = [
        ReasoningPiece("H"),
        ReasoningPiece("m"),
        ContentPiece("a"),
        ToolCallPiece(0, "", id="x", name="f"),
        ToolCallPiece(0, "{"),
        ToolCallPiece(0, "}"),
        ToolCallPiece(1, "{}", id="y", name="g"),
        ContentPiece("b"),
    ]
    made = ChatAnswer.of(pieces)
    assert made == ChatAnswer("ab", "Hm", (ToolCall("x", "f", "{}"), ToolCall("y", "g", "{}")))
    assert made.tool_calls[0].as_json() == {
        "id": "x",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }
