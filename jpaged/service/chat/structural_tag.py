r"""The structural tag that holds an answer to a family's format of calls: plain data, from which a grammar is built.

    {"type": "structural_tag",
     "format": {"type": "sequence", "elements": [
        {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"},
        {"type": "regex", "pattern": "[\\r\\n]*"},
        {"type": "triggered_tags",
         "triggers": ["<tool_call>"],
         "tags": [
            {"type": "tag",
             "begin": "<tool_call>\n{\"name\": \"f\", \"arguments\": ",
             "content": {"type": "json_schema", "json_schema": {...}},
             "end": "}\n</tool_call>"}],
         "at_least_one": true,
         "stop_after_first": false}]}}

Text is free up to a trigger; from there it is one of the tags that begin so. `at_least_one` lets no text stand before
the first, and no answer end before it; `stop_after_first` lets nothing stand behind it. What comes before is the
reasoning, which is free; without it `format` is the last part alone.
Source: https://xgrammar.mlc.ai/docs/xgrammar_features/structural_tag.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jpaged.chat import Tool, ToolChoice, ToolChoiceMode
from jpaged.service.chat.parsers.formats import ReasoningFormat, ToolFormat

_ANY_OBJECT = {"type": "object"}
_NEWLINES = {"type": "regex", "pattern": r"[\r\n]*"}


def structural_tag_for(
    tools: Sequence[Tool],
    choice: ToolChoice,
    tool_format: ToolFormat,
    *,
    is_parallel: bool = True,
    reasoning: ReasoningFormat | None = None,
    is_open: bool = False,
) -> dict[str, Any] | None:
    """Return what an answer is held to, None where it is free.

    A free choice holds an answer to nothing, but for tools that are strict, and where one call must be the only one:
    what is called then is one of the tools, and the arguments of those that are strict are as their schemas say.

    Args:
        choice: as `tool_choice_of` reads it.
        is_parallel: several calls may be made; of a named function there is one call.
        reasoning: how the model writes what it thinks first; None where it does not.
        is_open: the answer begins within its reasoning.
    """
    if choice.mode is ToolChoiceMode.NONE:
        return None
    is_forced = choice.mode is not ToolChoiceMode.AUTO
    if not is_forced and is_parallel and not any(tool.is_strict for tool in tools):
        return None
    is_named = choice.mode is ToolChoiceMode.NAMED
    callable_tools = [tool for tool in tools if not is_named or tool.name == choice.name]
    calls = {
        "type": "triggered_tags",
        "triggers": list(tool_format.triggers),
        "tags": [
            _tag(
                begin.replace("NAME", tool.name),
                {
                    "type": "json_schema",
                    "json_schema": dict(tool.parameters) if is_forced or tool.is_strict else dict(_ANY_OBJECT),
                },
                tool_format.end,
            )
            for tool in callable_tools
            for begin in tool_format.begins
        ],
        "at_least_one": is_forced,
        "stop_after_first": is_named or not is_parallel,
    }
    thought = _thought(reasoning, is_open=is_open)
    whole = calls if not thought else {"type": "sequence", "elements": [*thought, calls]}
    return {"type": "structural_tag", "format": whole}


def _thought(reasoning: ReasoningFormat | None, *, is_open: bool) -> list[dict[str, Any]]:
    """The reasoning and the line ends behind it, as formats."""
    if reasoning is None:
        return []
    begin = "" if is_open else reasoning.open_tag
    tag = _tag(begin, {"type": "any_text"}, reasoning.close_tag)
    whole = {"type": "sequence", "elements": [tag, _NEWLINES]}
    return [tag, _NEWLINES] if is_open else [{"type": "optional", "content": whole}]


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
