"""Outputs of requests, by vLLM's names, and their assembly from deltas.

`Completions` assembles one `RequestOutput` at the end of a request, and `RequestOutputStream` the outputs of a stream.
`Evaluated` is the result of a score or embed call.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from jpaged.chat import ChatAnswer
from jpaged.errors import InternalError
from jpaged.sampling_params import RequestOutputKind, SamplingParams, with_python_name
from jpaged.types import (
    CompletionOutput,
    Embedding,
    EmbeddingOutput,
    LoRARequest,
    OutputEvent,
    PositionLogprobs,
    Request,
    RequestOutput,
    RequestStateStats,
    SequenceDelta,
    TokenLogprob,
    Usage,
    join_experts,
)

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Completions",
    "Counter",
    "Embedding",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Evaluated",
    "Gauge",
    "Histogram",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "PositionLogprobs",
    "RequestOutput",
    "RequestOutputStream",
    "RequestStateStats",
    "ScoringOutput",
    "ScoringRequestOutput",
    "Vector",
    "decode_logprobs",
    "decode_output",
    "new_completions",
    "without_errors",
]

Logprob = TokenLogprob
EmbeddingRequestOutput = Embedding
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """Pooled hidden states: a vector of the model's width E, or for `token_embed` an array `[T, E]`."""

    data: tuple[float, ...] | NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Similarity of two texts, -1 to 1."""

    score: float


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """Probability of each label, or its logit."""

    probs: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[_T]):
    """Result of `LLM.encode`, `LLM.score` and similar calls for one prompt or pair."""

    request_id: str
    outputs: _T
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int = 0
    finished: bool = True


ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One sequence of a beam search.

    Attributes:
        tokens: the prompt's tokens and the generated ones.
        text: the text of all tokens.
        cum_logprob: sum over the generated tokens.
        logprobs: one entry per generated token; None if not requested.
    """

    tokens: tuple[int, ...]
    text: str
    cum_logprob: float
    logprobs: tuple[PositionLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """Sequences of one prompt of `LLM.beam_search`, best first."""

    sequences: tuple[BeamSearchSequence, ...]


@dataclass(frozen=True, slots=True)
class _LabeledMetric:
    """A metric of `LLM.get_metrics`, with its Prometheus name and labels."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class CounterMetric(_LabeledMetric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class GaugeMetric(_LabeledMetric):
    """A number that rises and falls."""

    value: float


@dataclass(frozen=True, slots=True)
class VectorMetric(_LabeledMetric):
    """Counters of positions, in order."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class HistogramMetric(_LabeledMetric):
    """A distribution: upper limit of a bucket -> observations up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


Counter, Gauge, Histogram, Vector = CounterMetric, GaugeMetric, HistogramMetric, VectorMetric


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
        self._embedding: tuple[float, ...] | memoryview | None = None
        self._deltas: dict[int, list[SequenceDelta]] = {}
        self._last: SequenceDelta | None = None

    def add(self, delta: SequenceDelta) -> None:
        """Add the next delta."""
        self._prompt_logprobs += delta.prompt_logprobs
        self._embedding = delta.embedding or self._embedding
        has_more = delta.token_ids or delta.text or delta.reasoning_content or delta.tool_calls
        if not has_more and delta.routed_experts is None and delta.finish is None and not delta.is_last:
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
            weight_versions=last.weight_versions,
            routed_experts=None if last.routed_experts is None else join_experts(d.routed_experts for d in deltas),
        )


def new_completions(sampling: SamplingParams) -> Completions:
    """Return an empty `Completions` for a request with these parameters."""
    has_logprobs = sampling.returns_logprobs
    return Completions(has_logprobs=has_logprobs, has_prompt_logprobs=sampling.prompt_logprobs is not None)


def decode_logprobs(position: PositionLogprobs, decode: Callable[[int], str]) -> PositionLogprobs:
    """Return log-probabilities with the text of each token."""

    def decoded(token: TokenLogprob) -> TokenLogprob:
        return dataclasses.replace(token, decoded_token=decode(token.token_id))

    return dataclasses.replace(
        position,
        chosen=decoded(position.chosen),
        top=tuple(map(decoded, position.top)),
        asked=tuple(map(decoded, position.asked)),
    )


def decode_output(output: RequestOutput, decode: Callable[[int], str], lora: LoRARequest | None) -> RequestOutput:
    """Return an output with the text of each token with log-probabilities, and with its adapter."""
    prompt = output.prompt_logprobs
    if prompt is None and lora is None and all(one.logprobs is None for one in output.outputs):
        return output
    decoded = [
        dataclasses.replace(
            one,
            logprobs=None if one.logprobs is None else tuple(decode_logprobs(some, decode) for some in one.logprobs),
            lora_request=lora,
        )
        for one in output.outputs
    ]
    return dataclasses.replace(
        output,
        outputs=tuple(decoded),
        prompt_logprobs=prompt and tuple(some and decode_logprobs(some, decode) for some in prompt),
        lora_request=lora,
    )


@dataclass(slots=True)
class _PartialSequence:
    """A sequence of a stream so far, and how much of it was returned."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    last: SequenceDelta | None = None
    routed_experts: list[NDArray[Any] | None] = field(default_factory=list)
    num_chars: int = 0
    num_tokens: int = 0

    def add(self, delta: SequenceDelta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.last = delta
        if delta.routed_experts is not None:
            self.routed_experts.append(delta.routed_experts)

    def output(self, index: int, *, is_delta: bool, has_logprobs: bool, lora: LoRARequest | None) -> CompletionOutput:
        """Return the sequence so far, or what is new since the last call."""
        first_char, first = (self.num_chars, self.num_tokens) if is_delta else (0, 0)
        self.num_chars, self.num_tokens = len(self.text), len(self.token_ids)
        finish = None if self.last is None else self.last.finish
        return CompletionOutput(
            index=index,
            text=self.text[first_char:],
            token_ids=tuple(self.token_ids[first:]),
            cumulative_logprob=None if self.last is None else self.last.cumulative_logprob,
            logprobs=tuple(self.logprobs[first:]) if has_logprobs else None,
            finish_reason=None if finish is None else finish.reason.value,
            matched_stop=None if finish is None else finish.matched_stop,
            lora_request=lora,
            weight_versions=() if self.last is None else self.last.weight_versions,
            routed_experts=None if finish is None else join_experts(self.routed_experts),
        )


class RequestOutputStream:
    """Assembles the outputs of one request while its deltas arrive.

    Args:
        decode: returns the text of a token, for log-probabilities.
        kind: content of each output.
    """

    def __init__(
        self,
        request: Request,
        decode: Callable[[int], str],
        kind: RequestOutputKind,
        lora_request: LoRARequest | None = None,
    ) -> None:
        sampling = request.sampling
        self._request, self._decode, self._kind, self._lora_request = request, decode, kind, lora_request
        self._has_logprobs = sampling.returns_logprobs
        self._prompt_logprobs: list[PositionLogprobs | None] | None = (
            None if sampling.prompt_logprobs is None else [None]
        )
        self._embedding: tuple[float, ...] | memoryview | None = None
        self._sequences: dict[int, _PartialSequence] = {}
        self._changed: set[int] = set()
        self._last: SequenceDelta | None = None

    @property
    def is_finished(self) -> bool:
        """True after the last delta."""
        return self._last is not None and self._last.is_last

    def add(self, delta: SequenceDelta) -> None:
        """Add the next delta."""
        if delta.prompt_logprobs and self._prompt_logprobs is not None:
            self._prompt_logprobs += [decode_logprobs(one, self._decode) for one in delta.prompt_logprobs]
        self._embedding = delta.embedding or self._embedding
        self._last = delta
        if not (delta.token_ids or delta.text or delta.finish):
            return
        if delta.logprobs:
            decoded = tuple(decode_logprobs(one, self._decode) for one in delta.logprobs)
            delta = dataclasses.replace(delta, logprobs=decoded)
        self._sequences.setdefault(delta.index, _PartialSequence()).add(delta)
        self._changed.add(delta.index)

    def take(self) -> RequestOutput | None:
        """Return the next output; None if nothing is to be returned before further deltas."""
        last = self._last
        if last is None or not (last.is_last or (self._changed and self._kind is not RequestOutputKind.FINAL_ONLY)):
            return None
        is_delta = self._kind is RequestOutputKind.DELTA
        indices = sorted(self._changed if is_delta else self._sequences)
        self._changed.clear()
        request, lora = self._request, self._lora_request
        output = RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            tuple(
                self._sequences[i].output(i, is_delta=is_delta, has_logprobs=self._has_logprobs, lora=lora)
                for i in indices
            ),
            last.usage,
            finished=last.is_last,
            times=last.times,
            prompt_logprobs=None if self._prompt_logprobs is None else tuple(self._prompt_logprobs),
            embedding=self._embedding,
            lora_request=lora,
        )
        if is_delta:
            self._prompt_logprobs = None
        return output


class AsyncOutputStream:
    """A request of an event loop.

    Attributes:
        outputs: assembles its outputs.
        ready: set when there is something to take.
        ended: done after the last event, on any thread.
        error: the error that ended the request.
    """

    def __init__(self, outputs: RequestOutputStream) -> None:
        self.outputs = outputs
        self.ready = asyncio.Event()
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # a caller that stops waiting must not cancel it
        self.error: Exception | None = None

    def add(self, event: OutputEvent) -> None:
        """Add an event, on the event loop."""
        if self.error is None and event.error is not None:
            self.error = with_python_name(event.error)
        self.outputs.add(event)
        self.ready.set()


class EventDelivery:
    """Delivers events of the engine thread to streams of one event loop, with one wake-up for all pending events.

    Attributes:
        num_streams: open streams; written on the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.num_streams = 0
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: list[tuple[AsyncOutputStream, OutputEvent]] = []

    def put(self, stream: AsyncOutputStream, event: OutputEvent) -> None:
        """Deliver an event soon; called on the engine thread."""
        with self._lock:
            self._pending.append((stream, event))
            is_first = len(self._pending) == 1
        if is_first:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its streams with it
                self._loop.call_soon_threadsafe(self._deliver)
        if event.is_last:
            stream.ended.set_result(None)

    def _deliver(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        for stream, event in pending:
            stream.add(event)


MakeBar = Callable[..., Any]
"""Creates a bar like `tqdm(total=..., desc=..., dynamic_ncols=...)`, with `update`, `postfix` and `close`."""


class ProgressBar:
    """A bar over requests, or none.

    By default there is a bar only on a terminal, because a library should not write into its user's logs and pipes.

    Args:
        use_tqdm: True shows a bar if stderr is a terminal, a callable creates the bar, False shows none.
        num_requests: total number of requests.
    """

    def __init__(self, use_tqdm: bool | MakeBar, num_requests: int) -> None:
        self._bar: Any = None
        self._start_s = time.perf_counter()
        self._num_prompt_tokens = self._num_output_tokens = 0
        if use_tqdm is False:
            return
        if use_tqdm is True:
            from tqdm.auto import tqdm  # a notebook would draw a widget

            use_tqdm = functools.partial(tqdm, disable=None)
        self._bar = use_tqdm(total=num_requests, desc="Processed prompts", dynamic_ncols=True)

    def note_done(self, usage: Usage) -> None:
        """Count one more finished request, with its tokens."""
        if self._bar is None:
            return
        self._num_prompt_tokens += usage.prompt_tokens
        self._num_output_tokens += usage.completion_tokens
        seconds = max(time.perf_counter() - self._start_s, 1e-9)
        inputs, outputs = self._num_prompt_tokens / seconds, self._num_output_tokens / seconds
        self._bar.postfix = f"input: {inputs:.1f} tok/s, output: {outputs:.1f} tok/s"
        self._bar.update(1)

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()


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
