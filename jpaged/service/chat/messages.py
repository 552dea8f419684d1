"""A conversation as a caller sends it: checked, and as chat templates expect it.

    {"role": "assistant", "content": ..., "reasoning_content": ..., "tool_calls": [
        {"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}]}
    {"role": "tool", "tool_call_id": ..., "content": ...}

Templates differ in how they expect a turn with calls and no content. Most expect arguments as an object and a content
of None; DeepSeek's adds arguments to text; gpt-oss's looks for tags in the content. `forms` yields all variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jpaged import json_text
from jpaged.chat import MAX_CALL_ID_CHARS, ChatOptions, json_object, read_message
from jpaged.errors import InvalidArgument

_FIELD = "chat.messages"
_ROLE_OF = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
"""Keys that only messages of one role may have."""
_SHORT = ("name", "tool_call_id")


@runtime_checkable
class LaysOutTools(Protocol):
    """A tokenizer whose chat template may take tools and variables."""

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, *, max_bytes: int) -> list[int]:
        """Return the token ids of a conversation, as `Tokenizer.apply_chat_template`.

        Raises:
            Unsupported: also if the template ignores tools.
        """
        ...


def text_bytes(field: str, text: str) -> int:
    """Return the size of a text in UTF-8 bytes.

    Raises:
        InvalidArgument: the text contains an unpaired surrogate.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        at = error.start
        raise InvalidArgument(field, f"{text[at]!r} at {at} is half of a surrogate pair") from error


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return each message as `read_message` parses it.

    Raises:
        InvalidArgument: names the field, as in `chat.messages[1].tool_calls[0].id`.
    """
    return [read_message(f"{_FIELD}[{i}]", message) for i, message in enumerate(messages)]


def messages_bytes(messages: Sequence[Mapping[str, Any]]) -> int:
    """Check the texts of parsed messages and return their total size in bytes.

    Raises:
        InvalidArgument: names the invalid field, as in `chat.messages[1].tool_calls[0].id`.
    """
    return sum(_message_bytes(f"{_FIELD}[{i}]", message) for i, message in enumerate(messages))


def _message_bytes(where: str, message: Mapping[str, Any]) -> int:
    num_bytes = 0
    for key, value in message.items():
        if message["role"] != _ROLE_OF.get(key, message["role"]):
            raise InvalidArgument(f"{where}.{key}", f"is only allowed in messages of the role {_ROLE_OF[key]!r}")
        if key == "tool_calls":
            num_bytes += sum(_call_bytes(f"{where}.tool_calls[{j}]", call) for j, call in enumerate(value))
        elif value is not None:
            num_bytes += (_short if key in _SHORT else text_bytes)(f"{where}.{key}", value)
    return num_bytes


def _short(where: str, text: str) -> int:
    if len(text) > MAX_CALL_ID_CHARS:
        raise InvalidArgument(where, f"has {len(text)} characters; at most {MAX_CALL_ID_CHARS}")
    return text_bytes(where, text)


def _call_bytes(where: str, call: Mapping[str, Any]) -> int:
    num_bytes = _short(f"{where}.id", call["id"]) if "id" in call else 0
    return num_bytes + sum(text_bytes(f"{where}.function.{key}", text) for key, text in call["function"].items())


def for_template(messages: Sequence[Mapping[str, Any]], *, max_bytes: int) -> list[dict[str, Any]]:
    """Return parsed messages in the first of the `forms`: arguments are objects, or texts if they hold no object."""
    return [_plain(message, max_bytes) for message in messages]


def _plain(message: Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return dict(message)
    return {**message, "tool_calls": [_plain_call(call, max_bytes) for call in message["tool_calls"]]}


def _plain_call(call: Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"] or "{}", max_bytes)}}


def _arguments(text: str, max_bytes: int) -> Any:
    """Return the object that the arguments encode, or the text itself if they encode none that a template can print."""
    try:
        return json_object("arguments", text, max_bytes=max_bytes)
    except InvalidArgument:
        return text


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
    """Return a conversation with tools, calls and results written as text, for templates without tool support.

    Args:
        messages: as `for_template` returns them.
        tools: as `Tool.as_json` returns them; if empty, rewrite only calls and results.
        is_system: describe the tools in the system message; otherwise in the first user message.
    """
    plain = [_with_text_calls(message) for message in messages]
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


def _with_text_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
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
    """Yield a conversation in the forms that templates accept, the most common first; only one if it has no calls.

    The last form is for templates that accept only objects: a text that encodes none becomes an object's one value.
    """
    yield list(messages)
    if not any(message.get("tool_calls") for message in messages):
        return
    for reads, empty in (
        (_same, ""),
        (_same, None),
        (_as_text, None),
        (_as_text, ""),
        (_as_object, None),
        (_as_object, ""),
    ):
        yield [_form(message, reads, empty) for message in messages]


def _form(message: Mapping[str, Any], reads: Callable[[Any], Any], empty: str | None) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": reads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message.get("content") or empty, "tool_calls": calls}


def _same(arguments: Any) -> Any:
    return arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json_text.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments
