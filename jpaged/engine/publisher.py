"""What a step drew -> the events that callers see. Exactly one event of a request is its last."""

from __future__ import annotations

from jpaged.engine.executor import StepOutputs
from jpaged.engine.output import OutputState
from jpaged.engine.sequence import Group, Sequence
from jpaged.engine.tokenizer import Tokenizer
from jpaged.types import (
    FinishReason,
    OutputEvent,
    PositionLogprobs,
    SequenceFinish,
    TokenLogprob,
    Usage,
)


class Publisher:
    """Owns the text side of every request in flight. Calls sinks; never touches blocks or the scheduler."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._states: dict[Sequence, OutputState] = {}

    def open(self, group: Group) -> None:
        """Begins a request: no event is sent."""
        request = group.request
        for sequence in group.sequences:
            self._states[sequence] = OutputState(
                self._tokenizer, request.prompt_token_ids, request.sampling, self._eos_token_ids
            )

    def close(self, group: Group) -> None:
        for sequence in group.sequences:
            del self._states[sequence]

    def publish(self, group: Group, sequence: Sequence, outputs: StepOutputs, row: int) -> bool:
        """Appends the token that a row drew and sends what it adds; True when the request ended with it."""
        token_id = int(outputs.token_ids_r[row])
        sequence.token_ids.append(token_id)
        sequence.num_in_flight_tokens -= 1
        sequence.cumulative_logprob += float(outputs.logprobs_r[row])
        delta = self._states[sequence].push(token_id)
        num_top = group.request.sampling.logprobs
        is_last = delta.finish is not None
        group.sink(
            OutputEvent(
                request_id=group.request.request_id,
                index=sequence.index,
                text=delta.text,
                token_ids=(token_id,),
                logprobs=() if num_top is None else (_position_logprobs(outputs, row, num_top),),
                finish=delta.finish,
                cumulative_logprob=sequence.cumulative_logprob,
                usage=_usage(group),
                is_last=is_last,
            )
        )
        return is_last

    def end(self, group: Group, reason: FinishReason) -> None:
        """Sends the last event of a request that ends between two tokens."""
        sequence = group.sequences[0]
        group.sink(
            OutputEvent(
                request_id=group.request.request_id,
                index=sequence.index,
                text=self._states[sequence].flush(),
                finish=SequenceFinish(reason),
                cumulative_logprob=sequence.cumulative_logprob,
                usage=_usage(group),
                is_last=True,
            )
        )

    def fail(self, group: Group, error: Exception) -> None:
        """Sends the last event of a request that failed."""
        group.sink(OutputEvent(request_id=group.request.request_id, usage=_usage(group), is_last=True, error=error))


def _usage(group: Group) -> Usage:
    num_prompt_tokens = len(group.request.prompt_token_ids)
    num_completion_tokens = sum(len(s.token_ids) - num_prompt_tokens for s in group.sequences)
    return Usage(prompt_tokens=num_prompt_tokens, completion_tokens=num_completion_tokens)


def _position_logprobs(outputs: StepOutputs, row: int, num_top: int) -> PositionLogprobs:
    chosen = TokenLogprob(
        token_id=int(outputs.token_ids_r[row]),
        logprob=float(outputs.logprobs_r[row]),
        rank=int(outputs.ranks_r[row]),
    )
    if not num_top or outputs.top_ids_rk is None or outputs.top_logprobs_rk is None:
        return PositionLogprobs(chosen)
    ids, values = outputs.top_ids_rk[row, :num_top].tolist(), outputs.top_logprobs_rk[row, :num_top].tolist()
    pairs = enumerate(zip(ids, values, strict=True), start=1)
    return PositionLogprobs(chosen, tuple(TokenLogprob(token_id, value, rank) for rank, (token_id, value) in pairs))
