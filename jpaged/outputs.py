"""Assembles the deltas of one request into a `RequestOutput`, with one completion per index.

Also `Evaluated`, the result of a score or embed call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from jpaged.chat import ChatAnswer
from jpaged.errors import InternalError
from jpaged.types import CompletionOutput, PositionLogprobs, RequestOutput, SamplingParams, SequenceDelta, Usage

_T = TypeVar("_T")


class Completions:
    """The deltas of one request, in order of arrival.

    Args:
        has_logprobs: log-probabilities were requested; otherwise completions have none.
        has_prompt_logprobs: those of the prompt were requested.
    """

    def __init__(self, *, has_logprobs: bool, has_prompt_logprobs: bool = False) -> None:
        self._has_logprobs = has_logprobs
        self._has_prompt_logprobs = has_prompt_logprobs
        self._prompt_logprobs: list[PositionLogprobs | None] = [None]
        self._embedding: tuple[float, ...] | None = None
        self._deltas: dict[int, list[SequenceDelta]] = {}
        self._last: SequenceDelta | None = None

    def add(self, delta: SequenceDelta) -> None:
        """Add the next delta."""
        self._prompt_logprobs += delta.prompt_logprobs
        self._embedding = delta.embedding or self._embedding
        has_more = delta.token_ids or delta.text or delta.reasoning_content or delta.tool_calls
        if not has_more and delta.finish is None and not delta.is_last:
            return
        self._deltas.setdefault(delta.index, []).append(delta)
        self._last = delta

    def output(self, request_id: str, prompt: str | None, prompt_token_ids: tuple[int, ...]) -> RequestOutput:
        """Return the complete output, with sequences ordered by index.

        Raises:
            InternalError: the last delta is missing, or the finish of a sequence.
        """
        if self._last is None or not self._last.is_last:
            raise InternalError(f"the stream of request {request_id!r} ended without its last message")
        outputs = tuple(self._completion(index) for index in sorted(self._deltas))
        return RequestOutput(
            request_id,
            prompt,
            prompt_token_ids,
            outputs,
            self._last.usage,
            times=self._last.times,
            prompt_logprobs=tuple(self._prompt_logprobs) if self._has_prompt_logprobs else None,
            embedding=self._embedding,
        )

    def _completion(self, index: int) -> CompletionOutput:
        deltas = self._deltas[index]
        last = deltas[-1]
        if last.finish is None:
            raise InternalError(f"the stream ended without a finish reason for sequence {index}")
        return CompletionOutput(
            index=index,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            cumulative_logprob=last.cumulative_logprob,
            logprobs=tuple(p for delta in deltas for p in delta.logprobs) if self._has_logprobs else None,
            finish_reason=last.finish.reason.value,
            matched_stop=last.finish.matched_stop,
            reasoning_content="".join(delta.reasoning_content for delta in deltas),
            tool_calls=ChatAnswer.of(piece for delta in deltas for piece in delta.tool_calls).tool_calls,
        )


def new_completions(sampling: SamplingParams) -> Completions:
    """Return an empty `Completions` for a request with these parameters."""
    has_logprobs = sampling.logprobs is not None or bool(sampling.logprob_token_ids)
    return Completions(has_logprobs=has_logprobs, has_prompt_logprobs=sampling.prompt_logprobs is not None)


def without_errors(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Return the outputs of a batch; raise the first error among them."""
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs


class Evaluated(tuple[_T, ...]):
    """Results of the parts of one call, in order.

    Attributes:
        usage: total of all parts.
    """

    usage: Usage

    def __new__(cls, parts: Iterable[_T], usage: Usage) -> Evaluated[_T]:
        self = super().__new__(cls, parts)
        self.usage = usage
        return self
