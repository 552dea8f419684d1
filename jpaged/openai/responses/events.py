"""Streamed responses: numbered events in order.

response.created, response.in_progress
  response.output_item.added                    an item of reasoning, content or a call, as it comes
    response.content_part.added                 for reasoning and content
      response.reasoning_text.delta | response.output_text.delta | response.function_call_arguments.delta ...
      ... .done
    response.content_part.done
  response.output_item.done
response.completed | response.incomplete | response.failed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jpaged import json_text
from jpaged.chat import ToolCall, ToolCallPiece
from jpaged.errors import JpagedError
from jpaged.openai.choices import Heading, TokenText
from jpaged.openai.responses.answers import (
    call_item,
    logprobs_of,
    message_item,
    reasoning_item,
    response_body,
    status_of,
    text_part,
    usage_of,
)
from jpaged.types import OutputEvent, Usage

_REASONING, _MESSAGE, _CALL = "reasoning", "message", "call"


class ResponseEvents:
    """Builds the events of one response from its request's events. Must not be shared between threads.

    Attributes:
        reasoning: the reasoning so far.
    """

    def __init__(self, heading: Heading, echoed: Mapping[str, Any], token_text: TokenText) -> None:
        self.reasoning = ""
        self._heading = heading
        self._echoed = echoed
        self._token_text = token_text
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._kind = ""
        self._call_index = -1
        self._call = ToolCall("", "", "")
        self._text = ""
        self._logprobs: list[object] = []
        self._untold: list[object] = []
        self._usage = Usage()
        self._finish_reason = ""

    def begin(self) -> bytes:
        """Return the first events."""
        body = response_body(self._heading, self._echoed, ())
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def of(self, event: OutputEvent) -> bytes:
        """Return the events for an event of the request."""
        return b"".join(self._of(event))

    def end(self, num_reasoning_tokens: int) -> bytes:
        """Return the last events."""
        usage = usage_of(self._usage, num_reasoning_tokens)
        body = response_body(self._heading, self._echoed, self._items, finish_reason=self._finish_reason, usage=usage)
        return self._event(f"response.{body['status']}", response=body)

    def failed(self, error: JpagedError) -> bytes:
        """Return the last event of a failed response."""
        parts = list(self._close("incomplete"))
        body = response_body(self._heading, self._echoed, self._items, error=error)
        return b"".join([*parts, self._event("response.failed", response=body)])

    def _of(self, event: OutputEvent) -> Iterator[bytes]:
        self._usage = event.usage
        self._untold += logprobs_of(event.logprobs, self._token_text)
        if event.reasoning_content:
            self.reasoning += event.reasoning_content
            yield from self._open(_REASONING)
            yield self._delta("response.reasoning_text.delta", event.reasoning_content, content_index=0)
        if event.text:
            yield from self._open(_MESSAGE)
            told, self._untold = self._untold, []
            self._logprobs += told
            yield self._delta("response.output_text.delta", event.text, content_index=0, logprobs=told)
        for piece in event.tool_calls:
            yield from self._of_call(piece)
        if event.finish is not None:
            self._finish_reason = event.finish.reason.value
            if not self._kind:
                yield from self._open(_MESSAGE)
            yield from self._close(status_of(self._finish_reason))

    def _of_call(self, piece: ToolCallPiece) -> Iterator[bytes]:
        if self._kind != _CALL or piece.index != self._call_index:
            yield from self._close("completed")
            self._call_index, self._call = piece.index, ToolCall(piece.id or "", piece.name or "", "")
            yield from self._open(_CALL)
        if piece.arguments:
            yield self._delta("response.function_call_arguments.delta", piece.arguments)

    def _open(self, kind: str) -> Iterator[bytes]:
        """Begin an item unless one of this kind is open; complete the previous one."""
        if self._kind == kind:
            return
        yield from self._close("completed")
        self._kind = kind
        self._items.append(self._item("in_progress"))
        yield self._event("response.output_item.added", output_index=self._index, item=self._items[-1])
        if kind != _CALL:
            yield self._of_item("response.content_part.added", content_index=0, part=self._part(""))

    def _close(self, status: str) -> Iterator[bytes]:
        if not self._kind:
            return
        text = self._text
        if self._kind == _CALL:
            yield self._of_item("response.function_call_arguments.done", arguments=text, name=self._call.name)
        elif self._kind == _REASONING:
            yield self._of_item("response.reasoning_text.done", content_index=0, text=text)
        else:
            self._logprobs += self._untold
            self._untold = []
            yield self._of_item("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
        if self._kind != _CALL:
            yield self._of_item("response.content_part.done", content_index=0, part=self._part(text))
        self._items[-1] = self._item(status)
        yield self._event("response.output_item.done", output_index=self._index, item=self._items[-1])
        self._kind, self._text, self._logprobs = "", "", []

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _item(self, status: str) -> dict[str, Any]:
        request_id, number = self._heading.request_id, len(self._items) - (status != "in_progress")
        if self._kind == _REASONING:
            return reasoning_item(request_id, number, self._text, status)
        if self._kind == _MESSAGE:
            return message_item(request_id, number, self._text, self._logprobs, status)
        call = ToolCall(self._call.id, self._call.name, self._text)
        return call_item(request_id, number, call, status)

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == _REASONING:
            return {"type": "reasoning_text", "text": text}
        return text_part(text, self._logprobs)

    def _delta(self, kind: str, delta: str, **fields: object) -> bytes:
        self._text += delta
        return self._of_item(kind, delta=delta, **fields)

    def _of_item(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"".join((b"event: ", kind.encode(), b"\ndata: ", *json_text.pieces(value), b"\n\n"))
