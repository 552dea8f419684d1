"""Messages of a conversation in OpenAI's JSON, including fields of other servers' answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged import json_text
from jpaged.chat.tools import MAX_TOOL_CALLS
from jpaged.errors import InvalidArgument

MESSAGE_TEXTS = ("role", "content", "name", "tool_call_id", "reasoning_content")
"""Text fields of a message."""
_SPEECHLESS = ("assistant", "tool")
"""Roles whose content may be null or absent."""
_NOTES = frozenset(
    {
        *("annotations", "parsed", "cache_control", "provider_specific_fields", "reasoning_details", "thinking_blocks"),
        *("refusal", "reasoning"),
    }
)
"""Fields of other servers' messages; `refusal` and `reasoning` are used if the field they replace is null."""
_NAMED = {
    "audio": "messages are text: send the transcript as content",
    "function_call": "send tool_calls",
    "prefix": "set continue_final_message of the request",
}
"""Fields of other servers' messages that must be null, and what to send instead."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_SHOWN = 80


def read_message(where: str, message: Any) -> dict[str, Any]:
    """Return a message with only the fields of `MESSAGE_TEXTS` and `tool_calls`, and its content as one text.

    Null or empty fields, and other servers' notes, are dropped; `content` of an assistant may be None.

    Raises:
        InvalidArgument: names the field, as in `messages[1].tool_calls[0].id`.
    """
    if not isinstance(message, Mapping):
        raise InvalidArgument(where, "must be an object of role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        is_absent = role is None or role == ""
        raise InvalidArgument(f"{where}.role", "is missing or empty" if is_absent else "is not a string")
    read: dict[str, Any] = {"role": role, "content": _content(where, role, message)}
    for name, value in message.items():
        if value is None or name in read or name in _NOTES or name == "tool_calls":
            continue
        if name not in MESSAGE_TEXTS:
            known = ", ".join((*MESSAGE_TEXTS, "tool_calls"))
            hint = _NAMED.get(name, f"{known} are")
            raise InvalidArgument(f"{where}.{str(name)[:_MAX_SHOWN]}", f"is not supported; {hint}")
        if _text(f"{where}.{name}", value):
            read[name] = value
    thought = message.get("reasoning")
    if role == "assistant" and "reasoning_content" not in read and thought:
        read["reasoning_content"] = _text(f"{where}.reasoning", thought)
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidArgument(f"{where}.tool_calls", "must be a list of calls")
    if len(calls) > MAX_TOOL_CALLS:
        raise InvalidArgument(f"{where}.tool_calls", f"{len(calls)} calls; at most {MAX_TOOL_CALLS}")
    if calls:
        read["tool_calls"] = [_call(f"{where}.tool_calls[{j}]", call) for j, call in enumerate(calls)]
    return read


def _content(where: str, role: str, message: Mapping[str, Any]) -> str | None:
    content, refusal = message.get("content"), message.get("refusal")
    if refusal and (content or role != "assistant"):
        raise InvalidArgument(f"{where}.refusal", "does not go with content, nor with another role than assistant")
    if content is None:
        if refusal:
            return _text(f"{where}.refusal", refusal)
        if role not in _SPEECHLESS:
            raise InvalidArgument(f"{where}.content", "is missing")
        return None if message.get("tool_calls") else ""
    return text_of_parts(f"{where}.content", content)


def text_of_parts(where: str, content: Any) -> str:
    """Return the text of a content, which is a string or a list of text parts.

    Raises:
        InvalidArgument: it is neither; names the field.
    """
    if isinstance(content, list | tuple):
        return "".join(_text_part(where, part) for part in content)
    return _text(where, content)


def _text_part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise InvalidArgument(where, f"{str(part)[:_MAX_SHOWN]} is not a text part; only text is supported")
    return text


def _call(where: str, call: Any) -> dict[str, Any]:
    """Return a call without client additions: the index and `parsed_arguments`. Its arguments become text."""
    _check_names(where, call, {"id", "type", "function", "index"})
    if (call.get("type") or "function") != "function":
        raise InvalidArgument(f"{where}.type", f"{str(call['type'])[:_MAX_SHOWN]!r} is not 'function'")
    function = call.get("function")
    _check_names(f"{where}.function", function, {"name", "arguments", "parsed_arguments"})
    if function.get("name") is None:
        raise InvalidArgument(f"{where}.function.name", "is missing")
    name = _text(f"{where}.function.name", function["name"])
    arguments = _arguments(f"{where}.function.arguments", function.get("arguments"))
    read: dict[str, Any] = {
        "type": "function",
        "function": {"name": without_surrogates(name), "arguments": without_surrogates(arguments)},
    }
    return {"id": _text(f"{where}.id", call["id"]), **read} if call.get("id") else read


def _arguments(where: str, arguments: Any) -> str:
    """Return the arguments of a call as text, which they are, or as the JSON of the object that they are."""
    if not isinstance(arguments, Mapping):
        return _text(where, "" if arguments is None else arguments)
    try:
        return json_text.dumps(dict(arguments), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(where, f"is no JSON object: {error}") from error


def without_surrogates(text: str) -> str:
    """Return a text with unpaired surrogates, which UTF-8 cannot encode, replaced by U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


def _check_names(where: str, value: Any, known: set[str]) -> None:
    if not isinstance(value, Mapping):
        raise InvalidArgument(where, "is missing" if value is None else "must be an object")
    for name, one in value.items():
        if name not in known and one is not None:
            raise InvalidArgument(
                f"{where}.{str(name)[:_MAX_SHOWN]}", f"is not supported; {', '.join(sorted(known))} are"
            )


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(where, f"{str(value)[:_MAX_SHOWN]} is not a string")
    return value
