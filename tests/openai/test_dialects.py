"""Words of other APIs for tools and thinking, in bodies of chats, responses and messages."""

from typing import Any

import pytest

from jpaged.anthropic import parse_messages_request
from jpaged.chat import ChatOptions, ToolChoiceMode
from jpaged.errors import InvalidArgument
from jpaged.openai.embeddings import rerank_job
from jpaged.openai.request import LenientBody, chat_job
from jpaged.openai.responses import parse_responses_request

MESSAGES = [{"role": "user", "content": "x"}]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]
KEPT = {"preserve_thinking": True, "clear_thinking": False}


def options(**fields: Any) -> ChatOptions:
    return chat_job({"messages": MESSAGES, **fields}).prompts[0].chat_options


def response_options(**fields: Any) -> ChatOptions:
    return parse_responses_request({"input": "x", **fields}).job.prompts[0].chat_options


def allowed(mode: Any, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_a_choice_of_a_part_of_the_tools_shows_only_these() -> None:
    for mode in ("auto", "required"):
        found = options(tools=TOOLS, tool_choice=allowed(mode, TOOLS[2], TOOLS[0]))
        assert [tool.name for tool in found.shown_tools] == ["f", "h"]
        assert found.choice.mode is ToolChoiceMode(mode)


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        (allowed("auto"), "tool_choice.allowed_tools"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (allowed("none", TOOLS[0]), "tool_choice.allowed_tools.mode"),
        (allowed([], TOOLS[0]), "tool_choice.allowed_tools.mode"),
        (allowed("auto", "f"), "tool_choice.allowed_tools.tools[0]"),
        (allowed("auto", TOOLS[0], {"type": "function", "function": {"name": "no"}}), None),
    ],
)
def test_a_wrong_choice_of_a_part_of_the_tools_is_named(choice: Any, field: str | None) -> None:
    with pytest.raises(InvalidArgument) as refused:
        options(tools=TOOLS, tool_choice=choice)
    assert refused.value.field == (field or "tool_choice.allowed_tools.tools[1].function.name")


def test_unknown_fields_of_tools_follow_the_rule_of_the_body() -> None:
    tool = {**TOOLS[0], "nickname": 1, "function": {"name": "f", "cache_control": {}, "icon": "i", "examples": None}}
    body = LenientBody({"messages": MESSAGES, "tools": [{**tool, "cache_control": {"type": "ephemeral"}}]})
    body["stream"], body["stream_options"] = True, {"include_usage": True, "pace": 1}
    found = chat_job(body)
    assert found.prompts[0].chat_options.tools == options(tools=TOOLS[:1]).tools
    assert [*body.ignored] == ["tools.nickname", "tools.function.icon", "stream_options.pace"]
    for name in ("nickname", "function.icon"):
        first, _, inner = name.partition(".")
        wrong = {**TOOLS[0], first: {"name": "f", inner: "i"} if inner else 1}
        with pytest.raises(InvalidArgument) as refused:
            options(tools=[wrong])
        assert refused.value.field == f"tools[0].{name}"


def test_calls_of_a_history_may_have_notes_of_other_servers() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    notes = {"extra_content": {"google": {"thought_signature": "s"}}, "provider_specific_fields": {"a": 1}}
    plain, noted = ({"role": "assistant", "content": None, "tool_calls": [one]} for one in (call, {**call, **notes}))
    assert chat_job({"messages": [*MESSAGES, noted]}) == chat_job({"messages": [*MESSAGES, plain]})


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"thinking": {"type": "auto", "clear_thinking": False}},
            {"enable_thinking": True, "thinking": True, "clear_thinking": False},
        ),
        ({"enable_thinking": False, "preserve_thinking": True}, {"enable_thinking": False, "preserve_thinking": True}),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        ({"chat_template_kwargs": {"a": 1}}, {"a": 1}),
    ],
)
def test_words_for_thinking_are_variables_of_the_template(given: dict[str, Any], variables: dict[str, Any]) -> None:
    assert options(**given).template_kwargs == variables
    assert options(**given).reasoning == options().reasoning


