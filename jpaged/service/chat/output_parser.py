"""Streaming answers of one chat, split into content, reasoning and tool calls between the engine and the wire.

Reasoning comes first: `<think>...</think>` at an answer's start, opened by the model or by its prompt. Content and
calls follow.

An answer of gpt-oss is a list of messages, each with a channel, and with a recipient if it is a call:

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Source: https://cookbook.openai.com/articles/openai-harmony. The prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from jpaged.chat import ContentPiece, Piece, ReasoningPiece, ToolCallPiece
from jpaged.service.chat.tool_parser import SPACE, PieceWriter, find_first, num_held
from jpaged.types import FinishReason, OutputEvent, SequenceFinish

_NEWLINES = "\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """Tags around reasoning.

    Attributes:
        opening: tags of which one opens reasoning.
        closing: tags of which one closes it.
        following: tags that end reasoning that is not closed, and belong to the content.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    following: tuple[str, ...] = ()


class ReasoningSplitter:
    """Splits reasoning from content. Newlines that templates put next to the tags belong to neither.

    Tags count only at the start, because an answer may mention them. Unclosed reasoning extends to the end.

    Args:
        writer: receives the reasoning.
        content: receives the content as it comes.
        is_open: the prompt ends with the opening tag, or the model leaves it out. An opening tag at the start is then
            skipped.
    """

    def __init__(
        self, writer: PieceWriter, content: Callable[[str], None], tags: ReasoningTags, *, is_open: bool
    ) -> None:
        self._writer = writer
        self._write_content = content
        self._tags = tags
        self._ends = (*tags.closing, *tags.following)
        self._waiting = ""
        self._has_reasoning = is_open
        self._state: Callable[[], bool] = self._start

    def push(self, text: str) -> None:
        self._waiting += text
        while self._waiting and self._state():
            pass

    def finish(self) -> None:
        """Flush the held-back text at the end, by the current state."""
        is_content = self._state == self._content or (self._state == self._start and not self._has_reasoning)
        if is_content:
            self._write_content(self._waiting)
        elif self._state != self._behind:
            self._writer.reasoning(self._waiting.rstrip(_NEWLINES))
        self._waiting = ""

    def _start(self) -> bool:
        rest = self._waiting.lstrip(SPACE)
        tag = next((tag for tag in self._tags.opening if rest.startswith(tag)), None)
        if tag is not None:
            self._waiting = rest.removeprefix(tag)
            self._has_reasoning = True
        elif any(tag.startswith(rest) for tag in self._tags.opening):
            return False
        self._state = self._newlines if self._has_reasoning else self._content
        return True

    def _newlines(self) -> bool:
        """Skip newlines before the reasoning's first line."""
        self._waiting = self._waiting.lstrip(_NEWLINES)
        self._state = self._newlines if not self._waiting else self._reasoning
        return bool(self._waiting)

    def _reasoning(self) -> bool:
        found = find_first(self._waiting, self._ends)
        end = len(self._waiting) - num_held(self._waiting, self._ends) if found is None else found[0]
        text = self._waiting[:end].rstrip(_NEWLINES)
        self._writer.reasoning(text)
        if found is None:
            self._waiting = self._waiting[len(text) :]
            return False
        is_closed = found[1] in self._tags.closing
        self._waiting = self._waiting[end + (len(found[1]) if is_closed else 0) :]
        self._state = self._behind if is_closed else self._content
        return True

    def _behind(self) -> bool:
        """Skip newlines before the content's first line."""
        self._waiting = self._waiting.lstrip(_NEWLINES)
        if self._waiting:
            self._state = self._content
        return bool(self._waiting)

    def _content(self) -> bool:
        self._write_content(self._waiting)
        self._waiting = ""
        return False


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
        tags: the tags around reasoning.
        make_inner: makes the parser of the content.
        is_open: see `ReasoningSplitter`.
        inner_writer: the writer of the content parser.
    """

    def __init__(
        self,
        tags: ReasoningTags,
        make_inner: Callable[[PieceWriter], Parser],
        *,
        is_open: bool,
        inner_writer: PieceWriter,
    ) -> None:
        self._writer = PieceWriter()
        self._inner = make_inner(inner_writer)
        self._pieces: list[Piece] = []
        self._splitter = ReasoningSplitter(self._writer, self._write_content, tags, is_open=is_open)

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


START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
CONSTRAIN = "<|constrain|>"
_HEADS = (START, CHANNEL, MESSAGE, " to=")
_MESSAGE_ENDS = (END, CALL, "<|return|>", START)
_ENDS = (*_MESSAGE_ENDS, CHANNEL)
_HARMONY_MAX_HEAD_CHARS = 512
_CHANNEL = re.compile(r"<\|channel\|>\s*(analysis|\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code")
_HEAD_PART = re.compile(
    rf"<\|start\|>(?:\s*functions\.[^\s<]*)?|<\|channel\|>|<\|constrain\|>\s*\w*|\bto=[^\s<]*|\b(?:{'|'.join(_WORDS)})"
)
"""A tag, the role, the channel, the type of the text or the recipient in the head of a message."""


class HarmonyParser:
    """Parses reasoning, content and calls together.

    The analysis channel is reasoning. A message to a function is a call, with the arguments as the model writes them.
    Everything else is content, including text outside of any message, or in the head of one.
    """

    def __init__(self, writer: PieceWriter) -> None:
        self._writer = writer
        self._waiting = ""
        self._write: Callable[[str], None] = writer.content
        self._is_empty_call = False
        self._has_reasoning = False
        self._state: Callable[[], bool] = self._head

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are certain now."""
        self._waiting += text
        while self._waiting and self._state():
            pass
        return self._writer.take()

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the text. An incomplete head is dropped, except for other text."""
        if self._state == self._body:
            self._put(self._waiting)
            self._end_message()
        elif not self._waiting.startswith(_HEADS):
            self._writer.content(self._waiting)
        else:
            head = self._waiting[: len(self._waiting) - num_held(self._waiting, (*_HEADS, CONSTRAIN))]
            rest = _other_text(head)
            if not any(word.startswith(rest) for word in ("to=", *_WORDS)):  # the end may be cut in one of them
                self._writer.content(rest)
        self._waiting = ""
        return self._writer.take()

    def _head(self) -> bool:
        """Read a message's head, up to its text."""
        if not self._waiting.startswith(_HEADS):
            if any(head.startswith(self._waiting) for head in _HEADS):
                return False
            self._open(self._writer.content)
            return True
        begin = 0 if self._waiting.startswith(MESSAGE) else 1
        found = find_first(self._waiting, (MESSAGE, *_MESSAGE_ENDS), begin, _HARMONY_MAX_HEAD_CHARS)
        if found is None:
            if len(self._waiting) < _HARMONY_MAX_HEAD_CHARS:
                return False
            self._writer.content(self._waiting[:_HARMONY_MAX_HEAD_CHARS])
            self._waiting = self._waiting[_HARMONY_MAX_HEAD_CHARS:]
            self._open(self._writer.content)
            return True
        end, tag = found
        head, self._waiting = self._waiting[:end], self._waiting[end + (0 if tag == START else len(tag)) :]
        self._writer.content(_other_text(head))
        self._open_message(head, tag)
        if tag != MESSAGE:
            self._end_message()
            self._state = self._head
        return True

    def _open_message(self, head: str, tag: str) -> None:
        """Begin what a head announces; one without a text is nothing, unless it is a call."""
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        if recipient is not None and tag in (MESSAGE, CALL):
            self._writer.call(recipient[1])
            self._open(self._writer.arguments)
            self._is_empty_call = True
        elif channel is not None and channel[1] == "analysis" and tag == MESSAGE:
            self._writer.reasoning("\n" if self._has_reasoning else "")
            self._has_reasoning = True
            self._open(self._writer.reasoning)
        else:
            self._open(self._writer.content)

    def _open(self, write: Callable[[str], None]) -> None:
        self._write, self._state = write, self._body

    def _body(self) -> bool:
        found = find_first(self._waiting, _ENDS)
        if found is None:
            end = len(self._waiting) - num_held(self._waiting, _ENDS)
            self._put(self._waiting[:end])
            self._waiting = self._waiting[end:]
            return False
        at, tag = found
        self._put(self._waiting[:at])
        self._end_message()
        self._waiting = self._waiting[at if tag in _HEADS else at + len(tag) :]
        self._state = self._head
        return True

    def _put(self, text: str) -> None:
        self._is_empty_call = self._is_empty_call and not text
        self._write(text)

    def _end_message(self) -> None:
        if self._is_empty_call:
            self._writer.arguments("{}")
        self._is_empty_call = False


