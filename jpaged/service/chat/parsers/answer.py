"""One answer, parsed while it comes: reasoning first, then content and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from jpaged.chat import Piece
from jpaged.service.chat.parsers.reasoning import ReasoningSplitter
from jpaged.service.chat.parsers.writer import PieceWriter


class Parser(Protocol):
    """Takes an answer's text as it comes. The sums of the pieces are the same however it is cut."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain when this has come."""
        ...

    def finish(self) -> list[Piece]:
        """The rest, when nothing more comes; called once."""
        ...


class PlainParser:
    """Takes everything for content, as it comes."""

    def __init__(self, writer: PieceWriter) -> None:
        self._writer = writer

    def push(self, text: str) -> list[Piece]:
        self._writer.content(text)
        return self._writer.take()

    def finish(self) -> list[Piece]:
        return self._writer.take()


class ReasoningParser:
    """Tells reasoning apart, and gives what follows to another parser: what is thought calls nothing.

    Args:
        tags: the opening tag and the closing one.
        make_inner: makes the parser of the content.
        is_open: see `ReasoningSplitter`.
        inner_writer: of the content.
    """

    def __init__(
        self,
        tags: tuple[str, str],
        make_inner: Callable[[PieceWriter], Parser],
        *,
        is_open: bool,
        inner_writer: PieceWriter,
    ) -> None:
        self._writer = PieceWriter()
        self._inner = make_inner(inner_writer)
        self._pieces: list[Piece] = []
        self._splitter = ReasoningSplitter(self._writer, self._write_content, *tags, is_open=is_open)

    def push(self, text: str) -> list[Piece]:
        self._splitter.push(text)
        return self._take()

    def finish(self) -> list[Piece]:
        self._splitter.finish()
        return [*self._take(), *self._inner.finish()]

    def _write_content(self, text: str) -> None:
        self._pieces += self._inner.push(text)

    def _take(self) -> list[Piece]:
        """Reasoning comes before content, so that it is right to take it first."""
        pieces, self._pieces = [*self._writer.take(), *self._pieces], []
        return pieces
