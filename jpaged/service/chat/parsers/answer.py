"""Incremental parser of one answer: reasoning first, then content and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from jpaged.chat import Piece
from jpaged.service.chat.parsers.reasoning import ReasoningSplitter
from jpaged.service.chat.parsers.writer import PieceWriter


class Parser(Protocol):
    """Incremental parser of an answer. The concatenated pieces do not depend on how the text is split."""

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are certain now."""
        ...

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the text. Call once."""
        ...


class PlainParser:
    """Parser that emits everything as content at once."""

    def __init__(self, writer: PieceWriter) -> None:
        self._writer = writer

    def push(self, text: str) -> list[Piece]:
        self._writer.content(text)
        return self._writer.take()

    def finish(self) -> list[Piece]:
        return self._writer.take()


class ReasoningParser:
    """Splits off reasoning and passes the rest to another parser. Reasoning contains no calls.

    Args:
        tags: the opening tag and the closing tag.
        make_inner: makes the parser of the content.
        is_open: see `ReasoningSplitter`.
        inner_writer: the writer of the content parser.
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
        """Return the collected pieces. Reasoning goes first because it precedes all content."""
        pieces, self._pieces = [*self._writer.take(), *self._pieces], []
        return pieces
