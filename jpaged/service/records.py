"""Records of calls for observers: traces, logs, the audit.

The frontend provides the caller; the service keeps the record.

    face ──Caller──> Call ──> RequestRecord ──begin, end──> RequestObserver ...

A record never holds a prompt or generated text.

Names that callers choose for requests, tenants, prefixes and adapters are checked here too.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jpaged.errors import InvalidArgument, JpagedError, reason_of
from jpaged.types import MAX_CACHE_SALT_CHARS, OutputEvent, RequestTimes, SamplingParams, Usage

_LOG = logging.getLogger(__name__)

TRACE_KEYS = ("traceparent", "tracestate")
"""Headers of the W3C trace context: https://www.w3.org/TR/trace-context/."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Identity of a caller, as the frontend found it.

    Attributes:
        face: the frontend: "grpc", "http", ...
        peer: the client's address.
        key_id: id of the API key; "" if none is required.
        trace: the W3C trace context of the call: `traceparent`, `tracestate`.
        user: end user as named by the client; "" if not named.
    """

    face: str = ""
    peer: str = ""
    key_id: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    user: str = ""


NOBODY = Caller()
"""Placeholder for calls without a known caller."""


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """Record of one call from arrival to end. Observers read it; only the service writes it, through its methods.

    A call of several requests (Score, Embed) has one record with their total usage.

    Attributes:
        operation: name in the GenAI conventions: "text_completion", "chat", "embeddings"; and "score".
        began_s: arrival time on the system clock.
        ended_s: end time; 0 before the end.
        sampling: sampling parameters; None if the call ended before they were known, and for calls of several requests.
        times: times reported by the engine, on the engine's clock.
        clock_offset_s: offset to add to the engine's clock to get system time.
        finish_reasons: by sequence index.
        status: final gRPC status: "OK", "INVALID_ARGUMENT", ...; "CANCELLED" if the client disconnected.
        reason: name of the error, as in google.rpc.ErrorInfo; "" on success. The message is not kept, because it may
            quote a prompt; the exception is not kept, because its traceback references the whole call.
        headers: response headers for the caller, such as the span's trace context.
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
        """Record the request id and the model."""
        self.request_id, self.model = request_id, model
        self.clock_offset_s = time.time() - engine_now_s

    def prepared(self, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        """Record the sampling parameters and the length of the prompt."""
        self.sampling, self.usage = sampling, Usage(num_prompt_tokens, 0, 0)

    def told(self, event: OutputEvent) -> None:
        """Record an event's usage, finish reason and times."""
        self.usage = event.usage
        if event.finish is not None:
            self.finish_reasons[event.index] = event.finish.reason.value
        if event.times is not None:
            self.times = event.times

    def part_ended(self, usage: Usage) -> None:
        """Add the usage of one of several requests."""
        mine = self.usage
        self.usage = Usage(
            mine.prompt_tokens + usage.prompt_tokens,
            mine.completion_tokens + usage.completion_tokens,
            mine.cached_tokens + usage.cached_tokens,
        )

    def answers_with(self, headers: Mapping[str, str]) -> None:
        """Add headers to the response."""
        self.headers.update(headers)

    def failed(self, error: BaseException) -> None:
        """Record the error that ended the call; only the first counts."""
        if self.status != "OK":
            return
        if isinstance(error, JpagedError):
            self.status, self.reason = error.grpc_status, reason_of(error)
        elif isinstance(error, Exception):
            self.status, self.reason = "INTERNAL", type(error).__name__
        else:
            self.status, self.reason = "CANCELLED", "CANCELLED"

    def end(self) -> None:
        """Record the end time."""
        self.ended_s = time.time()


def parts_of(times: RequestTimes) -> list[tuple[str, float, float]]:
    """Return the phases of a request that have both ends: name, begin and end on the engine's clock."""
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
    """Observer of calls, on the event loop; its methods must not block."""

    def begin(self, record: RequestRecord) -> None:
        """Handle a new call; may add headers to the response."""

    def end(self, record: RequestRecord) -> None:
        """Handle the end of a call."""


class Records:
    """Creates the records of a service and notifies its observers."""

    def __init__(self, observers: Sequence[RequestObserver] = ()) -> None:
        self._observers = tuple(observers)

    @contextlib.contextmanager
    def kept(self, record: RequestRecord, whole: RequestRecord | None = None) -> Iterator[RequestRecord]:
        """Keep the record of a call for the duration of the context; an exception of the body becomes its error.

        Args:
            whole: record of the call that this one is a part of. Observers are not notified of a part; its usage is
                added to `whole`.
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
    except Exception:  # an observer must not fail a request
        _LOG.exception("a request observer failed")


_NAME = re.compile(r"[\x20-\x7e]{1,128}")


def is_name(name: str) -> bool:
    """Return True if the name is valid."""
    return _NAME.fullmatch(name) is not None


def require_name(field: str, name: str) -> None:
    """Reject an invalid name."""
    if not is_name(name):
        raise InvalidArgument(field, f"{name!r} is not 1 to 128 printable ASCII characters")


def told_name(name: str) -> str:
    """Return a name for logs and the audit before it is looked up; "" if it is invalid."""
    return name if is_name(name) else ""


def require_salt(salt: str) -> None:
    """Reject a cache salt that is too long."""
    if len(salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidArgument("cache_salt", f"{len(salt)} characters; at most {MAX_CACHE_SALT_CHARS}")