def _other_text(head: str) -> str:
    """Return the text in the head of a message that is no part of it; all of it if it has no tag."""
    return _HEAD_PART.sub("", head).strip(SPACE) if "<|" in head else head


class WithoutTokens:
    """Removes special tokens from streamed text. The engine keeps them in the text if the parser needs them as tags.

    Args:
        tokens: their texts, none of them empty; at least one.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self._tokens = tuple(sorted(tokens, key=len, reverse=True))
        self._any = re.compile("|".join(map(re.escape, self._tokens)))
        self._firsts = frozenset(token[0] for token in self._tokens)
        self._waiting = ""

    def push(self, text: str) -> str:
        """Add text, and return what is certain: everything except a tail that may still become a token."""
        parts = self._any.split(self._waiting + text)
        tail = parts[-1]
        if not self._firsts.isdisjoint(tail[-len(self._tokens[0]) :]):
            parts[-1] = tail[: len(tail) - num_held(tail, self._tokens)]
        self._waiting = tail[len(parts[-1]) :]
        return "".join(parts)

    def finish(self) -> str:
        """Return the held-back rest."""
        text, self._waiting = self._waiting, ""
        return text


class _AnswerState:
    """State of the answer of one sequence."""

    def __init__(self, parser: Parser, tokens: Collection[str]) -> None:
        self.parser = parser
        self.calls = False
        self._arguments: list[str] = []
        self._content = WithoutTokens(tokens) if tokens else None
        self._reasoning = WithoutTokens(tokens) if tokens else None

    def parts(self, event: OutputEvent) -> tuple[str, str, tuple[ToolCallPiece, ...]]:
        """Return the content, reasoning and calls that an event adds."""
        pieces = self.parser.push(event.text) if event.text else []
        if event.finish is not None:
            pieces += self.parser.finish()
        content = "".join([piece.text for piece in pieces if isinstance(piece, ContentPiece)])
        reasoning = "".join([piece.text for piece in pieces if isinstance(piece, ReasoningPiece)])
        if self._content is not None and self._reasoning is not None:
            content, reasoning = self._content.push(content), self._reasoning.push(reasoning)
            if event.finish is not None:
                content, reasoning = content + self._content.finish(), reasoning + self._reasoning.finish()
        calls = tuple([piece for piece in pieces if isinstance(piece, ToolCallPiece)])
        self.calls = self.calls or bool(calls)
        for call in calls:
            if call.name:
                self._arguments = []
            self._arguments.append(call.arguments)
        return content, reasoning, calls

    @property
    def is_cut_in_a_call(self) -> bool:
        """Return True if the arguments of the last call are incomplete."""
        try:
            json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            return True
        return False


class ChatOutputParser:
    """Splits the answers of one request, each sequence separately. Must not be shared between threads.

    Args:
        parser: makes the parser of one answer.
        has_reasoning: if False, drop reasoning.
        hidden_tokens: special tokens to remove from content and reasoning after the parser has read their tags.
        has_content: if False, drop content. For answers that must be calls: a truncated call's head is not content.
    """

    def __init__(
        self,
        parser: Callable[[], Parser],
        *,
        has_reasoning: bool = True,
        hidden_tokens: Collection[str] = (),
        has_content: bool = True,
    ) -> None:
        self._parser = parser
        self._has_content = has_content
        self._has_reasoning = has_reasoning
        self._hidden_tokens = frozenset(token for token in hidden_tokens if token)
        self._answers: dict[int, _AnswerState] = {}

    def go_on(self, index: int, text: str) -> None:
        """Parse text of a sequence that another server generated, without emitting it again."""
        self._answer(index).parts(OutputEvent("", index, text))

    def split(self, event: OutputEvent) -> OutputEvent:
        """Return the event with only content as its text; reasoning and calls move to their fields.

        The event is the engine's, or several merged. A sequence that ends by itself and has called a tool finishes with
        `TOOL_CALLS`. If a stop string or stop token cuts a call, the reason stays `STOP`.
        """
        if event.error is not None:
            return event
        answer = self._answer(event.index)
        content, reasoning, calls = answer.parts(event)
        finish = event.finish
        if finish is not None:
            del self._answers[event.index]
            is_cut = finish.matched_stop is not None and answer.calls and answer.is_cut_in_a_call
            if answer.calls and finish.reason is FinishReason.STOP and not is_cut:
                finish = SequenceFinish(FinishReason.TOOL_CALLS, finish.matched_stop)
        return replace(
            event,
            text=content if self._has_content else "",
            reasoning_content=reasoning if self._has_reasoning else "",
            tool_calls=calls,
            finish=finish,
        )

    def _answer(self, index: int) -> _AnswerState:
        answer = self._answers.get(index)
        if answer is None:
            answer = self._answers[index] = _AnswerState(self._parser(), self._hidden_tokens)
        return answer
