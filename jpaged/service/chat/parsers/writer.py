"""Pieces of an answer that wait to be taken."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection

from jpaged.chat import ContentPiece, Piece, ReasoningPiece, ToolCallPiece

NewId = Callable[[], str]
_ALPHANUMERICS = string.ascii_letters + string.digits


def call_id() -> str:
    """A new id of a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """A new id of a call of nine letters and digits: Mistral's chat templates take no other."""
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(9))


class PieceWriter:
    """Collects pieces; neighbours of one kind become one.

    Args:
        new_id: makes the id of a call that brings none.
        tool_names: of the tools that may be called.
    """

    def __init__(self, new_id: NewId = call_id, tool_names: Collection[str] = ()) -> None:
        self._new_id = new_id
        self.tool_names = frozenset(tool_names)
        self._pieces: list[Piece] = []
        self.num_calls = 0

    def content(self, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, ContentPiece):
            self._pieces[-1] = ContentPiece(last.text + text)
        else:
            self._pieces.append(ContentPiece(text))

    def reasoning(self, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, ReasoningPiece):
            self._pieces[-1] = ReasoningPiece(last.text + text)
        else:
            self._pieces.append(ReasoningPiece(text))

    def call(self, name: str, call_id: str | None = None) -> None:
        """Begins the next call."""
        self._pieces.append(ToolCallPiece(self.num_calls, "", id=call_id or self._new_id(), name=name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the call that has begun last."""
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        index = self.num_calls - 1
        if isinstance(last, ToolCallPiece) and last.index == index:
            self._pieces[-1] = ToolCallPiece(index, last.arguments + text, last.id, last.name)
        else:
            self._pieces.append(ToolCallPiece(index, text))

    def take(self) -> list[Piece]:
        """Those since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces
