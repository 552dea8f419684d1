"""Streaming answers of one chat, split into content, reasoning and tool calls between the engine and the wire."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import replace

from jpaged.chat import ContentPiece, ReasoningPiece, ToolCallPiece
from jpaged.service.chat.parsers.answer import Parser
from jpaged.service.chat.parsers.tool_parser import num_held
from jpaged.types import FinishReason, OutputEvent, SequenceFinish


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


class _Answer:
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


class ChatAnswers:
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
        self._answers: dict[int, _Answer] = {}

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

    def _answer(self, index: int) -> _Answer:
        answer = self._answers.get(index)
        if answer is None:
            answer = self._answers[index] = _Answer(self._parser(), self._hidden_tokens)
        return answer
