"""Events of a request -> chunks as they come, and the end of each sequence.

    stream          chunk, chunk, ..., complete (of one sequence), ...    a chunk has only new tokens
    no stream       complete, complete, ...                               one per sequence, when all have ended

A `complete` message has all tokens of the sequence in both cases. Log-probabilities are in chunks, or in `complete` if
not streaming. Those of the prompt are in the first chunk of each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from smg_grpc_proto.generated import vllm_engine_pb2

from jpaged.server.faces.completing import size_of
from jpaged.types import OutputEvent, PositionLogprobs, RequestOutput, TokenLogprob, Usage


@dataclass(slots=True)
class _Sequence:
    """Tokens so far of a running sequence."""

    token_ids: list[int] = field(default_factory=list)
    has_begun: bool = False


class Chunks:
    """Builds the messages of one streamed request.

    Args:
        prompt_token_ids: known when the first event comes.
        num_prompt_logprobs: top log-probabilities per prompt position; None for no prompt log-probabilities.
    """

    def __init__(self, prompt_token_ids: Sequence[int], num_prompt_logprobs: int | None) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._num_prompt_logprobs = num_prompt_logprobs
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._sequences: dict[int, _Sequence] = {}

    def size_of(self, event: OutputEvent) -> int:
        """Return the amount of work to build an event's messages."""
        sequence = self._sequences.get(event.index, _Sequence())
        size = size_of(event.token_ids, event.logprobs)
        if event.finish is not None:
            size += len(sequence.token_ids)
        if self._num_prompt_logprobs is not None and not sequence.has_begun:
            size += size_of((), [*self._prompt_logprobs, *event.prompt_logprobs])
        return size

    def all_of(self, event: OutputEvent) -> list[vllm_engine_pb2.GenerateResponse]:
        """Return the messages of an event."""
        return [*self.of(event)]

    def of(self, event: OutputEvent) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """Yield the messages of an event: none before a sequence has a token or has ended."""
        self._prompt_logprobs += event.prompt_logprobs
        if not event.token_ids and event.finish is None:
            return
        sequence = self._sequences.setdefault(event.index, _Sequence())
        if event.token_ids:
            sequence.token_ids += event.token_ids
            yield self._chunk(event, is_first=not sequence.has_begun)
            sequence.has_begun = True
        if event.finish is not None:
            reason, matched = event.finish.reason.value, event.finish.matched_stop
            complete = _complete(event.index, sequence.token_ids, (reason, matched), event.usage)
            yield vllm_engine_pb2.GenerateResponse(complete=complete)

    def _chunk(self, event: OutputEvent, *, is_first: bool) -> vllm_engine_pb2.GenerateResponse:
        told = is_first and self._num_prompt_logprobs is not None
        return vllm_engine_pb2.GenerateResponse(
            chunk=vllm_engine_pb2.GenerateStreamChunk(
                token_ids=event.token_ids,
                prompt_tokens=event.usage.prompt_tokens,
                completion_tokens=len(event.token_ids),
                cached_tokens=event.usage.cached_tokens,
                output_logprobs=_output_logprobs(event.logprobs),
                input_logprobs=_input_logprobs(self._prompt_token_ids, self._prompt_logprobs) if told else None,
                index=event.index,
            )
        )


def ends_of(output: RequestOutput, num_prompt_logprobs: int | None) -> Iterator[vllm_engine_pb2.GenerateResponse]:
    """Yield the messages of a request that is not streamed; the second argument is as in `Chunks`."""
    of_prompt = None
    if num_prompt_logprobs is not None and output.prompt_logprobs is not None:
        positions = [one for one in output.prompt_logprobs if one is not None]
        of_prompt = _input_logprobs(output.prompt_token_ids, positions)
    for one in output.outputs:
        complete = _complete(one.index, one.token_ids, (one.finish_reason, one.matched_stop), output.usage)
        if (logprobs := _output_logprobs(one.logprobs or ())) is not None:
            complete.output_logprobs.CopyFrom(logprobs)
        if of_prompt is not None:
            complete.input_logprobs.CopyFrom(of_prompt)
        yield vllm_engine_pb2.GenerateResponse(complete=complete)


def _complete(
    index: int, token_ids: Sequence[int], finish: tuple[str, str | int | None], usage: Usage
) -> vllm_engine_pb2.GenerateComplete:
    reason, matched = finish
    return vllm_engine_pb2.GenerateComplete(
        output_ids=token_ids,
        finish_reason=reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=len(token_ids),
        cached_tokens=usage.cached_tokens,
        index=index,
        matched_token_id=matched if isinstance(matched, int) else None,
        matched_stop_str=matched if isinstance(matched, str) else None,
    )


def _output_logprobs(positions: Sequence[PositionLogprobs]) -> vllm_engine_pb2.OutputLogProbs | None:
    if not positions:
        return None
    has_top = any(position.top for position in positions)
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[position.chosen.logprob for position in positions],
        token_ids=[position.chosen.token_id for position in positions],
        top_logprobs=[_top(position.top) for position in positions] if has_top else (),
    )


def _input_logprobs(token_ids: Sequence[int], positions: Sequence[PositionLogprobs]) -> vllm_engine_pb2.InputLogProbs:
    """Return an entry for each token of the prompt; the first has no log-probability."""
    has_top = any(position.top for position in positions)
    none = vllm_engine_pb2.InputTokenLogProb()
    values = [vllm_engine_pb2.InputTokenLogProb(value=position.chosen.logprob) for position in positions]
    return vllm_engine_pb2.InputLogProbs(
        token_logprobs=[none, *values],
        token_ids=token_ids,
        top_logprobs=[_top(()), *(_top(position.top) for position in positions)] if has_top else (),
    )


def _top(tokens: Sequence[TokenLogprob]) -> vllm_engine_pb2.TopLogProbs:
    return vllm_engine_pb2.TopLogProbs(
        values=[one.logprob for one in tokens], token_ids=[one.token_id for one in tokens]
    )
