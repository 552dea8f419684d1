"""Tools and the tool choice of a chat, parsed from OpenAI's JSON."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jpaged.chat.json_bounds import json_bytes
from jpaged.errors import InvalidArgument

MAX_TOOLS = 128
MAX_TOOL_NAME_CHARS = 64
MAX_TOOL_BYTES = 64 << 10
"""Maximum size of a tool's description, and of its parameters, each as JSON."""
MAX_TOOL_CALLS = 128
"""Maximum calls of one message."""
MAX_CALL_ID_CHARS = 256
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_TOOL_NAME_CHARS}}}")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_MAX_SHOWN = 80


def is_tool_name(name: Any) -> bool:
    """Return True if a function may have this name: 1 to 64 of A-Z, a-z, 0-9, underscore and hyphen."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: the JSON schema of the arguments, which are an object.
        is_strict: enforce the schema even if the model is free to call or not.

    Raises:
        InvalidArgument: a value is out of range; the field is named as in `function.name`.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NO_PARAMETERS)
    is_strict: bool = False

    def __post_init__(self) -> None:
        if not is_tool_name(self.name):
            shown = repr(self.name)[:_MAX_SHOWN]
            limit = f"1 to {MAX_TOOL_NAME_CHARS} letters, digits, underscores and hyphens"
            raise InvalidArgument("function.name", f"{shown} is not {limit}")
        if not isinstance(self.description, str):
            raise InvalidArgument("function.description", f"{str(self.description)[:_MAX_SHOWN]} is not a string")
        if not isinstance(self.parameters, Mapping):
            raise InvalidArgument("function.parameters", "must be a JSON schema, an object")
        if not isinstance(self.is_strict, bool):
            raise InvalidArgument("function.strict", f"{self.is_strict!r} is not true or false")
        json_bytes("function.description", self.description, max_bytes=MAX_TOOL_BYTES)
        json_bytes("function.parameters", self.parameters, max_bytes=MAX_TOOL_BYTES)

    def as_json(self) -> dict[str, Any]:
        """Return the tool in the format of OpenAI and chat templates; some templates require a description."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def tools_of(value: Any, *, path: str = "tools") -> tuple[Tool, ...]:
    """Parse the `tools` of a request, each as JSON or a `Tool`; None gives none.

    Raises:
        InvalidArgument: names the field, as in `tools[2].function.name`.
    """
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidArgument(path, "must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise InvalidArgument(path, f"{len(value)} tools; at most {MAX_TOOLS}")
    tools = tuple(_tool_of(f"{path}[{i}]", one) for i, one in enumerate(value))
    check_unique(tools, path)
    return tools


def check_unique(tools: Sequence[Tool], path: str) -> None:
    """Raise InvalidArgument if two tools have the same name."""
    first: dict[str, int] = {}
    for i, tool in enumerate(tools):
        if first.setdefault(tool.name, i) != i:
            raise InvalidArgument(
                f"{path}[{i}].function.name", f"{tool.name!r} is that of {path}[{first[tool.name]}] too"
            )


def _tool_of(path: str, value: Any) -> Tool:
    if isinstance(value, Tool):
        return value
    function = _fields(path, value, {"type", "function"}).get("function")
    if value.get("type", "function") != "function":
        raise InvalidArgument(f"{path}.type", f"{value['type']!r} is not supported: only 'function' is")
    given = _fields(f"{path}.function", function, {"name", "description", "parameters", "strict"})
    names = {"name": "name", "description": "description", "parameters": "parameters", "strict": "is_strict"}
    values = {names[key]: one for key, one in given.items() if one is not None}
    try:
        return Tool(**{"name": None, **values})
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}.{error.field}", error.problem) from error


def _fields(path: str, value: Any, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgument(path, "is missing" if value is None else "must be a JSON object")
    for name in value:
        if name not in known:
            raise InvalidArgument(
                f"{path}.{str(name)[:_MAX_SHOWN]}", f"is not supported; {', '.join(sorted(known))} are"
            )
    return value


class ToolChoiceMode(enum.Enum):
    """Tool choice mode."""

    NONE = "none"
    """The model calls no tool."""
    AUTO = "auto"
    """The model decides."""
    REQUIRED = "required"
    """The model calls at least one tool."""
    NAMED = "named"
    """The model calls the named tool."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tool choice. `name` is set only with `NAMED`."""

    mode: ToolChoiceMode
    name: str | None = None


def tool_choice_of(value: Any, tools: Sequence[Tool], *, path: str = "tool_choice") -> ToolChoice:
    """Parse the `tool_choice` of a request; None is "auto" with tools, and "none" without.

    Raises:
        InvalidArgument: it is invalid, or requires a call of a missing tool.
    """
    if value is None:
        return ToolChoice(ToolChoiceMode.AUTO if tools else ToolChoiceMode.NONE)
    if value in ("none", "auto", "required"):
        if value == "required" and not tools:
            raise InvalidArgument(path, "'required' needs tools")
        return ToolChoice(ToolChoiceMode(value) if tools else ToolChoiceMode.NONE)
    if isinstance(value, str):
        raise InvalidArgument(path, f"{value[:_MAX_SHOWN]!r} is not 'none', 'auto', 'required' or a function")
    given = _fields(path, value, {"type", "function"})
    if given.get("type") != "function":
        raise InvalidArgument(f"{path}.type", f"{str(given.get('type'))[:_MAX_SHOWN]!r} is not 'function'")
    name = _fields(f"{path}.function", given.get("function"), {"name"}).get("name")
    if not any(tool.name == name for tool in tools):
        raise InvalidArgument(f"{path}.function.name", f"{str(name)[:_MAX_SHOWN]!r} is the name of none of the tools")
    return ToolChoice(ToolChoiceMode.NAMED, name)
