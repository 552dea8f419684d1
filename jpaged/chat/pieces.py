"""An answer in pieces, as streaming parsers emit them, and assembled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model. `arguments` is JSON text as the model wrote it; it may be invalid."""

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """Return the call in OpenAI's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """The next characters of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """The next characters of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """The next characters of a call's arguments. `id` and `name` are set only in the first piece of a call.

    Attributes:
        index: index of the call in the answer, from 0.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Piece = ContentPiece | ReasoningPiece | ToolCallPiece


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An assistant's turn, assembled from pieces."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> ChatAnswer:
        """Assemble pieces, in order."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[tuple[str, str, list[str]]] = []
        for piece in pieces:
            if isinstance(piece, ContentPiece):
                content.append(piece.text)
            elif isinstance(piece, ReasoningPiece):
                reasoning.append(piece.text)
            else:
                if piece.index == len(calls):
                    calls.append((piece.id or "", piece.name or "", []))
                calls[piece.index][2].append(piece.arguments)
        return cls(
            "".join(content), "".join(reasoning), tuple(ToolCall(i, name, "".join(parts)) for i, name, parts in calls)
        )
