"""A conversation as a caller sends it: checked, and as chat templates expect it.

    {"role": "assistant", "content": ..., "reasoning_content": ..., "tool_calls": [
        {"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}]}
    {"role": "tool", "tool_call_id": ..., "content": ...}

Templates differ in what they take of a turn that calls tools and says nothing: most take arguments as an object and a
content of None; DeepSeek's adds arguments to text, gpt-oss's looks for tags in the content. `forms` has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jpaged import json_text
from jpaged.chat import MAX_CALL_ID_CHARS, MAX_TOOL_CALLS, ChatOptions, is_tool_name, json_object
from jpaged.errors import InvalidArgument

_FIELD = "chat.messages"
_KEYS = ("role", "content", "name")
_ROLE_OF = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
"""Keys that messages of one role alone may have."""
_MAX_SHOWN = 80


@runtime_checkable
class LaysOutTools(Protocol):
    """A tokenizer whose chat template may take tools and variables."""

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, *, max_bytes: int) -> list[int]:
        """Ids of a conversation, as `Tokenizer.apply_chat_template`.

        Raises:
            Unsupported: besides, the template takes no notice of tools.
        """
        ...


def text_bytes(field: str, text: str) -> int:
    """Return how many bytes a text has.

    Raises:
        InvalidArgument: it is none of whole characters.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        at = error.start
        raise InvalidArgument(field, f"{text[at]!r} at {at} is half of a surrogate pair: no character") from error


def messages_bytes(messages: Sequence[Mapping[str, Any]]) -> int:
    """Check everything but what is written in arguments, and return how many bytes all texts have.

    Raises:
        InvalidArgument: names what is missing, too long or of no use, as in `chat.messages[1].tool_calls[0].id`.
    """
    return sum(_message_bytes(f"{_FIELD}[{i}]", message) for i, message in enumerate(messages))


def _message_bytes(where: str, message: Mapping[str, Any]) -> int:
    for key, value in message.items():
        if key not in _KEYS and key not in _ROLE_OF:
            known = ", ".join((*_KEYS, *_ROLE_OF))
            raise InvalidArgument(f"{where}.{str(key)[:_MAX_SHOWN]}", f"is not supported; {known} are")
        if value is not None and message.get("role") != _ROLE_OF.get(key, message.get("role")):
            raise InvalidArgument(f"{where}.{key}", f"only messages of the role {_ROLE_OF[key]!r} have it")
    calls = message.get("tool_calls")
    may_be_empty = bool(calls) or message.get("role") == "tool"
    num_bytes = _text(where, message, "role") + _text(where, message, "content", is_optional=may_be_empty)
    num_bytes += _text(where, message, "reasoning_content", is_optional=True)
    num_bytes += _short(where, message, "name") + _short(where, message, "tool_call_id")
    return num_bytes if calls is None else num_bytes + _calls_bytes(f"{where}.tool_calls", calls)


def _text(where: str, values: Mapping[str, Any], key: str, *, is_optional: bool = False) -> int:
    value = values.get(key)
    if is_optional and value is None:
        return 0
    if not isinstance(value, str) or not (value or is_optional):
        is_absent = value is None or value == ""
        raise InvalidArgument(f"{where}.{key}", "is missing or empty" if is_absent else "is not a string")
    return text_bytes(f"{where}.{key}", value)


