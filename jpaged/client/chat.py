"""Chats: values -> messages, and the non-text parts of answers. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jpaged import json_text
from jpaged._proto.v1 import inference_pb2
from jpaged.chat import MESSAGE_TEXTS, ChatOptions, Tool, ToolCallPiece, ToolChoice, ToolChoiceMode, read_message
from jpaged.types import Prompt, require_whole_characters

_MODES = {
    ToolChoiceMode.NONE: inference_pb2.TOOL_CHOICE_MODE_NONE,
    ToolChoiceMode.AUTO: inference_pb2.TOOL_CHOICE_MODE_AUTO,
    ToolChoiceMode.REQUIRED: inference_pb2.TOOL_CHOICE_MODE_REQUIRED,
    ToolChoiceMode.NAMED: inference_pb2.TOOL_CHOICE_MODE_NAMED,
}


def chat_message(prompt: Prompt) -> inference_pb2.ChatPrompt:
    """Convert a conversation and its options to a message.

    Raises:
        InvalidArgument: it has values that the message cannot hold; names the field, as in
            `messages[1].tool_calls[0].id`.
    """
    options = prompt.chat_options
    kwargs = options.template_kwargs
    return inference_pb2.ChatPrompt(
        messages=[_turn(f"messages[{i}]", message) for i, message in enumerate(prompt.messages or ())],
        tools=[_tool_message(tool) for tool in options.tools],
        tool_choice=None if options.tool_choice is None else _choice_message(options.tool_choice),
        parallel_tool_calls=options.parallel_tool_calls,
        chat_template_kwargs=json_text.dumps(dict(kwargs), ensure_ascii=False) if kwargs else "",
        reasoning=_reasoning_message(options),
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        documents=[json_text.dumps(dict(one), ensure_ascii=False) for one in options.documents],
        chat_template=options.chat_template or "",
    )


def piece_of(delta: inference_pb2.ToolCallDelta) -> ToolCallPiece:
    """Convert a part of a call to a value."""
    return ToolCallPiece(
        delta.index,
        delta.arguments,
        delta.id if delta.HasField("id") else None,
        delta.name if delta.HasField("name") else None,
    )


def _turn(where: str, message: Mapping[str, Any]) -> inference_pb2.ChatMessage:
    read = read_message(where, message)
    texts = {name: _whole(f"{where}.{name}", read[name]) for name in MESSAGE_TEXTS if read.get(name) is not None}
    calls = [_call_message(f"{where}.tool_calls[{j}]", call) for j, call in enumerate(read.get("tool_calls", ()))]
    return inference_pb2.ChatMessage(**texts, tool_calls=calls)


def _call_message(where: str, call: Mapping[str, Any]) -> inference_pb2.ToolCall:
    call_id = call.get("id")
    return inference_pb2.ToolCall(id=None if call_id is None else _whole(f"{where}.id", call_id), **call["function"])


def _whole(where: str, text: str) -> str:
    require_whole_characters(where, text)
    return text


def _tool_message(tool: Tool) -> inference_pb2.Tool:
    parameters = json_text.dumps(dict(tool.parameters), ensure_ascii=False)
    return inference_pb2.Tool(
        name=tool.name, description=tool.description, parameters=parameters, strict=tool.is_strict
    )


def _choice_message(choice: ToolChoice) -> inference_pb2.ToolChoice:
    return inference_pb2.ToolChoice(mode=_MODES[choice.mode], name=choice.name or "")


def _reasoning_message(options: ChatOptions) -> inference_pb2.ReasoningOptions:
    reasoning = options.reasoning
    return inference_pb2.ReasoningOptions(
        effort=reasoning.effort,
        enabled=reasoning.enabled,
        thinking_token_budget=reasoning.thinking_token_budget,
        include=reasoning.include,
    )
