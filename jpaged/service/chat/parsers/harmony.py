"""Answers of gpt-oss: messages, each with a channel, and with a recipient if it is a call.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Source: https://cookbook.openai.com/articles/openai-harmony. The prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from jpaged.chat import Piece
from jpaged.service.chat.parsers.tool_parser import num_held
from jpaged.service.chat.parsers.writer import PieceWriter

START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
_HEADS = (START, CHANNEL, MESSAGE, " to=")
_ENDS = (END, CALL, "<|return|>", START, CHANNEL)
_MAX_HEAD_CHARS = 512
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


class HarmonyParser:
    """Parses reasoning, content and calls together.

    The analysis channel is reasoning. A message to a function is a call, with the arguments as the model writes them.
    Everything else is content, including text outside of any message.
    """

    def __init__(self, writer: PieceWriter) -> None:
        self._writer = writer
        self._waiting = ""
        self._write: Callable[[str], None] = writer.content
        self._is_empty_call = False
        self._has_reasoning = False
        self._state: Callable[[], bool] = self._head

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are certain now."""
        self._waiting += text
        while self._waiting and self._state():
            pass
        return self._writer.take()

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the text. An incomplete head is dropped."""
        if self._state == self._body:
            self._put(self._waiting)
            self._end_message()
        elif not self._waiting.startswith(_HEADS):
            self._writer.content(self._waiting)
        self._waiting = ""
        return self._writer.take()

    def _head(self) -> bool:
        """Read a message's head, up to its text."""
        if not self._waiting.startswith(_HEADS):
            if any(head.startswith(self._waiting) for head in _HEADS):
                return False
            self._open(self._writer.content)
            return True
        end = self._waiting.find(MESSAGE, 0, _MAX_HEAD_CHARS)
        if end < 0:
            if len(self._waiting) < _MAX_HEAD_CHARS:
                return False
            self._writer.content(self._waiting[:_MAX_HEAD_CHARS])
            self._waiting = self._waiting[_MAX_HEAD_CHARS:]
            self._open(self._writer.content)
            return True
        head, self._waiting = self._waiting[:end], self._waiting[end + len(MESSAGE) :]
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        if recipient is not None:
            self._writer.call(recipient[1])
            self._open(self._writer.arguments)
            self._is_empty_call = True
        elif channel is not None and channel[1] == "analysis":
            self._writer.reasoning("\n" if self._has_reasoning else "")
            self._has_reasoning = True
            self._open(self._writer.reasoning)
        else:
            self._open(self._writer.content)
        return True

    def _open(self, write: Callable[[str], None]) -> None:
        self._write, self._state = write, self._body

    def _body(self) -> bool:
        found = min(((at, tag) for tag in _ENDS if (at := self._waiting.find(tag)) >= 0), default=None)
        if found is None:
            end = len(self._waiting) - num_held(self._waiting, _ENDS)
            self._put(self._waiting[:end])
            self._waiting = self._waiting[end:]
            return False
        at, tag = found
        self._put(self._waiting[:at])
        self._end_message()
        self._waiting = self._waiting[at if tag in _HEADS else at + len(tag) :]
        self._state = self._head
        return True

    def _put(self, text: str) -> None:
        self._is_empty_call = self._is_empty_call and not text
        self._write(text)

    def _end_message(self) -> None:
        if self._is_empty_call:
            self._writer.arguments("{}")
        self._is_empty_call = False
