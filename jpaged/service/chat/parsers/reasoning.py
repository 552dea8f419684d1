"""Splits reasoning from content: `<think>...</think>` at an answer's start, opened by the model or by its prompt."""

from __future__ import annotations

from collections.abc import Callable

from jpaged.service.chat.parsers.call_object import SPACE
from jpaged.service.chat.parsers.tool_parser import num_held
from jpaged.service.chat.parsers.writer import PieceWriter

_NEWLINES = "\r\n"


class ReasoningSplitter:
    """Splits reasoning from content. Newlines that templates put next to the tags belong to neither.

    Tags count only at the start, because an answer may mention them. Unclosed reasoning extends to the end.

    Args:
        writer: receives the reasoning.
        content: receives the content as it comes.
        is_open: the prompt ends with the opening tag, or the model leaves it out. An opening tag at the start is then
            skipped.
    """

    def __init__(
        self, writer: PieceWriter, content: Callable[[str], None], open_tag: str, close_tag: str, *, is_open: bool
    ) -> None:
        self._writer = writer
        self._write_content = content
        self._open_tag, self._close_tag = open_tag, close_tag
        self._waiting = ""
        self._has_reasoning = is_open
        self._state: Callable[[], bool] = self._start

    def push(self, text: str) -> None:
        self._waiting += text
        while self._waiting and self._state():
            pass

    def finish(self) -> None:
        """Flush the held-back text at the end, by the current state."""
        is_content = self._state == self._content or (self._state == self._start and not self._has_reasoning)
        if is_content:
            self._write_content(self._waiting)
        elif self._state != self._behind:
            self._writer.reasoning(self._waiting.rstrip(_NEWLINES))
        self._waiting = ""

    def _start(self) -> bool:
        rest = self._waiting.lstrip(SPACE)
        if rest.startswith(self._open_tag):
            self._waiting = rest.removeprefix(self._open_tag)
            self._has_reasoning = True
        elif self._open_tag.startswith(rest):
            return False
        self._state = self._newlines if self._has_reasoning else self._content
        return True

    def _newlines(self) -> bool:
        """Skip newlines before the reasoning's first line."""
        self._waiting = self._waiting.lstrip(_NEWLINES)
        self._state = self._newlines if not self._waiting else self._reasoning
        return bool(self._waiting)

    def _reasoning(self) -> bool:
        end = self._waiting.find(self._close_tag)
        is_closed = end >= 0
        if not is_closed:
            end = len(self._waiting) - num_held(self._waiting, (self._close_tag,))
        text = self._waiting[:end].rstrip(_NEWLINES)
        self._writer.reasoning(text)
        self._waiting = self._waiting[end + len(self._close_tag) :] if is_closed else self._waiting[len(text) :]
        if is_closed:
            self._state = self._behind
        return is_closed

    def _behind(self) -> bool:
        """Skip newlines before the content's first line."""
        self._waiting = self._waiting.lstrip(_NEWLINES)
        if self._waiting:
            self._state = self._content
        return bool(self._waiting)

    def _content(self) -> bool:
        self._write_content(self._waiting)
        self._waiting = ""
        return False