def _short(where: str, values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if value is None:
        return 0
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CALL_ID_CHARS:
        raise InvalidArgument(f"{where}.{key}", f"must be a string of 1 to {MAX_CALL_ID_CHARS} characters")
    return text_bytes(f"{where}.{key}", value)


def _calls_bytes(where: str, calls: Any) -> int:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidArgument(where, "must be a list of calls")
    if len(calls) > MAX_TOOL_CALLS:
        raise InvalidArgument(where, f"{len(calls)} calls; at most {MAX_TOOL_CALLS}")
    num_bytes = 0
    for j, call in enumerate(calls):
        path = f"{where}[{j}]"
        _check_keys(path, call, {"id", "type", "function"})
        if call.get("type", "function") != "function":
            raise InvalidArgument(f"{path}.type", f"{str(call['type'])[:_MAX_SHOWN]!r} is not 'function'")
        num_bytes += _short(path, call, "id")
        function = call.get("function")
        _check_keys(f"{path}.function", function, {"name", "arguments"})
        if not is_tool_name(function.get("name")):
            raise InvalidArgument(
                f"{path}.function.name", f"{str(function.get('name'))[:_MAX_SHOWN]!r} is no tool's name"
            )
        num_bytes += len(function["name"]) + _text(f"{path}.function", function, "arguments", is_optional=True)
    return num_bytes


def _check_keys(path: str, value: Any, known: set[str]) -> None:
    if not isinstance(value, Mapping):
        raise InvalidArgument(path, "is missing" if value is None else "must be a JSON object")
    for key in value:
        if key not in known:
            raise InvalidArgument(
                f"{path}.{str(key)[:_MAX_SHOWN]}", f"is not supported; {', '.join(sorted(known))} are"
            )


def for_template(messages: Sequence[Mapping[str, Any]], *, max_bytes: int) -> list[dict[str, Any]]:
    """Messages that `messages_bytes` has checked, as the first of `forms`: arguments read, nothing that is None.

    Raises:
        InvalidArgument: arguments that are no JSON object, as in `chat.messages[1].tool_calls[0].function.arguments`.
    """
    return [_plain(f"{_FIELD}[{i}]", message, max_bytes) for i, message in enumerate(messages)]


def _plain(where: str, message: Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    if message.get("tool_calls"):
        calls = enumerate(message["tool_calls"])
        plain["content"] = message.get("content") or None
        plain["tool_calls"] = [_plain_call(f"{where}.tool_calls[{j}]", call, max_bytes) for j, call in calls]
    elif message.get("role") == "tool":
        plain["content"] = message.get("content") or ""
    return plain


def _plain_call(where: str, call: Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    text = call["function"].get("arguments") or "{}"
    arguments = json_object(f"{where}.function.arguments", text, max_bytes=max_bytes)
    plain = {"type": "function", "function": {"name": call["function"]["name"], "arguments": arguments}}
    return plain if call.get("id") is None else {"id": call["id"], **plain}


_TOOLS_HEAD = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_TAIL = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""The prompt of Hermes and Qwen, whose calls `HermesParser` reads."""


def with_built_in_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, is_system: bool = True
) -> list[Mapping[str, Any]]:
    """Return a conversation with tools, calls and results as text, for templates that have none of them.

    Args:
        messages: as `for_template` returns them.
        tools: as `Tool.as_json` has them; none changes calls and results alone.
        is_system: describe the tools in the system's message; else in the user's first.
    """
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json_text.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt, role = f"{_TOOLS_HEAD}{lines}{_TOOLS_TAIL}", "system" if is_system else "user"
    place = next((i for i, message in enumerate(plain) if message.get("role") == role), None)
    if place is None or (is_system and place > 0):
        return [{"role": role, "content": prompt}, *plain]
    content = plain[place].get("content") or ""
    parts = (content, prompt) if is_system else (prompt, content)
    plain[place] = {**plain[place], "content": "\n\n".join(part for part in parts if part)}
    return plain


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = {name: call["function"][name] for name in ("name", "arguments")}
        calls.append(f"<tool_call>\n{json_text.dumps(function, ensure_ascii=False)}\n</tool_call>")
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join([*filter(None, [message.get("content")]), *calls])}


def forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """A conversation in the forms that templates take, the likeliest first; one alone where no tool is called."""
    yield list(messages)
    if not any(message.get("tool_calls") for message in messages):
        return
    for has_text_arguments, empty in ((False, ""), (True, None), (True, "")):
        yield [_form(message, empty, has_text_arguments=has_text_arguments) for message in messages]


def _form(message: Mapping[str, Any], empty: str | None, *, has_text_arguments: bool) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = message["tool_calls"]
    if has_text_arguments:
        calls = [{**call, "function": _with_text(call["function"])} for call in calls]
    return {**message, "content": message.get("content") or empty, "tool_calls": calls}


def _with_text(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json_text.dumps(function["arguments"], ensure_ascii=False)}
