"""Items of an input -> messages of a chat. Output items of earlier responses are accepted unchanged.

{"role", "content"}                         a message; content is a text or text parts
{"type": "reasoning", "content"}            reasoning before the assistant's next turn; a summary and
                                            encrypted_content are ignored
{"type": "function_call", "call_id", ...}   a call, in the preceding turn of the assistant
{"type": "function_call_output", ...}       the call's result
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jpaged.chat import without_surrogates
from jpaged.errors import InvalidArgument

_MAX_SHOWN = 80
_ECHOED = frozenset({"id", "status", "phase"})
"""Fields of output items that identify them and give their status; ignored."""
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_PART_FIELDS = frozenset({"type", "text", "refusal", "annotations", "logprobs", "parsed"})


def messages_of(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Convert an input to the messages of a chat.

    Raises:
        InvalidArgument: names the item, as in `input[2].call_id`.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidArgument("input", "must be a string, or a list of at least one item")
    thought = ""
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise InvalidArgument(where, "must be an object")
        kind = item.get("type") or "message"
        if kind == "reasoning":
            thought += _reasoning(where, item)
        elif kind == "message":
            messages.append(_message(where, item))
        elif kind == "function_call":
            _add_call(messages, _call(where, item))
        elif kind == "function_call_output":
            messages.append(_call_output(where, item))
        elif kind == "item_reference":
            raise InvalidArgument(f"{where}.type", "is not supported, because nothing is stored: send the item itself")
        else:
            known = "message, reasoning, function_call, function_call_output"
            raise InvalidArgument(
                f"{where}.type", f"{str(kind)[:_MAX_SHOWN]!r} is not supported: must be one of {known}"
            )
        if thought and kind != "reasoning":
            _add_thought(messages, thought, before=1)
            thought = ""
    if thought:
        _add_thought(messages, thought, before=0)
    return messages


def _add_thought(messages: list[dict[str, Any]], thought: str, *, before: int) -> None:
    """Add reasoning to the assistant's turn after it; without one (truncated reasoning) it becomes a separate turn.

    Args:
        before: number of messages at the end that came after the reasoning.
    """
    if before and messages[-1]["role"] == "assistant" and "reasoning_content" not in messages[-1]:
        messages[-1]["reasoning_content"] = thought
        return
    turn = {"role": "assistant", "content": "", "reasoning_content": thought}
    messages.insert(len(messages) - before, turn)


def _message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    _check_names(where, item, {"type", "role", "content", "name"})
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidArgument(f"{where}.role", f"{str(role)[:_MAX_SHOWN]!r} is not one of {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": _text(f"{where}.content", item.get("content"), role)}


def _reasoning(where: str, item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item; a summary and `encrypted_content` of other servers are ignored."""
    _check_names(where, item, {"type", "summary", "content", "encrypted_content"})
    texts, content = [], item.get("content") or []
    if not isinstance(content, list):
        raise InvalidArgument(f"{where}.content", "must be a list of parts of type reasoning_text")
    for j, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "reasoning_text" or not isinstance(part.get("text"), str):
            raise InvalidArgument(f"{where}.content[{j}]", "must be a part of type reasoning_text")
        texts.append(part["text"])
    return "".join(texts)


def _call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    _check_names(where, item, {"type", "call_id", "name", "arguments"})
    call_id, name, arguments = (_string(where, item, field) for field in ("call_id", "name", "arguments"))
    function = {"name": without_surrogates(name), "arguments": without_surrogates(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _add_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Add a call to the preceding turn of the assistant."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None, "tool_calls": []})
    messages[-1].setdefault("tool_calls", []).append(call)


def _call_output(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    _check_names(where, item, {"type", "call_id", "output"})
    call_id = _string(where, item, "call_id")
    return {"role": "tool", "tool_call_id": call_id, "content": _text(f"{where}.output", item.get("output"))}


def _text(where: str, given: Any, role: str = "") -> str:
    if isinstance(given, str):
        return given
    if given is None and role == "assistant":
        return ""
    if not isinstance(given, list):
        raise InvalidArgument(where, "must be a string, or a list of text parts")
    texts = []
    for j, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            shown = f"{str(kind)[:_MAX_SHOWN]!r}" if isinstance(part, dict) else "a part that is not an object"
            raise InvalidArgument(f"{where}[{j}]", f"{shown} is not a text part: only text is supported")
        for name in part.keys() - _PART_FIELDS:
            raise InvalidArgument(f"{where}[{j}].{name[:_MAX_SHOWN]}", "is not supported")
        texts.append(text)
    return "".join(texts)


def _string(where: str, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise InvalidArgument(f"{where}.{field}", f"{str(value)[:_MAX_SHOWN]!r} is not a string")
    return value


def _check_names(where: str, item: Mapping[str, Any], known: set[str]) -> None:
    for name, value in item.items():
        if value is not None and name not in known and name not in _ECHOED:
            raise InvalidArgument(
                f"{where}.{name[:_MAX_SHOWN]}", f"is not supported: must be one of {', '.join(sorted(known))}"
            )
