"""The answers of one chat while they come: content, reasoning and calls apart, between the engine and the wire."""

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
    """Leaves special tokens out of a text that is told in parts, where the engine had to keep them for their tags.

    Args:
        tokens: their texts, none of them empty; at least one.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self._tokens = tuple(sorted(tokens, key=len, reverse=True))
        self._any = re.compile("|".join(map(re.escape, self._tokens)))
        self._firsts = frozenset(token[0] for token in self._tokens)
        self._waiting = ""

    def push(self, text: str) -> str:
        """What is certain of the text: all but what may still become a token."""
        parts = self._any.split(self._waiting + text)
        tail = parts[-1]
        if not self._firsts.isdisjoint(tail[-len(self._tokens[0]) :]):
            parts[-1] = tail[: len(tail) - num_held(tail, self._tokens)]
        self._waiting = tail[len(parts[-1]) :]
        return "".join(parts)

    def finish(self) -> str:
        """The rest."""
        text, self._waiting = self._waiting, ""
        return text


class _Answer:
    """The answer of one sequence."""

    def __init__(self, parser: Parser, tokens: Collection[str]) -> None:
        self.parser = parser
        self.calls = False
        self._arguments: list[str] = []
        self._content = WithoutTokens(tokens) if tokens else None
        self._reasoning = WithoutTokens(tokens) if tokens else None

    def parts(self, event: OutputEvent) -> tuple[str, str, tuple[ToolCallPiece, ...]]:
        """Content, reasoning and calls that an event adds."""
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
        """Return True if the arguments of the last call are not whole."""
        try:
            json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            return True
        return False


class ChatAnswers:
    """Tells the answers of one request apart, each sequence by itself. Not for several threads.

    Args:
        parser: makes the parser of one answer.
        has_reasoning: False leaves it out.
        hidden_tokens: special tokens that are left out of content and reasoning, once their tags were read.
        has_content: False leaves it out, for answers that are calls alone: the head of a call that is cut is no text.
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
        """Takes the text of a sequence that was told elsewhere: nothing is told of it again."""
        self._answer(index).parts(OutputEvent("", index, text))

    def split(self, event: OutputEvent) -> OutputEvent:
        """An event of the engine, or several merged, whose text is content alone.

        A sequence that ends by itself and has called a tool ends with `TOOL_CALLS`. A stop string or a stop token that
        cuts a call leaves `STOP`.
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
