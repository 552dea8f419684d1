"""Chats: proto -> types for requests, and the non-text parts of answers -> proto."""

from __future__ import annotations

from typing import Any

from jpaged._proto.v1 import inference_pb2
from jpaged.chat import (
    MAX_DOCUMENTS,
    MAX_DOCUMENTS_BYTES,
    MAX_TEMPLATE_KWARGS_BYTES,
    MAX_TOOL_BYTES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    ChatOptions,
    ReasoningOptions,
    Tool,
    ToolCallPiece,
    ToolChoice,
    ToolChoiceMode,
    json_object,
)
from jpaged.errors import InvalidArgument
from jpaged.types import MAX_CHAT_MESSAGES

_MODES = {
    inference_pb2.TOOL_CHOICE_MODE_NONE: ToolChoiceMode.NONE,
    inference_pb2.TOOL_CHOICE_MODE_AUTO: ToolChoiceMode.AUTO,
    inference_pb2.TOOL_CHOICE_MODE_REQUIRED: ToolChoiceMode.REQUIRED,
    inference_pb2.TOOL_CHOICE_MODE_NAMED: ToolChoiceMode.NAMED,
}


def messages_from(chat: inference_pb2.ChatPrompt) -> tuple[dict[str, Any], ...]:
    """Convert a conversation to the format of `jpaged.service.chat.template`.

    Raises:
        InvalidArgument: too many messages or calls, before any is copied.
    """
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        raise InvalidArgument("chat.messages", f"{len(chat.messages)} messages; at most {MAX_CHAT_MESSAGES}")
    return tuple(_message_from(i, turn) for i, turn in enumerate(chat.messages))


def _message_from(i: int, turn: inference_pb2.ChatMessage) -> dict[str, Any]:
    if len(turn.tool_calls) > MAX_TOOL_CALLS:
        problem = f"{len(turn.tool_calls)} calls; at most {MAX_TOOL_CALLS}"
        raise InvalidArgument(f"chat.messages[{i}].tool_calls", problem)
    is_null = turn.role == "assistant" and not turn.HasField("content")
    message: dict[str, Any] = {"role": turn.role, "content": None if is_null else turn.content}
    for name in ("tool_call_id", "name", "reasoning_content"):
        if turn.HasField(name):
            message[name] = getattr(turn, name)
    if turn.tool_calls:
        message["tool_calls"] = [_call_from(call) for call in turn.tool_calls]
    return message


def _call_from(call: inference_pb2.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id if call.HasField("id") else None, "type": "function", "function": function}


def chat_options_from(chat: inference_pb2.ChatPrompt) -> ChatOptions:
    """Convert the options of a chat.

    Raises:
        InvalidArgument: names the field, as in `tools[2].function.name`.
    """
    if len(chat.documents) > MAX_DOCUMENTS:
        raise InvalidArgument("documents", f"{len(chat.documents)} documents; at most {MAX_DOCUMENTS}")
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidArgument("tools", f"{len(chat.tools)} tools; at most {MAX_TOOLS}")
    return ChatOptions(
        tools=tuple(_tool_from(f"tools[{i}]", tool) for i, tool in enumerate(chat.tools)),
        template_kwargs=json_object(
            "chat_template_kwargs", chat.chat_template_kwargs, max_bytes=MAX_TEMPLATE_KWARGS_BYTES
        )
        if chat.chat_template_kwargs
        else {},
        tool_choice=_choice_from(chat.tool_choice),
        parallel_tool_calls=chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True,
        reasoning=ReasoningOptions(**{one.name: value for one, value in chat.reasoning.ListFields()}),
        add_generation_prompt=chat.add_generation_prompt
        if chat.HasField("add_generation_prompt")
        else not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
        documents=tuple(
            json_object(f"documents[{i}]", one, max_bytes=MAX_DOCUMENTS_BYTES) for i, one in enumerate(chat.documents)
        ),
        chat_template=chat.chat_template or None,
    )


def _tool_from(path: str, tool: inference_pb2.Tool) -> Tool:
    given: dict[str, Any] = {}
    if tool.parameters:
        where = f"{path}.function.parameters"
        given["parameters"] = json_object(where, tool.parameters, max_bytes=MAX_TOOL_BYTES)
    try:
        return Tool(tool.name, tool.description, is_strict=tool.strict, **given)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}.{error.field}", error.problem) from error


def _choice_from(choice: inference_pb2.ToolChoice) -> ToolChoice | None:
    if choice.mode == inference_pb2.TOOL_CHOICE_MODE_UNSPECIFIED:
        if choice.name:
            raise InvalidArgument("tool_choice.mode", "is missing: a name requires TOOL_CHOICE_MODE_NAMED")
        return None
    if choice.mode not in _MODES:
        raise InvalidArgument("tool_choice.mode", f"{choice.mode} is not a value of ToolChoiceMode")
    return ToolChoice(_MODES[choice.mode], choice.name or None)


def delta_of(piece: ToolCallPiece) -> inference_pb2.ToolCallDelta:
    """Convert a part of a call to a message."""
    return inference_pb2.ToolCallDelta(index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments)
