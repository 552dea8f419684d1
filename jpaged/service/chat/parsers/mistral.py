"""Calls of Mistral after `[TOOL_CALLS]`: a list of objects or, since tokenizer version 11, names and arguments.

    [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
    [TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[ARGS]{...}      with [CALL_ID]id before [ARGS] in some

Source: https://docs.mistral.ai/guides/tokenization.
"""

from __future__ import annotations

import re

from jpaged.service.chat.parsers.call_object import SPACE, JsonValue
from jpaged.service.chat.parsers.tool_parser import ToolParser
from jpaged.service.chat.parsers.writer import PieceWriter

TAG, ID_TAG, ARGUMENTS_TAG = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MAX_HEAD_CHARS = 512
_NAME_START = re.compile(r"[A-Za-z0-9_]")
_NO_ARGUMENTS = re.compile(r"([A-Za-z0-9_.:-]{1,256})(?:\[CALL_ID\]([A-Za-z0-9_-]{1,128}))?\[ARGS\]\s*(?:null\s*)?")
"""A call that ends, or is followed by another, before its arguments."""
_HEAD = re.compile(r"([A-Za-z0-9_.:-]{1,256})(?:\[CALL_ID\]([A-Za-z0-9_-]{1,128}))?(?:\[ARGS\])?[ \t\r\n]*(?=\{)")


class MistralParser(ToolParser):
    """Parses both forms. Anything else is content, including the tag (see `ToolParser`)."""

    tags = (TAG,)

    def __init__(self, writer: PieceWriter) -> None:
        super().__init__(writer)
        self._is_list = False
        self._value = JsonValue()

    def _begin(self, tag: str) -> None:
        self._is_list, self._state = False, self._behind_tag

    def _behind_tag(self) -> bool:
        self._skip_space()
        if not self._waiting:
            return False
        if self._waiting[0] == "[" and not self._is_list:
            self._is_list, self._raw, self._waiting = True, self._raw + "[", self._waiting[1:]
        elif self._waiting[0] == "{":
            self._open_object()
        elif _NAME_START.match(self._waiting) and not self._is_list:
            self._state = self._in_head
        else:
            return self._give_up()
        return True

    def _behind_object(self) -> bool:
        if not self._is_list:
            return self._end_call()
        self._state = self._in_list
        return True

    def _in_list(self) -> bool:
        """Read another object or the end, after an object of a list."""
        rest = self._waiting.lstrip(SPACE)
        if not rest:
            return False
        if rest[0] == ",":
            rest = rest[1:].lstrip(SPACE)
            if not rest:
                return False
            if rest[0] == "{":
                self._raw, self._waiting = self._waiting[: len(self._waiting) - len(rest)], rest
                self._open_object()
                return True
        elif rest[0] == "]":
            self._waiting = rest[1:]
        return self._end_call()

    def _in_head(self) -> bool:
        """Read from a name up to its arguments."""
        next_call = self._waiting.find(TAG, 0, _MAX_HEAD_CHARS)
        if next_call > 0 and self._call_nothing(self._waiting[:next_call]):
            self._waiting = self._waiting[next_call:]
            return self._end_call()
        end = self._waiting.find("{", 0, _MAX_HEAD_CHARS)
        if end < 0:
            return self._give_up() if len(self._waiting) >= _MAX_HEAD_CHARS else False
        found = _HEAD.match(self._waiting)
        if found is None:
            return self._give_up()
        self._writer.call(found[1], found[2])
        self._raw, self._waiting = "", self._waiting[found.end() :]
        self._value, self._state = JsonValue(), self._in_arguments
        return True

    def _call_nothing(self, head: str) -> bool:
        """Write a call without arguments; return False if the text is not one."""
        found = _NO_ARGUMENTS.fullmatch(head)
        if found is not None:
            self._writer.call(found[1], found[2])
            self._writer.arguments("{}")
        return found is not None

    def _in_arguments(self) -> bool:
        end, is_whole = self._value.read(self._waiting, 0)
        self._writer.arguments(self._waiting[:end])
        self._waiting = self._waiting[end:]
        return is_whole and self._end_call()

    def _left(self) -> str:
        # without "null" the call may be cut before its arguments
        is_null = self._waiting.rstrip(SPACE).endswith("null")
        if self._state == self._in_head and is_null and self._call_nothing(self._waiting):
            return ""
        return "" if self._state == self._in_list and self._waiting.strip(SPACE) in ("", ",") else super()._left()
