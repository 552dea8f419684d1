"""Tools of a chat as functions, and the calls of other tools than functions in the caller's form. No I/O.

tools: [{"type": "custom", "custom": {...}}]    functions with one argument, a text
functions, function_call                        tools and tool_choice, in OpenAI's first form of calls
{"role": "function", "name", "content"}         the answer to the preceding call in that form
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jpaged import json_text
from jpaged.chat import ToolCall, parse_tool_choice, parse_tools, without_surrogates
from jpaged.errors import InvalidArgument

CUSTOM_INPUT = "input"
"""Name of the only argument of a custom tool's function."""
_CUSTOM_FIELDS = frozenset({"name", "description", "format"})
TOOL_FIELDS = ("type", "function")
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
UNREAD_TOOL_FIELDS = frozenset({"cache_control"})
"""Fields of tools, and of their functions, without an effect."""
_FUNCTIONS, _FUNCTION_CALL = "functions", "function_call"
_MAX_SHOWN = 80


@dataclass(slots=True)
class CallForm:
    """The form in which a caller expects calls, if it is not `tool_calls` of functions.

    Attributes:
        custom: names of the functions that stand for custom tools.
        fields: fields of the converted body -> the caller's, such as `tools[0].function` -> `tools[0].custom`.
        is_single: the first call is `function_call`, and there are no others.
    """

    custom: frozenset[str] = frozenset()
    fields: Mapping[str, str] = field(default_factory=dict)
    is_single: bool = False

    def add_calls(self, message: dict[str, Any], calls: Sequence[ToolCall]) -> None:
        """Add the calls of an answer to its message."""
        if self.is_single:
            message[_FUNCTION_CALL] = {"name": calls[0].name, "arguments": calls[0].arguments}
        else:
            message["tool_calls"] = [self._show(call) for call in calls]

    def _show(self, call: ToolCall) -> dict[str, Any]:
        if call.name not in self.custom:
            return call.as_json()
        custom = {"name": call.name, "input": custom_input(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": custom}

    def rename(self, error: InvalidArgument) -> InvalidArgument:
        """Return an error about tools with the caller's name of the field."""
        name = error.field
        if self.is_single:
            name = re.sub(r"^tools\[(\d+)\](\.function)?", rf"{_FUNCTIONS}[\1]", name)
            name = re.sub(r"^tool_choice(\.function)?", _FUNCTION_CALL, name)
        ours = next((one for one in self.fields if f"{name}.".startswith(f"{one}.")), None)
        if ours is not None:
            name = f"{self.fields[ours]}{name.removeprefix(ours)}"
        return type(error)(name, error.problem)

    def get_finish_reason(self, reason: str | None) -> str | None:
        """Return a reason in the caller's words."""
        return _FUNCTION_CALL if self.is_single and reason == "tool_calls" else reason


@dataclass(slots=True)
class CallStream:
    """The calls of one answer, piece by piece; the input of a custom tool is one piece, because its JSON must be whole.

    Attributes:
        form: that of the calls.
    """

    form: CallForm
    _held: dict[int, list[str]] = field(default_factory=dict)

    def add(self, calls: Sequence[dict[str, Any]], *, is_end: bool) -> dict[str, Any]:
        """Return the fields of a delta.

        Args:
            calls: the next characters of each call, in the form of `tool_calls`.
            is_end: none follow.
        """
        if self.form.is_single:
            first = next((call["function"] for call in calls if call["index"] == 0), None)
            return {} if first is None else {_FUNCTION_CALL: first}
        pieces: list[dict[str, Any]] = []
        for call in calls:
            number, function = call["index"], call["function"]
            if function.get("name") in self.form.custom:
                pieces += self._release()
                self._held[number] = []
                custom = {"name": function["name"], "input": ""}
                pieces.append({"index": number, "id": call["id"], "type": "custom", "custom": custom})
            if number in self._held:
                self._held[number].append(function["arguments"])
            else:
                pieces += self._release()
                pieces.append(call)
        if is_end:
            pieces += self._release()
        return {"tool_calls": pieces} if pieces else {}

    def _release(self) -> Iterator[dict[str, Any]]:
        for number, texts in sorted(self._held.items()):
            yield {"index": number, "custom": {"input": custom_input("".join(texts))}}
        self._held.clear()


def tools_in(body: Mapping[str, Any], ignore: Callable[[str], None] | None) -> tuple[Any, Any]:
    """Return the tools and the tool choice, which may name a part of the tools.

    Args:
        ignore: notes an unknown field; None: they are errors.

    Raises:
        InvalidArgument: names the field, as in `tools[2].function.name`.
    """
    tools, choice = body.get("tools"), body.get("tool_choice")
    if isinstance(tools, list):
        tools = [_without_unread("tools", one, TOOL_FIELDS, ignore) for one in tools]
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tools, choice
    where, allowed = "tool_choice.allowed_tools", choice.get("allowed_tools")
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(allowed, Mapping) or not isinstance(listed, list) or not listed:
        raise InvalidArgument(where, "must be an object of a mode and a list of at least one tool")
    if allowed.get("mode") not in ("auto", "required"):
        raise InvalidArgument(f"{where}.mode", f"{str(allowed.get('mode'))[:_MAX_SHOWN]!r} is not 'auto' or 'required'")
    parsed, names = parse_tools(tools), set[str | None]()
    for i, one in enumerate(listed):
        if not isinstance(one, Mapping):
            raise InvalidArgument(f"{where}.tools[{i}]", "must be an object")
        names.add(parse_tool_choice(one, parsed, path=f"{where}.tools[{i}]").name)
    return [tool for tool in parsed if tool.name in names], allowed["mode"]


def _without_unread(where: str, tool: Any, known: tuple[str, ...], ignore: Callable[[str], None] | None) -> Any:
    """Return a tool without fields that have no effect, and without unknown ones if `ignore` notes them."""
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        return tool
    kept = {name: one for name, one in tool.items() if name in known}
    for name, one in tool.items():
        if name in known or name in UNREAD_TOOL_FIELDS:
            continue
        if ignore is None:
            kept[name] = one  # an error where the tool is read
        elif one is not None:
            ignore(f"{where}.{name}")
    if isinstance(function := kept.get("function"), Mapping):
        kept["function"] = _without_unread(f"{where}.function", {**function}, FUNCTION_FIELDS, ignore)
    return kept


def convert_tools(body: dict[str, Any]) -> CallForm | None:
    """Replace custom tools, older functions and the calls of both in a body by functions of `tools`.

    Returns:
        the form of the answer's calls; None if there were no such tools.

    Raises:
        InvalidArgument: one is malformed, or both forms are given; names the field.
    """
    is_single = _FUNCTIONS in body or _FUNCTION_CALL in body
    if is_single:
        _convert_functions(body)
    names, fields = set[str](), dict[str, str]()
    if isinstance(tools := body.get("tools"), list):
        body["tools"] = [_convert_tool(f"tools[{i}]", tool, names, fields) for i, tool in enumerate(tools)]
    if isinstance(choice := body.get("tool_choice"), Mapping):
        body["tool_choice"] = _convert_choice("tool_choice", choice, fields)
    if isinstance(messages := body.get("messages"), list):
        body["messages"] = [_convert_message(f"messages[{i}]", messages, i, fields) for i in range(len(messages))]
    return CallForm(frozenset(names), fields, is_single) if fields or is_single else None


def is_other_form(message: Any) -> bool:
    """Return True if a message has calls in another form than functions of `tool_calls`, or answers such a call."""
    if not isinstance(message, dict):
        return False
    calls = message.get("tool_calls")
    return (
        bool(message.get(_FUNCTION_CALL))
        or message.get("role") == "function"
        or (isinstance(calls, list) and any(_is_custom(call) for call in calls))
    )


def _convert_functions(body: dict[str, Any]) -> None:
    functions, chosen = body.pop(_FUNCTIONS, []), body.pop(_FUNCTION_CALL, None)
    if not isinstance(functions, list):
        raise InvalidArgument(_FUNCTIONS, "must be a list of functions")
    for ours, theirs in (("tools", _FUNCTIONS), ("tool_choice", _FUNCTION_CALL)):
        if body.get(ours):
            raise InvalidArgument(theirs, f"conflicts with {ours}: give only tools and tool_choice")
    if isinstance(chosen, Mapping):
        if chosen.keys() != {"name"}:
            raise InvalidArgument(_FUNCTION_CALL, "must be 'none', 'auto', or an object with a name")
        chosen = {"type": "function", "function": chosen}
    elif chosen not in (None, "none", "auto"):
        raise InvalidArgument(
            _FUNCTION_CALL, f"{str(chosen)[:_MAX_SHOWN]!r} is not 'none', 'auto', or an object with a name"
        )
    if functions:
        body["tools"] = [{"type": "function", "function": one} for one in functions]
        body["parallel_tool_calls"] = False
    if chosen is not None and (functions or chosen != "auto"):
        body["tool_choice"] = chosen


def _is_custom(given: Any) -> bool:
    return isinstance(given, Mapping) and given.get("type") == "custom"


def _convert_tool(where: str, tool: Any, names: set[str], fields: dict[str, str]) -> Any:
    if not _is_custom(tool):
        return tool
    fields[f"{where}.function"] = f"{where}.custom"
    custom = tool.get("custom")
    if not isinstance(custom, Mapping):
        raise InvalidArgument(f"{where}.custom", "must be an object with a name")
    unknown = next((name for name in custom if name not in _CUSTOM_FIELDS and custom[name] is not None), None)
    if unknown is not None:
        problem = f"is not supported: must be one of {', '.join(sorted(_CUSTOM_FIELDS))}"
        raise InvalidArgument(f"{where}.custom.{str(unknown)[:_MAX_SHOWN]}", problem)
    syntax = custom.get("format") or {}
    kind = syntax.get("type", "text") if isinstance(syntax, Mapping) else syntax
    if kind != "text":
        problem = f"{str(kind)[:_MAX_SHOWN]!r} is not supported, only 'text': inputs are not constrained"
        raise InvalidArgument(f"{where}.custom.format.type", problem)
    if isinstance(custom.get("name"), str):
        names.add(custom["name"])
    rest = {name: one for name, one in tool.items() if name != "custom"}
    return {**rest, "type": "function", "function": build_custom_function(custom)}


def build_custom_function(custom: Mapping[str, Any], syntax: str = "") -> dict[str, Any]:
    """Return a custom tool as a function with one argument.

    Args:
        syntax: appended to the description of the argument.
    """
    text = {"type": "string", "description": f"The complete input of the tool, as plain text.{syntax}"}
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return {**{name: custom[name] for name in ("name", "description") if name in custom}, "parameters": parameters}


def custom_input(arguments: str) -> str:
    """Return the text that a custom tool was called with; arguments of another form are the text themselves."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return without_surrogates(text) if isinstance(text, str) else arguments


def _convert_choice(where: str, choice: Mapping[str, Any], fields: dict[str, str]) -> Mapping[str, Any]:
    if _is_custom(choice):
        fields[f"{where}.function"] = f"{where}.custom"
        rest = {name: one for name, one in choice.items() if name != "custom"}
        return {**rest, "type": "function", "function": choice.get("custom")}
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, Mapping) or not isinstance(listed := allowed.get("tools"), list):
        return choice
    inner = f"{where}.allowed_tools.tools"
    tools = [
        _convert_choice(f"{inner}[{i}]", one, fields) if isinstance(one, Mapping) else one
        for i, one in enumerate(listed)
    ]
    return {**choice, "allowed_tools": {**allowed, "tools": tools}}


def _convert_message(where: str, messages: Sequence[Any], number: int, fields: dict[str, str]) -> Any:
    """Return a message whose calls are functions; a call of the older form is named after its message's number."""
    message = messages[number]
    if not is_other_form(message):
        return message
    if message.get("role") == "function":
        called = next((i for i in range(number - 1, -1, -1) if _is_single_call(messages[i])), None)
        if called is None:
            return message  # the template may know this role
        return {**message, "role": "tool", "tool_call_id": _id_at(called)}
    converted = {name: one for name, one in message.items() if name != _FUNCTION_CALL}
    if message.get(_FUNCTION_CALL):
        if message.get("tool_calls"):
            raise InvalidArgument(f"{where}.{_FUNCTION_CALL}", "conflicts with tool_calls: give only one of them")
        fields[f"{where}.tool_calls[0].function"] = f"{where}.{_FUNCTION_CALL}"
        call = {"id": _id_at(number), "type": "function", "function": message[_FUNCTION_CALL]}
        return {**converted, "tool_calls": [call]}
    calls = [_convert_call(f"{where}.tool_calls[{i}]", call, fields) for i, call in enumerate(message["tool_calls"])]
    return {**converted, "tool_calls": calls}


def _is_single_call(message: Any) -> bool:
    return isinstance(message, Mapping) and bool(message.get(_FUNCTION_CALL))


def _id_at(number: int) -> str:
    return f"call_{number}"


def _convert_call(where: str, call: Any, fields: dict[str, str]) -> Any:
    if not _is_custom(call):
        return call
    fields[f"{where}.function"] = f"{where}.custom"
    custom = call.get("custom")
    if not isinstance(custom, Mapping) or not isinstance(custom.get("input"), str):
        raise InvalidArgument(f"{where}.custom", "must be an object of a name and an input, which is a text")
    function = {
        "name": custom.get("name"),
        "arguments": json_text.dumps({CUSTOM_INPUT: custom["input"]}, ensure_ascii=False),
    }
    rest = {name: one for name, one in call.items() if name not in ("type", "custom")}
    return {**rest, "type": "function", "function": function}
