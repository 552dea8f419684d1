"""Streamed answers: events of requests -> chunks of OpenAI's streams, as server-sent events. No I/O.

    completions   data: {..., "choices": [{"index", "text", "logprobs", "finish_reason"}]}
    chats         data: {..., "choices": [{"index", "delta": {"role" | "content" | ...}, "finish_reason"}]}
    at the end    data: {..., "choices": [], "usage": {...}}    if requested
                  data: [DONE]

Most events of a stream only add text: their chunk is that text between two cached byte strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jpaged import json_text
from jpaged.chat import ToolCallPiece
from jpaged.openai.bodies import Job, Streaming
from jpaged.openai.choices import (
    Heading,
    Shown,
    TextOffsets,
    TokenText,
    chat_logprobs,
    completion_logprobs,
    echoed,
    prompt_fields,
    usage_of,
)
from jpaged.types import FinishReason, PositionLogprobs, SequenceDelta, Usage

DONE = b"data: [DONE]\n\n"
_MARK = "\x00"
"""Placeholder for the text in a cached chunk."""


def sent_event(value: object) -> bytes:
    """Encode a JSON value as a server-sent event."""
    return b"".join((b"data: ", *json_text.pieces(value), b"\n\n"))


class Chunks:
    """Builds the chunks of one job. Must not be shared between threads.

    Args:
        token_text: returns the text of every token in the log-probabilities.
    """

    def __init__(self, heading: Heading, job: Job, token_text: TokenText) -> None:
        self._job = job
        self._token_text = token_text
        self._how = job.streaming or Streaming()
        self._heading = heading.as_json(is_chat=job.is_chat, is_chunk=True)
        self._usages = [Usage() for _ in job.prompts]
        self._told: list[list[PositionLogprobs]] = [[] for _ in job.prompts]
        self._begun: set[int] = set()
        self._offsets: dict[int, TextOffsets] = {}
        self._plain: dict[int, tuple[bytes, bytes]] = {}
        self._has_logprobs = job.sampling.logprobs is not None or bool(job.sampling.logprob_token_ids)
        self._is_plain = not (
            self._has_logprobs or job.has_token_ids or job.is_only_told or self._how.continuous_usage_stats
        )

    def of(
        self, number: int, event: SequenceDelta, prompt_token_ids: Sequence[int] = (), prompt_text: str = ""
    ) -> bytes:
        """Return the chunks of an event; empty if it adds nothing visible.

        Args:
            number: index of the event's prompt in the job.
            prompt_text: text of that prompt, if the job has an echo.
        """
        self._usages[number] = event.usage
        index = number * self._job.sampling.n + event.index
        is_text = event.text and event.finish is None and not (event.reasoning_content or event.tool_calls)
        if is_text and self._is_plain and index in self._begun:
            before, after = self._plain.get(index) or self._made_plain(index)
            return before + json_text.quoted(event.text) + after
        self._told[number] += event.prompt_logprobs
        if not (event.token_ids or event.text or event.finish or event.reasoning_content or event.tool_calls):
            return b""
        if self._has_logprobs and index not in self._begun and not self._job.is_chat:
            self._offsets[index] = TextOffsets.of_answer(self._job, prompt_token_ids, self._token_text)
        begin = b""
        if index not in self._begun:
            begin = self._begin(number, index, prompt_token_ids, prompt_text)
            self._begun.add(index)
            if self._begun.issuperset(range(first := number * self._job.sampling.n, first + self._job.sampling.n)):
                self._told[number] = []  # no other choice of this prompt repeats them
        return begin + self._added(number, index, event)

    def end(self) -> bytes:
        """Return the chunks after the last event."""
        if not self._how.include_usage:
            return DONE
        return sent_event({**self._heading, "choices": [], "usage": self._usage(self._usages)}) + DONE

    def _usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        usage = usage_of(usages)
        if self._job.is_only_told:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _begin(self, number: int, index: int, prompt_token_ids: Sequence[int], prompt_text: str) -> bytes:
        """Return the chunk before a choice's first token: the role of a chat, or the echo of a prompt."""
        job = self._job
        told: list[PositionLogprobs | None] | None = None
        if job.sampling.prompt_logprobs is not None:
            told = [None, *self._told[number]]
        fields = prompt_fields(job, prompt_token_ids, told, self._token_text)
        if job.is_chat:
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            return self._chunk(choice | {"finish_reason": None}, number, fields)
        if not (job.has_echo or fields):
            return b""
        logprobs = None
        if job.has_echo and told is not None:
            logprobs = self._logprobs(index, echoed(prompt_token_ids, told))
        choice = {"index": index, "text": prompt_text, "logprobs": logprobs, "finish_reason": None}
        return self._chunk(choice | {"stop_reason": None} | fields, number)

    def _added(self, number: int, index: int, event: SequenceDelta) -> bytes:
        job, finish = self._job, event.finish
        reason = None if finish is None else finish.reason.value
        stopped_by = None if finish is None else finish.matched_stop
        text, token_ids, positions = event.text, event.token_ids, event.logprobs
        if job.is_only_told:
            if finish is None:
                return b""
            reason, stopped_by, text, token_ids, positions = FinishReason.LENGTH.value, None, "", (), ()
        is_told = job.has_token_ids or positions or self._how.continuous_usage_stats
        if not (text or event.reasoning_content or event.tool_calls or finish or is_told):
            return b""
        choice: dict[str, Any] = {"index": index}
        if job.is_chat:
            choice["delta"] = _delta(event)
            choice["logprobs"] = chat_logprobs(positions, self._token_text) if positions else None
        else:
            choice["text"] = text
            choice["logprobs"] = self._logprobs(index, positions) if positions else None
        choice["finish_reason"] = reason
        if finish is not None or not job.is_chat:
            choice["stop_reason"] = stopped_by
        if job.has_token_ids:
            choice["token_ids"] = list(token_ids)
        return self._chunk(choice, number)

    def _logprobs(self, index: int, positions: Sequence[Shown]) -> dict[str, Any]:
        return completion_logprobs(positions, self._token_text, self._offsets[index])

    def _chunk(self, choice: dict[str, Any], number: int, fields: dict[str, Any] | None = None) -> bytes:
        return sent_event({**self._heading, "choices": [choice], **(fields or {}), **self._usage_so_far(number)})

    def _usage_so_far(self, number: int) -> dict[str, Any]:
        if self._how.continuous_usage_stats:
            return {"usage": self._usage([self._usages[number]])}
        return {"usage": None} if self._how.include_usage else {}

    def _made_plain(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text in a chunk that only adds text."""
        choice: dict[str, Any] = {"index": index}
        if self._job.is_chat:
            choice |= {"delta": {"content": _MARK}, "logprobs": None, "finish_reason": None}
        else:
            choice |= {"text": _MARK, "logprobs": None, "finish_reason": None, "stop_reason": None}
        before, _, after = self._chunk(choice, 0).partition(json_text.quoted(_MARK))
        self._plain[index] = before, after
        return before, after


def _delta(event: SequenceDelta) -> dict[str, Any]:
    """Return the delta of an event: reasoning, content and calls, in that order."""
    delta: dict[str, Any] = {}
    if event.reasoning_content:
        delta["reasoning_content"] = event.reasoning_content
    if event.text:
        delta["content"] = event.text
    if event.tool_calls:
        delta["tool_calls"] = _calls(event.tool_calls)
    return delta


def _calls(pieces: Sequence[ToolCallPiece]) -> list[dict[str, Any]]:
    """Merge pieces so that each call has one: clients take several pieces in a chunk for several calls."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
        if piece.name is not None:
            call |= {"id": piece.id, "type": "function"}
            call["function"]["name"] = piece.name
        call["function"]["arguments"] += piece.arguments
    return [calls[index] for index in sorted(calls)]
