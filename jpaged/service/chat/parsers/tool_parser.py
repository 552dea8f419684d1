"""What the families' parsers of tool calls share: text up to a tag, held back where it may still become one."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

from jpaged.chat import Piece
from jpaged.service.chat.parsers.call_object import SPACE, CallObject, Reading
from jpaged.service.chat.parsers.writer import PieceWriter


def num_held(text: str, tags: tuple[str, ...]) -> int:
    """How many characters at a text's end may become one of the tags; 0 where none may."""
    longest = min(len(text), max(map(len, tags), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0)


class ToolParser(abc.ABC):
    """A state machine: each state takes what it understands from the text that waits, and names the next one.

    Text that begins like a call and turns out to be none is content, to the last character, its tags too. That is
    decided when its arguments begin: from there on it is a call, whose arguments are as the model writes them, valid or
    not, and what breaks off behind them is content again. White space alone beside calls is not content.
    """

    tags: ClassVar[tuple[str, ...]]
    """What a call begins with."""

    def __init__(self, writer: PieceWriter) -> None:
        self._writer = writer
        self._waiting = ""
        self._raw = ""
        self._object: CallObject | None = None
        self._is_beside_call = True
        self._state: Callable[[], bool] = self._content

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain when this has come."""
        self._waiting += text
        while self._waiting and self._state():
            pass
        return self._writer.take()

    def finish(self) -> list[Piece]:
        """The rest, when nothing more comes."""
        self._writer.content(self._left())
        self._raw = self._waiting = ""
        return self._writer.take()

    def _left(self) -> str:
        """What of the text that waits is content when nothing more comes."""
        if self._state == self._content:
            is_space = self._is_beside_call and self._writer.num_calls and not self._waiting.strip(SPACE)
            return "" if is_space else self._waiting
        return self._raw + self._waiting

    @abc.abstractmethod
    def _begin(self, tag: str) -> None:
        """The state behind a tag, which is in `_raw`."""

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
        """What was thought to be a call is content."""
        self._writer.content(self._raw)
        self._raw, self._is_beside_call, self._state = "", False, self._content
        return True

    def _end_call(self) -> bool:
        """Goes back to content, behind a call."""
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
        """The state behind a call's object."""
        return self._end_call()

    def _skip_space(self) -> None:
        """Moves white space into `_raw`."""
        rest = self._waiting.lstrip(SPACE)
        self._raw += self._waiting[: len(self._waiting) - len(rest)]
        self._waiting = rest
