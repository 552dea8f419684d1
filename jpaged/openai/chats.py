"""Fields of chats in OpenAI's format: messages, tools and reasoning of a body, and an answer as a message. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jpaged.chat import ChatOptions, chat_options_of, read_message, reasoning_of
from jpaged.errors import InvalidArgument
from jpaged.types import CompletionOutput

_PLAIN = (
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "chat_template", "documents"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Fields that `chat_options_of` has under the same name."""
CHAT_FIELDS = frozenset(
    {
        *("messages", *_PLAIN),
        *("reasoning", "reasoning_effort", "include_reasoning"),
    }
)
"""Fields of a body that are read here. The last two are OpenAI's and vLLM's words for fields of `reasoning`."""
_OF_REASONING = {"reasoning_effort": "effort", "include_reasoning": "include"}


def messages_in(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the conversation of a body, whose contents are strings or lists of text parts.

    Raises:
        InvalidArgument: names the field, as in `messages[1].content`.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("messages", "must be a list with at least one message")
    return tuple(read_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def chat_options_in(body: Mapping[str, Any]) -> ChatOptions:
    """Return the options of a chat body.

    Raises:
        InvalidArgument: names the field, as in `tools[2].function.name`.
    """
    given: Any = {name: body.get(name) for name in _PLAIN}
    return chat_options_of(**given, reasoning=reasoning_of(_reasoning_in(body)))


def _reasoning_in(body: Mapping[str, Any]) -> Any:
    others = {key: body[name] for name, key in _OF_REASONING.items() if name in body}
    value = body.get("reasoning")
    if not others:
        return value
    if value is not None and not isinstance(value, Mapping):
        raise InvalidArgument("reasoning", "must be a JSON object")
    for name, key in _OF_REASONING.items():
        if name in body and key in (value or {}):
            raise InvalidArgument(name, f"conflicts with reasoning.{key}: give only one of them")
    return {**(value or {}), **others}


def message_of(output: CompletionOutput) -> dict[str, Any]:
    """Return an answer as a message: without content if it only calls tools."""
    message: dict[str, Any] = {"role": "assistant", "content": output.text}
    if output.reasoning_content:
        message["reasoning_content"] = output.reasoning_content
    if output.tool_calls:
        message["content"] = output.text or None
        message["tool_calls"] = [call.as_json() for call in output.tool_calls]
    return message
