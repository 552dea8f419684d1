"""Buffer of an answer's pieces."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection

from jpaged.chat import ContentPiece, Piece, ReasoningPiece, ToolCallPiece

NewId = Callable[[], str]
_ALPHANUMERICS = string.ascii_letters + string.digits


def call_id() -> str:
    """Return a new call id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Return a new call id of nine letters and digits, the only form that Mistral's chat templates accept."""
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(9))


class PieceWriter:
    """Collects pieces and merges neighbors of one kind.

    Args:
        new_id: makes the id of a call that has none.
        tool_names: names of the tools that may be called.
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
        """Begin the next call."""
        self._pieces.append(ToolCallPiece(self.num_calls, "", id=call_id or self._new_id(), name=name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Append to the arguments of the current call."""
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        index = self.num_calls - 1
        if isinstance(last, ToolCallPiece) and last.index == index:
            self._pieces[-1] = ToolCallPiece(index, last.arguments + text, last.id, last.name)
        else:
            self._pieces.append(ToolCallPiece(index, text))

    def take(self) -> list[Piece]:
        """Return the pieces since the last call, and clear them."""
        pieces, self._pieces = self._pieces, []
        return pieces