def test_words_for_a_budget_are_the_thinking_token_budget() -> None:
    wanted = options(thinking_token_budget=7).reasoning
    assert options(thinking_budget=7).reasoning == wanted
    assert options(thinking={"type": "enabled", "budget_tokens": 7}).reasoning == wanted
    assert options(reasoning={"max_tokens": 7}).reasoning == wanted
    hidden = options(reasoning={"include": False, "effort": "low"}).reasoning
    assert options(reasoning={"exclude": True, "effort": "low"}).reasoning == hidden
    assert options(reasoning={"exclude": False}).reasoning == options().reasoning


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"thinking": {"type": []}}, "thinking.type"),
        ({"thinking": "enabled"}, "thinking"),
        ({"thinking": {"type": "enabled", "clear_thinking": 1}}, "clear_thinking"),
        ({"thinking": {"type": "enabled", "speed": 1}}, "thinking.speed"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"reasoning": {"exclude": 1}}, "reasoning.exclude"),
        ({"thinking_budget": "x"}, "reasoning.thinking_token_budget"),
    ],
)
def test_wrong_words_for_thinking_are_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        options(**given)
    assert refused.value.field == field


def test_unknown_fields_of_thinking_are_ignored_if_the_body_is_lenient() -> None:
    body = LenientBody({"messages": MESSAGES, "thinking": {"type": "enabled", "display": "summarized"}})
    options = chat_job(body).prompts[0].chat_options
    assert options is not None and options.template_kwargs == {"enable_thinking": True, "thinking": True}
    assert [*body.ignored] == ["thinking.display"]


def test_a_context_of_reasoning_keeps_or_drops_that_of_earlier_turns() -> None:
    dropped = {name: not value for name, value in KEPT.items()}
    for context, variables in {"auto": {}, "all_turns": KEPT, "current_turn": dropped}.items():
        found = response_options(reasoning={"effort": "low", "context": context, "mode": "standard"})
        assert (found.template_kwargs, found.reasoning.effort) == (variables, "low")
    own = response_options(reasoning={"context": "all_turns"}, chat_template_kwargs={"clear_thinking": True})
    assert own.template_kwargs == {**KEPT, "clear_thinking": True}
    for name in ("context", "mode"):
        with pytest.raises(InvalidArgument) as refused:
            response_options(reasoning={name: "pro"})
        assert refused.value.field == f"reasoning.{name}"


def test_edits_that_keep_all_thinking_keep_that_of_earlier_turns() -> None:
    def variables(*edits: Any) -> Any:
        body = {"messages": MESSAGES, "max_tokens": 9, "context_management": {"edits": [*edits]}}
        return parse_messages_request(body).job.prompts[0].chat_options.template_kwargs

    edit = {"type": "clear_thinking_20251015", "keep": "all"}
    assert variables(edit) == KEPT
    for other in ({**edit, "keep": {"type": "thinking_turns", "value": 1}}, {"type": "clear_tool_uses_20250919"}, 1):
        assert variables(other) == {}


def test_tools_that_only_programs_call_are_ignored() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    for callers, names in {("programmatic",): ["g"], ("direct", "programmatic"): ["f", "g"], (): ["f", "g"]}.items():
        tools = [{**tool, "allowed_callers": [*callers]}, {**tool, "name": "g"}]
        found = parse_responses_request({"input": "x", "tools": tools})
        assert [one.name for one in found.job.prompts[0].chat_options.tools] == names
        assert len(found.warnings) == 2 - len(names)


def test_queries_and_documents_of_ranks_may_be_objects_with_a_text() -> None:
    plain = rerank_job({"query": "q", "documents": ["a", "b"]})
    body: dict[str, Any] = {"query": {"text": "q"}, "documents": [{"text": "a"}, "b"]}
    assert rerank_job({**body, "rank_fields": ["text"], "max_chunks_per_doc": 10}) == plain
    titled = LenientBody({**body, "documents": [{"text": "a", "title": "t"}, "b"]})
    assert rerank_job(titled) == plain and [*titled.ignored] == ["documents.title"]
    for wrong, field in (({"documents": [{"text": "a", "title": "t"}]}, "documents.title"), ({"query": {}}, "query")):
        with pytest.raises(InvalidArgument) as refused:
            rerank_job({**body, **wrong})
        assert refused.value.field == field
    with pytest.raises(InvalidArgument, match="by their text"):
        rerank_job({**body, "rank_fields": ["title"]})


def test_unknown_stream_options_of_responses_are_noted() -> None:
    body = LenientBody({"input": "x", "stream": True, "stream_options": {"pace": 1, "include_obfuscation": False}})
    parse_responses_request(body)
    assert [*body.ignored] == ["stream_options.pace"]
    with pytest.raises(InvalidArgument, match="pace"):
        parse_responses_request(dict(body))
