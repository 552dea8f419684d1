"""Chats in OpenAI's words: messages, tools and reasoning of a body, and an answer as a message. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jpaged.chat import ChatOptions, chat_options_of, check_message, json_object, reasoning_of
from jpaged.errors import InvalidArgument
from jpaged.types import MIN_MAX_CHAT_BYTES, CompletionOutput

CHAT_FIELDS = frozenset(
    {
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
        *("reasoning", "reasoning_effort", "include_reasoning"),
    }
)
"""Fields of a body that are read here. The last two are OpenAI's and vLLM's words for fields of `reasoning`."""
_OF_REASONING = {"reasoning_effort": "effort", "include_reasoning": "include"}


def messages_in(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The conversation of a body, whose contents are texts or lists of text parts.

    Raises:
        InvalidArgument: names the field, as in `messages[1].content`.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("messages", "must be a list with at least one message")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def chat_options_in(body: Mapping[str, Any]) -> ChatOptions:
    """What a body asks for beside its messages.

    Raises:
        InvalidArgument: names the field, as in `tools[2].function.name`.
    """
    names = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
    given = {name: body.get(name) for name in names}
    return chat_options_of(**given, reasoning=reasoning_of(_reasoning_in(body)))


def _reasoning_in(body: Mapping[str, Any]) -> Any:
    others = {field: body[name] for name, field in _OF_REASONING.items() if name in body}
    value = body.get("reasoning")
    if not others:
        return value
    if value is not None and not isinstance(value, Mapping):
        raise InvalidArgument("reasoning", "must be a JSON object")
    for name, field in _OF_REASONING.items():
        if name in body and field in (value or {}):
            raise InvalidArgument(name, f"and reasoning.{field} are one thing: give one of them")
    return {**(value or {}), **others}


def message_of(output: CompletionOutput) -> dict[str, Any]:
    """An answer as a message: without content where it only calls."""
    message: dict[str, Any] = {"role": "assistant", "content": output.text}
    if output.reasoning_content:
        message["reasoning_content"] = output.reasoning_content
    if output.tool_calls:
        message["content"] = output.text or None
        message["tool_calls"] = [call.as_json() for call in output.tool_calls]
    return message


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidArgument(where, "must be an object of role and content")
    given = {name: value for name, value in message.items() if value is not None}
    content = given.get("content")
    if isinstance(content, list):
        given["content"] = "".join(_text_part(f"{where}.content", part) for part in content)
    if isinstance(calls := given.get("tool_calls"), list):
        given["tool_calls"] = [_plain_call(f"{where}.tool_calls[{j}]", j, call) for j, call in enumerate(calls)]
    if "role" not in given or ("content" not in given and not given.get("tool_calls")):
        raise InvalidArgument(where, "must have a role, and content or tool_calls")
    check_message(where, given)
    return given


def _plain_call(where: str, place: int, call: Any) -> Any:
    """A call without what OpenAI's client adds as it puts chunks together, and sends back: its place, arguments read.

    Raises:
        InvalidArgument: that is not as the rest of the call says.
    """
    if not isinstance(call, dict):
        return call
    if "index" in call and (type(call["index"]) is not int or call["index"] != place):
        raise InvalidArgument(f"{where}.index", f"{str(call['index'])[:80]} is not {place}, its place in the list")
    plain, function = {name: value for name, value in call.items() if name != "index"}, call.get("function")
    if isinstance(function, dict) and "parsed_arguments" in function:
        parsed = function["parsed_arguments"]
        if parsed is not None and parsed != _arguments_in(where, function):
            raise InvalidArgument(f"{where}.function.parsed_arguments", "is not what arguments say")
        plain["function"] = {name: value for name, value in function.items() if name != "parsed_arguments"}
    return plain


def _arguments_in(where: str, function: Mapping[str, Any]) -> Any:
    return json_object(f"{where}.function.arguments", str(function.get("arguments")), max_bytes=MIN_MAX_CHAT_BYTES)


def _text_part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidArgument(where, f"{part!r} is not a text part; only text is supported")
    return str(part["text"])
