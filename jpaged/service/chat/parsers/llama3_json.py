"""Calls of Llama 3: an answer that begins with `{"name": ..., "parameters": {...}}`; a semicolon separates more calls.

A tag, `<|python_tag|>`, may precede a call; with the tag, a call may start anywhere in the answer.
Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1.
"""

from __future__ import annotations

from jpaged.service.chat.parsers.call_object import SPACE
from jpaged.service.chat.parsers.tool_parser import ToolParser
from jpaged.service.chat.parsers.writer import PieceWriter

TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """Parses calls without tags, and calls after the one tag.

    An object that is not a call is content (see `ToolParser`), decided at its first key that no call has. Code after
    the tag, which Llama writes for its built-in tools, is content too, including the tag.
    """

    tags = (TAG,)

    def __init__(self, writer: PieceWriter) -> None:
        super().__init__(writer)
        self._state = self._start

    def _begin(self, tag: str) -> None:
        self._state = self._behind_tag

    def _start(self) -> bool:
        """Read another call or content, at the start of the answer or after a call."""
        rest = self._waiting.lstrip(SPACE)
        if self._writer.num_calls:
            rest = rest.removeprefix(";").lstrip(SPACE)
        if not rest:
            return False
        if rest[0] != "{":
            self._state = self._content
            return True
        self._raw, self._waiting = self._waiting[: len(self._waiting) - len(rest)], rest
        self._open_object(is_tagged=False)
        return True

    def _behind_tag(self) -> bool:
        self._skip_space()
        if not self._waiting:
            return False
        if self._waiting[0] != "{":
            return self._give_up()
        self._open_object()
        return True

    def _behind_object(self) -> bool:
        self._end_call()
        self._state = self._start
        return True

    def _left(self) -> str:
        return "" if self._state == self._start and self._writer.num_calls else super()._left()
