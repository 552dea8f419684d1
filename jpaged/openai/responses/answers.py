"""Whole responses: items, and the fields around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jpaged.chat import ToolCall
from jpaged.errors import JpagedError, reason_of
from jpaged.json_text import Items
from jpaged.openai.choices import Heading, TokenText, chat_logprobs
from jpaged.types import CompletionOutput, FinishReason, PositionLogprobs, RequestOutput, Usage


def message_item(request_id: str, number: int, text: str, logprobs: Iterable[object], status: str) -> dict[str, Any]:
    """Return the assistant's content as an item."""
    return {
        "id": f"msg_{request_id}_{number}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if status == "in_progress" else [text_part(text, logprobs)],
    }


def text_part(text: str, logprobs: Iterable[object]) -> dict[str, Any]:
    """Return a text as a part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def reasoning_item(request_id: str, number: int, text: str, status: str) -> dict[str, Any]:
    """Return the reasoning as an item."""
    content = [] if status == "in_progress" else [{"type": "reasoning_text", "text": text}]
    return {
        "id": f"rs_{request_id}_{number}",
        "type": "reasoning",
        "summary": [],
        "content": content,
        "encrypted_content": None,
        "status": status,
    }


def call_item(request_id: str, number: int, call: ToolCall, status: str) -> dict[str, Any]:
    """Return a call as an item."""
    return {
        "id": f"fc_{request_id}_{number}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def logprobs_of(positions: Sequence[PositionLogprobs], token_text: TokenText) -> Items:
    """Return the log-probabilities of a text's tokens."""
    found: Items = chat_logprobs(positions, token_text)["content"]
    return found


def status_of(finish_reason: str) -> str:
    """Return the status of a response by the sequence's finish reason."""
    is_cut = finish_reason in (FinishReason.LENGTH.value, FinishReason.ABORT.value)
    return "incomplete" if is_cut else "completed"


def items_of(request_id: str, output: CompletionOutput, token_text: TokenText) -> list[dict[str, Any]]:
    """Return the items of an answer: reasoning, content, calls; the last one is incomplete if it is truncated."""
    parts: list[tuple[str, Any]] = []
    if output.reasoning_content:
        parts.append(("reasoning", output.reasoning_content))
    if output.text or not (output.reasoning_content or output.tool_calls):
        parts.append(("message", output.text))
    parts += [("call", call) for call in output.tool_calls]
    items = []
    for number, (kind, value) in enumerate(parts):
        status = status_of(output.finish_reason) if number == len(parts) - 1 else "completed"
        if kind == "reasoning":
            items.append(reasoning_item(request_id, number, value, status))
        elif kind == "message":
            items.append(
                message_item(request_id, number, value, logprobs_of(output.logprobs or (), token_text), status)
            )
        else:
            items.append(call_item(request_id, number, value, status))
    return items


def usage_of(usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    """Return the usage of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_body(
    heading: Heading,
    echoed: Mapping[str, Any],
    items: Sequence[Mapping[str, Any]],
    *,
    finish_reason: str | None = None,
    usage: Mapping[str, Any] | None = None,
    error: JpagedError | None = None,
) -> dict[str, Any]:
    """Return a response body; without a finish reason and an error it is in progress."""
    status = "in_progress" if finish_reason is None else status_of(finish_reason)
    is_cut = finish_reason == FinishReason.LENGTH.value
    return {
        "id": f"resp_{heading.request_id}",
        "object": "response",
        "created_at": heading.created,
        "status": "failed" if error is not None else status,
        "background": False,
        "error": None if error is None else {"code": reason_of(error), "message": str(error)},
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": heading.model,
        "output": list(items),
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "usage": usage,
        **echoed,
    }


def response_of(
    heading: Heading,
    echoed: Mapping[str, Any],
    output: RequestOutput,
    token_text: TokenText,
    num_reasoning_tokens: int,
) -> dict[str, Any]:
    """Return the response of a finished request."""
    (one,) = output.outputs
    items = items_of(heading.request_id, one, token_text)
    usage = usage_of(output.usage, num_reasoning_tokens)
    return response_body(heading, echoed, items, finish_reason=one.finish_reason, usage=usage)
