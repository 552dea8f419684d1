r"""The structural tag that holds an answer to a family's format of calls: plain data, from which a grammar is built.

    {"type": "structural_tag",
     "triggers": ["<tool_call>"],
     "structures": [
        {"begin": "<tool_call>\n{\"name\": \"f\", \"arguments\": ", "schema": {...}, "end": "}\n</tool_call>"}],
     "at_least_one": true,
     "stop_after_first": false}

Text is free up to a trigger; from there it is one of the structures that begin so. `at_least_one` lets no text stand
before the first, and no answer end before it; `stop_after_first` lets nothing stand behind it. Both are xgrammar's
words for its `triggered_tags`; type, structures and triggers are what vLLM takes as a response's format.
Source: https://xgrammar.mlc.ai/docs/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jpaged.chat import Tool, ToolChoice, ToolChoiceMode
from jpaged.service.chat.parsers.formats import ToolFormat

_ANY_OBJECT = {"type": "object"}


def structural_tag_for(
    tools: Sequence[Tool], choice: ToolChoice, tool_format: ToolFormat, *, is_parallel: bool = True
) -> dict[str, Any] | None:
    """Return what an answer is held to, None where it is free. It begins where reasoning ends.

    A free choice holds an answer to nothing, but for tools that are strict: what is called then is one of the tools,
    and the arguments of those that are strict are as their schemas say.

    Args:
        choice: as `tool_choice_of` reads it.
        is_parallel: several calls may be made; of a named function there is one call.
    """
    if choice.mode is ToolChoiceMode.NONE:
        return None
    is_forced = choice.mode is not ToolChoiceMode.AUTO
    if not is_forced and not any(tool.is_strict for tool in tools):
        return None
    is_named = choice.mode is ToolChoiceMode.NAMED
    callable_tools = [tool for tool in tools if not is_named or tool.name == choice.name]
    return {
        "type": "structural_tag",
        "structures": [
            {
                "begin": begin.replace("NAME", tool.name),
                "schema": dict(tool.parameters) if is_forced or tool.is_strict else dict(_ANY_OBJECT),
                "end": tool_format.end,
            }
            for tool in callable_tools
            for begin in tool_format.begins
        ],
        "triggers": list(tool_format.triggers),
        "at_least_one": is_forced,
        "stop_after_first": is_named or not is_parallel,
    }
