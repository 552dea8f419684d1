"""Messages of a conversation in the JSON of OpenAI's API: their fields, and that each is of its type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.errors import InvalidArgument

MESSAGE_TEXTS = ("role", "content", "name", "tool_call_id", "reasoning_content")
"""Fields of a message that are texts."""
_MAX_SHOWN = 80


def check_message(where: str, message: Any) -> None:
    """Refuse a message that has other fields than a conversation knows, or values of another type.

    Raises:
        InvalidArgument: names the field, as in `messages[1].tool_calls[0].id`.
    """
    if not isinstance(message, Mapping):
        raise InvalidArgument(where, "must be an object of role and content")
    for name, value in message.items():
        if name == "tool_calls" or value is None:
            continue
        if name not in MESSAGE_TEXTS:
            known = ", ".join((*MESSAGE_TEXTS, "tool_calls"))
            raise InvalidArgument(f"{where}.{str(name)[:_MAX_SHOWN]}", f"is not supported; {known} are")
        _check_text(f"{where}.{name}", value)
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidArgument(f"{where}.tool_calls", "must be a list of calls")
    for j, call in enumerate(calls):
        _check_call(f"{where}.tool_calls[{j}]", call)


def _check_call(where: str, call: Any) -> None:
    _check_names(where, call, {"id", "type", "function"})
    if call.get("type", "function") != "function":
        raise InvalidArgument(f"{where}.type", f"{str(call['type'])[:_MAX_SHOWN]!r} is not 'function'")
    function = call.get("function")
    _check_names(f"{where}.function", function, {"name", "arguments"})
    for name, value in function.items():
        if value is not None:
            _check_text(f"{where}.function.{name}", value)
    if call.get("id") is not None:
        _check_text(f"{where}.id", call["id"])


def _check_names(where: str, value: Any, known: set[str]) -> None:
    if not isinstance(value, Mapping):
        raise InvalidArgument(where, "is missing" if value is None else "must be an object")
    for name in value:
        if name not in known:
            raise InvalidArgument(
                f"{where}.{str(name)[:_MAX_SHOWN]}", f"is not supported; {', '.join(sorted(known))} are"
            )


def _check_text(where: str, value: Any) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(where, f"{str(value)[:_MAX_SHOWN]} is not a string")
