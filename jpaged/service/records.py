"""What became of each call, for those who watch: traces, logs, an audit.

A face says who asks; the service keeps the record.

    face ──Caller──> Call ──> RequestRecord ──begin, end──> RequestObserver ...

A record never holds a prompt or a text that was generated.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jpaged.errors import JpagedError, reason_of
from jpaged.types import OutputEvent, RequestTimes, SamplingParams, Usage

_LOG = logging.getLogger(__name__)

TRACE_KEYS = ("traceparent", "tracestate")
"""Headers of the W3C trace context: https://www.w3.org/TR/trace-context/."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as a face has found out.

    Attributes:
        face: by which way the call came: "grpc", "http", ...
        peer: the address that it came from.
        key_id: names the key that it was let in with; "" where none is needed.
        trace: the W3C trace context that it brought: `traceparent`, `tracestate`.
        user: for whom it asks, in its own words; "" where it does not say.
    """

    face: str = ""
    peer: str = ""
    key_id: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    user: str = ""


NOBODY = Caller()
"""Who asks where no face says it."""


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """One call from its arrival to its end; observers read it, and the service alone writes it, by verbs.

    A call of several requests (Score, Embed) is one record, whose usage is that of all of them.

    Attributes:
        operation: in the words of the GenAI conventions: "text_completion", "chat", "embeddings"; and "score".
        began_s: when the call came, on the system's clock.
        ended_s: when it had ended; 0 before that.
        sampling: how it samples; None where it ended before that was known, and of calls of several requests.
        times: where the engine told them, on the engine's clock.
        clock_offset_s: what makes the engine's clock the system's, when added.
        finish_reasons: of its sequences, by their indices.
        status: how it ended, as gRPC names it: "OK", "INVALID_ARGUMENT", ...; of a caller that has gone "CANCELLED".
        reason: the name of its error, as in google.rpc.ErrorInfo; "" of success. Not its words, which may quote a
            prompt, nor the error itself, which would keep the whole call by its trace.
        headers: what the answer carries for the caller, such as the trace context of its span.
    """

    operation: str
    tenant: str
    caller: Caller
    adapter: str
    request_id: str = ""
    model: str = ""
    began_s: float = field(default_factory=time.time)
    ended_s: float = 0.0
    clock_offset_s: float = 0.0
    sampling: SamplingParams | None = None
    usage: Usage = field(default_factory=Usage)
    times: RequestTimes | None = None
    finish_reasons: dict[int, str] = field(default_factory=dict)
    status: str = "OK"
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def admitted(self, request_id: str, model: str, engine_now_s: float) -> None:
        """Note under which id it is known, and which model answers."""
        self.request_id, self.model = request_id, model
        self.clock_offset_s = time.time() - engine_now_s

    def prepared(self, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        """Note how it samples, and how long its prompt is."""
        self.sampling, self.usage = sampling, Usage(num_prompt_tokens, 0, 0)

    def told(self, event: OutputEvent) -> None:
        """Note what an event says of the request; usage only rises."""
        self.usage = event.usage
        if event.finish is not None:
            self.finish_reasons[event.index] = event.finish.reason.value
        if event.times is not None:
            self.times = event.times

    def part_ended(self, usage: Usage) -> None:
        """Add what one of several requests took."""
        mine = self.usage
        self.usage = Usage(
            mine.prompt_tokens + usage.prompt_tokens,
            mine.completion_tokens + usage.completion_tokens,
            mine.cached_tokens + usage.cached_tokens,
        )

    def answers_with(self, headers: Mapping[str, str]) -> None:
        """Have the answer carry these headers."""
        self.headers.update(headers)

    def failed(self, error: BaseException) -> None:
        """Note what it ended with; the first counts."""
        if self.status != "OK":
            return
        if isinstance(error, JpagedError):
            self.status, self.reason = error.grpc_status, reason_of(error)
        elif isinstance(error, Exception):
            self.status, self.reason = "INTERNAL", type(error).__name__
        else:
            self.status, self.reason = "CANCELLED", "CANCELLED"

    def end(self) -> None:
        """Note that it is over."""
        self.ended_s = time.time()


def parts_of(times: RequestTimes) -> list[tuple[str, float, float]]:
    """Return the parts of a request that have both ends: name, begin and end on the engine's clock."""
    begun = ("queue", times.arrival_s), ("prefill", times.first_scheduled_s), ("decode", times.first_token_s)
    ended = times.first_scheduled_s, times.first_token_s, times.last_token_s
    parts = [
        (name, begin_s, end_s)
        for (name, begin_s), end_s in zip(begun, ended, strict=True)
        if begin_s is not None and end_s is not None
    ]
    left_s = times.preempted_s
    return parts + [("preempted", *ends_s) for ends_s in zip(left_s[::2], left_s[1::2], strict=True)]


class RequestObserver(Protocol):
    """Is told of each call, on the event loop: it must not wait."""

    def begin(self, record: RequestRecord) -> None:
        """Take note of a call that has come; it may have the answer carry headers."""

    def end(self, record: RequestRecord) -> None:
        """Take note of its end."""


class Records:
    """Makes the records of a service, and tells its observers."""

    def __init__(self, observers: Sequence[RequestObserver] = ()) -> None:
        self._observers = tuple(observers)

    @contextlib.contextmanager
    def kept(self, record: RequestRecord, whole: RequestRecord | None = None) -> Iterator[RequestRecord]:
        """Keep the record of a call that lasts as long as the context; what the body raises is how it ended.

        Args:
            whole: of the call that this is a part of: nobody is told of the part, whose usage is added there.
        """
        observers = self._observers if whole is None else ()
        for observer in observers:
            _notify(observer.begin, record)
        try:
            yield record
        except BaseException as error:
            record.failed(error)
            raise
        finally:
            record.end()
            if whole is not None:
                whole.part_ended(record.usage)
            for observer in observers:
                _notify(observer.end, record)


def _notify(act: Callable[[RequestRecord], None], record: RequestRecord) -> None:
    try:
        act(record)
    except Exception:  # a request does not depend on its observers
        _LOG.exception("a request observer failed")
