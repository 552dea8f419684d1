"""A call while it is answered: its caller, its record for observers, and the stream of its events.

    face ──Call──> Service ──RequestRecord──begin, end──> RequestObserver ...
                      └──Generation──OutputEvent──> face

A record never holds a prompt or generated text. Names that callers choose for requests, tenants, prefixes and adapters
are checked here too.

`OutputDispatcher` delivers events from the engine thread to the readers on one event loop, in rate-limited merged
messages.

    engine thread                     event loop
    put(event) -> pending - wake -> deliver -> stream.buffer - release -> read -> one message

A step puts one event per row. The first event wakes the loop and the others ride along, so a step costs one wake-up for
any number of rows, and none if all events can wait. `put` never blocks.

A message costs 0.1 ms of processor time on the server and on a client on the same machine, whatever its size; a token
of a small model takes as long. So messages are rate-limited: streams are flushed in rounds, and a round of n messages
is followed by n / rate seconds in which tokens accumulate. Each step is a round if there are few streams. A stream's
first and last tokens never wait, and others wait at most MAX_WAIT_S. Rounds need fewer wake-ups and writes than single
messages.

A sequence's tokens become due in groups of n if the stream interval is n; the first and the last ones at once. Tokens
that are not due neither wake the loop nor wait for a round.

A slow reader also finds the events since its last read merged. A stream's memory is bounded by what its request may
generate.

    put     0:a  1:x  0:b  1:y  0:c(last)      the sequences of a request take turns
    read    1:xy                               a message takes all events of one sequence; the last event comes last
    read    0:abc
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from jpaged.errors import InvalidArgument, JpagedError, get_reason
from jpaged.service.chat.output_parser import ChatOutputParser
from jpaged.types import (
    MAX_CACHE_SALT_CHARS,
    LoadedAdapter,
    OutputEvent,
    Prompt,
    RequestTimes,
    SamplingParams,
    SequenceFinish,
    Usage,
    join_experts,
)

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

    def on_event(self, event: OutputEvent) -> None:
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
            mine.image_tokens + usage.image_tokens,
        )

    def answers_with(self, headers: Mapping[str, str]) -> None:
        """Add headers to the response."""
        self.headers.update(headers)

    def failed(self, error: BaseException) -> None:
        """Record the error that ended the call; only the first counts."""
        if self.status != "OK":
            return
        if isinstance(error, JpagedError):
            self.status, self.reason = error.grpc_status, get_reason(error)
        elif isinstance(error, Exception):
            self.status, self.reason = "INTERNAL", type(error).__name__
        else:
            self.status, self.reason = "CANCELLED", "CANCELLED"

    def end(self) -> None:
        """Record the end time."""
        self.ended_s = time.time()


def get_parts(times: RequestTimes) -> list[tuple[str, float, float]]:
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
    def observing(self, record: RequestRecord, whole: RequestRecord | None = None) -> Iterator[RequestRecord]:
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


def loggable_name(name: str) -> str:
    """Return a name for logs and the audit before it is looked up; "" if it is invalid."""
    return name if is_name(name) else ""


def require_salt(salt: str) -> None:
    """Reject a cache salt that is too long."""
    if len(salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidArgument("cache_salt", f"{len(salt)} characters; at most {MAX_CACHE_SALT_CHARS}")


MAX_TOKENS_PER_MESSAGE = 16384
"""Limit of merged events, log-probabilities counted: 20 ms of the loop and 200 kB."""
MAX_WAIT_S = 0.1
"""Maximum time that a token waits for others to join its message."""
_LONG_PAUSE_S = 0.005
"""For pauses longer than this, non-urgent events do not wake the event loop; they are delivered when the pause ends."""


class OutputStream:
    """The events of one request, in order, for one reader. Bound to the event loop.

    Args:
        is_whole: the reader gets nothing before the last event.
        interval: tokens of a sequence that become due together, after the first ones.

    Attributes:
        is_ended: the last event has arrived, read or not.
    """

    def __init__(self, bridge: OutputDispatcher, *, is_whole: bool = False, interval: int = 1) -> None:
        self._bridge = bridge
        self._buffer: dict[int, deque[OutputEvent]] = {}
        self._usage = Usage()
        self._has_events = asyncio.Event()
        self._is_whole = is_whole
        self._has_begun = False
        self._is_due = False
        self._interval = interval
        self._has_put = False  # used by the engine thread, as `_num_held`
        self._num_held: dict[int, int] = {}
        self.is_ended = False

    def put(self, event: OutputEvent) -> None:
        """Queue an event. Called by the engine thread."""
        is_urgent = event.is_last or not (self._has_put or self._is_whole)
        self._has_put = True
        is_due = is_urgent or not self._is_whole
        if self._interval > 1 and is_due:
            is_due = self._completes_interval(event)
        self._bridge.put(self, event, is_urgent=is_urgent, is_due=is_due)

    def _completes_interval(self, event: OutputEvent) -> bool:
        """Return True if the tokens of a sequence are due with this event; count them otherwise."""
        is_first = event.index not in self._num_held
        num_held = self._num_held.get(event.index, 0) + len(event.token_ids)
        is_due = is_first or event.is_last or event.finish is not None or num_held >= self._interval
        self._num_held[event.index] = 0 if is_due else num_held
        return is_due

    @property
    def is_waiting(self) -> bool:
        """True if there are events that the reader may get and has not been woken for."""
        return self._is_due and bool(self._buffer) and not (self._is_whole or self._has_events.is_set())

    def add(self, event: OutputEvent, *, is_due: bool = True) -> int:
        """Buffer an event, on the event loop; the first and the last event release the buffer.

        Args:
            is_due: the buffered events may be sent in the next round.

        Returns:
            the number of messages released.
        """
        if self.is_ended:
            return 0
        self._buffer.setdefault(event.index, deque()).append(event)
        self._is_due = self._is_due or is_due
        self.is_ended = event.is_last
        if event.is_last or (self.is_waiting and not self._has_begun):
            self._has_begun = True
            return self.release()
        return 0

    def end(self, event: OutputEvent) -> None:
        """Append a last event that is not the engine's, after the engine's events so far. Called on the event loop."""
        self._bridge.deliver()
        self.add(event)

    def release(self) -> int:
        """Wake the reader for the buffered events; return the number of messages, 0 if it was woken already."""
        if self._has_events.is_set() or not self._buffer:
            return 0
        self._has_events.set()
        self._is_due = False
        return len(self._buffer)

    async def read(self) -> OutputEvent:
        """Wait for an event and merge those that fit into the same message. Usage never decreases.

        Raises:
            Exception: the request failed; the last event's error.
        """
        await self._has_events.wait()
        events = self._take()
        if not self._buffer:
            self._has_events.clear()
        merged = events[0] if len(events) == 1 else _merged(events, events[-1].usage)
        if merged.error is not None:
            raise merged.error
        # another sequence's later message came first
        if merged.usage.completion_tokens < self._usage.completion_tokens:
            return _merged(events, self._usage)
        self._usage = merged.usage
        return merged

    def _take(self) -> list[OutputEvent]:
        """Return the next sequence's events that fit into a message. The request's last event stays last."""
        index = next(iter(self._buffer))
        if self._buffer[index][-1].is_last and len(self._buffer) > 1:
            self._buffer[index] = self._buffer.pop(index)  # move it to the end of the dict
            index = next(iter(self._buffer))
        waiting = self._buffer.pop(index)
        events = [waiting.popleft()]
        num_tokens = _num_tokens(events[0])
        while waiting and events[-1].finish is None and waiting[0].error is None:
            num_tokens += _num_tokens(waiting[0])
            if num_tokens > MAX_TOKENS_PER_MESSAGE:
                break
            events.append(waiting.popleft())
        if waiting:
            self._buffer[index] = waiting
        return events


class OutputDispatcher:
    """Delivers events from the engine thread to the streams of one event loop; see the module.

    Args:
        messages_per_s: message rate of all streams together; may be infinite.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, messages_per_s: float) -> None:
        self._loop = loop
        self._message_s = 1.0 / messages_per_s
        self._lock = threading.Lock()
        self._pending: list[tuple[OutputStream, OutputEvent, bool]] = []
        self._is_woken = False
        self._is_pause = False
        # Streams with events that their readers were not woken for.
        self._waiting: dict[OutputStream, None] = {}
        self._next_round_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, stream: OutputStream, event: OutputEvent, *, is_urgent: bool, is_due: bool = True) -> None:
        """Queue an event for a stream. Called by the engine thread; never blocks.

        Args:
            is_urgent: wake the loop; other events wait for the next round if one is scheduled.
            is_due: the event may be sent in the next round; others wait for a later one of the stream.
        """
        with self._lock:
            self._pending.append((stream, event, is_due))
            if self._is_woken or not is_due or (self._is_pause and not is_urgent):
                return
            self._is_woken = True
        try:
            self._loop.call_soon_threadsafe(self.deliver)
        except RuntimeError:  # the loop is closed: the server and every reader are gone
            return

    def deliver(self) -> None:
        """Deliver the queued events, on the event loop, and begin a round if it is due."""
        with self._lock:
            pending, self._pending = self._pending, []
            self._is_woken = False
        now_s = self._loop.time()
        is_round = now_s >= self._next_round_s
        num_told = 0
        for stream, event, is_due in pending:
            num_told += stream.add(event, is_due=is_due)
            if stream.is_waiting:
                self._waiting[stream] = None
        self._postpone(num_told, now_s)
        if self._waiting and is_round:
            self._flush(now_s)
        if self._timer is None and (self._waiting or self._next_round_s >= now_s + _LONG_PAUSE_S):
            self._timer = self._loop.call_at(self._next_round_s, self._end_pause)
        with self._lock:
            self._is_pause = self._timer is not None

    def _flush(self, now_s: float) -> None:
        """Release the buffers of all waiting streams, and cancel the current pause."""
        waiting, self._waiting = self._waiting, {}
        self._postpone(sum([stream.release() for stream in waiting]), now_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_pause(self) -> None:
        """Begin the scheduled round now, even if urgent messages have moved it in the meantime."""
        self._timer, self._next_round_s = None, 0.0
        self.deliver()

    def _postpone(self, num_messages: int, now_s: float) -> None:
        """Delay the next round by the time of these messages, to at most MAX_WAIT_S from now."""
        next_s = max(now_s, self._next_round_s) + num_messages * self._message_s
        self._next_round_s = min(next_s, now_s + MAX_WAIT_S)


def _num_tokens(event: OutputEvent) -> int:
    """Return the number of tokens of an event, including its log-probabilities.

    All positions of a request have equally many log-probabilities.
    """
    num_shown = 1 + len(event.logprobs[0].top) if event.logprobs else 0
    return len(event.token_ids) + num_shown * len(event.logprobs)


def _merged(events: Sequence[OutputEvent], usage: Usage) -> OutputEvent:
    return replace(
        events[-1],
        text="".join([event.text for event in events]),
        token_ids=tuple([token_id for event in events for token_id in event.token_ids]),
        logprobs=tuple([position for event in events for position in event.logprobs]),
        prompt_logprobs=tuple([position for event in events for position in event.prompt_logprobs]),
        embedding=next((event.embedding for event in events if event.embedding), ()),
        routed_experts=None if events[-1].routed_experts is None else join_experts(e.routed_experts for e in events),
        usage=usage,
    )


@dataclass(frozen=True, slots=True)
class RemotePrefillRequest:
    """A prefill that another server requests.

    Attributes:
        cache_tenant: tenant whose cached prefixes the prompt may use and extend.
        adapter_digest: digest of the adapter that the caller expects under its name.
        num_known: leading blocks that the caller already has, in its block size.
        data_protocol: of the caller's data port; "" for none.
        block_size: tokens of a block there.
        has_same_layout: blocks are interchangeable, so they may be sent as pieces; otherwise they are only offered.
        host: numeric address of the caller.
    """

    cache_tenant: str
    adapter_digest: bytes
    num_known: int
    data_protocol: str = ""
    block_size: int = 0
    has_same_layout: bool = True
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request as a frontend passes it to the service.

    Attributes:
        read: decodes prompt and parameters; called on a thread if they are large.
        size: characters or token ids of the prompt and of resumed tokens; None for a conversation.
        request_id: id chosen by the caller; None lets the service choose.
        model: required name of the served model; None for any.
        tenant: owner of the request; "" for no particular tenant.
        remaining_s: time until the caller's deadline; None for no limit.
        is_whole: non-streaming: the caller reads only the complete result.
        adapter: name of an adapter, or a resolved adapter; "" for the base model.
        caller: identity of the caller.
        record: record of the call that this is a part of; None for an independent call.
        asked: set if another server requests the prefill.
    """

    read: Callable[[], tuple[Prompt, SamplingParams]]
    size: int | None
    request_id: str | None = None
    model: str | None = None
    tenant: str = ""
    remaining_s: float | None = None
    is_whole: bool = False
    adapter: str | LoadedAdapter = ""
    caller: Caller = NOBODY
    record: RequestRecord | None = None
    asked: RemotePrefillRequest | None = None

    def begins(self) -> RequestRecord:
        """Return the record of a call that begins."""
        operation = "chat" if self.size is None else "text_completion"
        adapter = self.adapter if isinstance(self.adapter, str) else self.adapter.name
        return RequestRecord(
            operation=operation, tenant=self.tenant, caller=self.caller, adapter=adapter and loggable_name(adapter)
        )


@dataclass(slots=True, eq=False)
class RequestHandle:
    """One admitted call and its event stream: iterate once with `async for`.

    The engine knows the request by an internal id that is never reused. A caller may reuse its id at once, and the new
    request must not receive the end of the old one.

    Attributes:
        request_id: id known to the caller.
        cache_tenant: tenant that scopes the id and the shared prefixes.
        prompt_token_ids: empty if the call ended before they were known.
        seed: sampling seed; None if nothing is sampled, or while prompt_token_ids are unknown.
        record: record for observers.
        answers: splits content, reasoning and calls of a chat; None if all text is content.
        preparing: task that makes the engine's request; None once it is submitted.
        is_over: the last event was read.
    """

    request_id: str
    engine_id: str
    cache_tenant: str
    stream: OutputStream
    forget: Callable[[RequestHandle], None]
    record: RequestRecord
    prompt_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    answers: ChatOutputParser | None = None
    preparing: asyncio.Task[Any] | None = None
    is_over: bool = False

    def end(self, finish: SequenceFinish | None = None, error: JpagedError | None = None) -> None:
        """End the stream for its reader after the events so far, and cancel the preparation of the request."""
        self.stream.end(OutputEvent(self.engine_id, finish=finish, is_last=True, error=error))
        if self.preparing is not None:
            self.preparing.cancel()

    def set_task(self, task: asyncio.Task[Any] | None, *, is_done: bool = False) -> None:
        """Attach the task that prepares the request; None cancels it unless `is_done`."""
        if task is None and self.preparing is not None and not is_done:
            self.preparing.cancel()
        self.preparing = task

    def __aiter__(self) -> AsyncIterator[OutputEvent]:
        return self

    async def __anext__(self) -> OutputEvent:
        if self.is_over:
            raise StopAsyncIteration
        try:
            event = await self.stream.read()
        except Exception as error:
            self.record.failed(error)
            raise
        self.record.on_event(event)
        if event.is_last:
            self.is_over = True
            self.forget(self)
        return event if self.answers is None else self.answers.split(event)
