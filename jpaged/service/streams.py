"""Delivers events from the engine thread to the readers on one event loop, in rate-limited merged messages.

    engine thread                     event loop
    put(event) -> pending - wake -> deliver -> stream.buffer - release -> read -> one message

A step puts one event per row. The first event wakes the loop and the others ride along, so a step costs one wake-up for
any number of rows, and none if all events can wait. `put` never blocks.

A message costs 0.1 ms of processor time on the server and on a client on the same machine, whatever its size; a token
of a small model takes as long. So messages are rate-limited: streams are flushed in rounds, and a round of n messages
is followed by n / rate seconds in which tokens accumulate. Each step is a round if there are few streams. A stream's
first and last tokens never wait, and others wait at most MAX_WAIT_S. Rounds need fewer wake-ups and writes than single
messages.

A slow reader also finds the events since its last read merged. A stream's memory is bounded by what its request may
generate.

    put     0:a  1:x  0:b  1:y  0:c(last)      the sequences of a request take turns
    read    1:xy                               a message takes all events of one sequence; the last event comes last
    read    0:abc
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from jpaged.types import OutputEvent, Usage

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

    Attributes:
        is_ended: the last event has arrived, read or not.
    """

    def __init__(self, bridge: Bridge, *, is_whole: bool = False) -> None:
        self._bridge = bridge
        self._buffer: dict[int, deque[OutputEvent]] = {}
        self._usage = Usage()
        self._has_events = asyncio.Event()
        self._is_whole = is_whole
        self._has_begun = False
        self._has_put = False  # used by the engine thread
        self.is_ended = False

    def put(self, event: OutputEvent) -> None:
        """Queue an event. Called by the engine thread."""
        is_urgent = event.is_last or not (self._has_put or self._is_whole)
        self._has_put = True
        self._bridge.put(self, event, is_urgent=is_urgent)

    @property
    def is_waiting(self) -> bool:
        """True if there are events that the reader may get and has not been woken for."""
        return bool(self._buffer) and not (self._is_whole or self._has_events.is_set())

    def add(self, event: OutputEvent) -> int:
        """Buffer an event, on the event loop; the first and the last event release the buffer.

        Returns:
            the number of messages released.
        """
        if self.is_ended:
            return 0
        self._buffer.setdefault(event.index, deque()).append(event)
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


class Bridge:
    """Delivers events from the engine thread to the streams of one event loop; see the module.

    Args:
        messages_per_s: message rate of all streams together; may be infinite.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, messages_per_s: float) -> None:
        self._loop = loop
        self._message_s = 1.0 / messages_per_s
        self._lock = threading.Lock()
        self._pending: list[tuple[OutputStream, OutputEvent]] = []
        self._is_woken = False
        self._is_pause = False
        # Streams with events that their readers were not woken for.
        self._waiting: dict[OutputStream, None] = {}
        self._next_round_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, stream: OutputStream, event: OutputEvent, *, is_urgent: bool) -> None:
        """Queue an event for a stream. Called by the engine thread; never blocks.

        Args:
            is_urgent: wake the loop; other events wait for the next round if one is scheduled.
        """
        with self._lock:
            self._pending.append((stream, event))
            if self._is_woken or (self._is_pause and not is_urgent):
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
        is_due = now_s >= self._next_round_s
        num_told = 0
        for stream, event in pending:
            num_told += stream.add(event)
            if stream.is_waiting:
                self._waiting[stream] = None
        self._postpone(num_told, now_s)
        if self._waiting and is_due:
            self._speak(now_s)
        if self._timer is None and (self._waiting or self._next_round_s >= now_s + _LONG_PAUSE_S):
            self._timer = self._loop.call_at(self._next_round_s, self._end_pause)
        with self._lock:
            self._is_pause = self._timer is not None

    def _speak(self, now_s: float) -> None:
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
        usage=usage,
    )
