"""Shared base of the families' tool-call parsers: text up to a tag, held back while it may still become one."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

from jpaged.chat import Piece
from jpaged.service.chat.parsers.call_object import SPACE, CallObject, Reading
from jpaged.service.chat.parsers.writer import PieceWriter


def num_held(text: str, tags: tuple[str, ...]) -> int:
    """Return the number of characters at a text's end that may become one of the tags; 0 if none."""
    longest = min(len(text), max(map(len, tags), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0)


class ToolParser(abc.ABC):
    """State machine: each state consumes what it recognizes of the waiting text and sets the next state.

    Text that begins like a call and is none is content in full, including its tags. The decision is made when the
    arguments begin: from there on it is a call, whose arguments are passed through as the model writes them, valid or
    not. Malformed text after the arguments is content again. Whitespace next to calls is not content.
    """

    tags: ClassVar[tuple[str, ...]]
    """Tags that begin a call."""

    def __init__(self, writer: PieceWriter) -> None:
        self._writer = writer
        self._waiting = ""
        self._raw = ""
        self._object: CallObject | None = None
        self._is_beside_call = True
        self._state: Callable[[], bool] = self._content

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are certain now."""
        self._waiting += text
        while self._waiting and self._state():
            pass
        return self._writer.take()

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the text."""
        self._writer.content(self._left())
        self._raw = self._waiting = ""
        return self._writer.take()

    def _left(self) -> str:
        """Return the part of the waiting text that is content at the end."""
        if self._state == self._content:
            is_space = self._is_beside_call and self._writer.num_calls and not self._waiting.strip(SPACE)
            return "" if is_space else self._waiting
        return self._raw + self._waiting

    @abc.abstractmethod
    def _begin(self, tag: str) -> None:
        """Enter the state after a tag; `_raw` holds the tag."""

    def _content(self) -> bool:
        found = min(((at, tag) for tag in self.tags if (at := self._waiting.find(tag)) >= 0), default=None)
        end = len(self._waiting) - num_held(self._waiting, self.tags) if found is None else found[0]
        is_space = self._is_beside_call and not self._waiting[:end].strip(SPACE)
        if found is None and is_space:
            return False
        start = 0 if is_space else end
        self._writer.content(self._waiting[:start])
        self._is_beside_call = is_space
        if found is None:
            self._waiting = self._waiting[end:]
            return False
        end += len(found[1])
        self._raw, self._waiting = self._waiting[start:end], self._waiting[end:]
        self._begin(found[1])
        return True

    def _give_up(self) -> bool:
        """Emit a supposed call as content."""
        self._writer.content(self._raw)
        self._raw, self._is_beside_call, self._state = "", False, self._content
        return True

    def _end_call(self) -> bool:
        """Return to content after a call."""
        self._raw, self._is_beside_call, self._state = "", True, self._content
        return True

    def _open_object(self, *, is_tagged: bool = True) -> None:
        self._object, self._state = CallObject(self._writer, is_tagged=is_tagged), self._in_object

    def _in_object(self) -> bool:
        assert self._object is not None
        reading, at = self._object.read(self._waiting, 0)
        self._raw = "" if self._object.has_begun else self._raw + self._waiting[:at]
        self._waiting = self._waiting[at:]
        if reading is Reading.MALFORMED:
            return self._give_up()
        if reading is Reading.DONE:
            return self._behind_object()
        return False

    def _behind_object(self) -> bool:
        """Handle the text after a call's object."""
        return self._end_call()

    def _skip_space(self) -> None:
        """Move whitespace into `_raw`."""
        rest = self._waiting.lstrip(SPACE)
        self._raw += self._waiting[: len(self._waiting) - len(rest)]
        self._waiting = rest
