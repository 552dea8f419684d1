"""Calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, a pair of tags for each call.

Source: https://github.com/NousResearch/Hermes-Function-Calling. Qwen 2.5 and 3 have the same format.
"""

from __future__ import annotations

from jpaged.service.chat.parsers.call_object import SPACE
from jpaged.service.chat.parsers.tool_parser import ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Parses calls in tags. The closing tag may be missing.

    Text between the tags that is not a call is content, including its tags (see `ToolParser`).
    """

    tags = (OPEN,)

    def _begin(self, tag: str) -> None:
        self._open_object()

    def _behind_object(self) -> bool:
        self._state = self._closing
        return True

    def _closing(self) -> bool:
        rest = self._waiting.lstrip(SPACE)
        if rest.startswith(CLOSE):
            self._waiting = rest.removeprefix(CLOSE)
        elif CLOSE.startswith(rest):
            return False
        return self._end_call()

    def _left(self) -> str:
        return "" if self._state == self._closing else super()._left()
