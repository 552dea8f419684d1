"""From the engine's thread to asyncio: one bridge a server, one stream a request.

    engine thread                     event loop
    put(event) ─> pending ─ wake ─> deliver ─> stream.buffer ─> read ─> one message

A step puts one event for each row; the first of them wakes the loop, the others ride along, so a step costs one wake-up
however many rows it had. Putting never waits: a caller that reads slowly finds what came meanwhile merged into few
messages, each of one sequence. What a stream can hold is bounded by what its request may generate.

    put     0:a  1:x  0:b  1:y  0:c(last)      the sequences of a request take turns
    read    1:xy                               a message takes all that there is of one; the last of all waits
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
"""Merged events stay below it, their log-probabilities counted: so many take 20 ms of the loop, and are 200 kB."""


class OutputStream:
    """The events of one request, in order, for one reader. Lives on the event loop."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._buffer: dict[int, deque[OutputEvent]] = {}
        self._usage = Usage()
        self._has_events = asyncio.Event()
        self._is_ended = False

    @property
    def is_ended(self) -> bool:
        """Its last event has come, read or not."""
        return self._is_ended

    def put(self, event: OutputEvent) -> None:
        """Takes an event; for the engine's thread."""
        self._bridge.put(self, event)

    def add(self, event: OutputEvent) -> None:
        """Takes an event; for the event loop."""
        if not self._is_ended:
            self._is_ended = event.is_last
            self._buffer.setdefault(event.index, deque()).append(event)
            self._has_events.set()

    async def read(self) -> OutputEvent:
        """Waits for an event and merges into it those that can be sent in the same message; usage never falls.

        Raises:
            Exception: the request failed; the error of its last event.
        """
        await self._has_events.wait()
        events = self._take()
        if not self._buffer:
            self._has_events.clear()
        merged = events[0] if len(events) == 1 else _merged(events)
        if merged.error is not None:
            raise merged.error
        if merged.usage.completion_tokens < self._usage.completion_tokens:  # another sequence's message came first
            return replace(merged, usage=self._usage)
        self._usage = merged.usage
        return merged

    def _take(self) -> list[OutputEvent]:
        """Events of the sequence whose turn it is, as many as fit into a message. The request's last stays the last."""
        index = next(iter(self._buffer))
        if self._buffer[index][-1].is_last and len(self._buffer) > 1:
            self._buffer[index] = self._buffer.pop(index)  # to the end of the dict
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
    """Carries events from the engine's thread to the streams of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: list[tuple[OutputStream, OutputEvent]] = []
        self._is_woken = False

    def open(self) -> OutputStream:
        return OutputStream(self)

    def put(self, stream: OutputStream, event: OutputEvent) -> None:
        """Queues an event for a stream; for the engine's thread. Never waits for a reader."""
        with self._lock:
            self._pending.append((stream, event))
            if self._is_woken:
                return
            self._is_woken = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: the server is gone, and with it every reader
            return

    def _deliver(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
            self._is_woken = False
        for stream, event in pending:
            stream.add(event)


def _num_tokens(event: OutputEvent) -> int:
    """Those of its log-probabilities too; a request has as many of them at each position."""
    num_shown = 1 + len(event.logprobs[0].top) if event.logprobs else 0
    return len(event.token_ids) + num_shown * len(event.logprobs)


def _merged(events: Sequence[OutputEvent]) -> OutputEvent:
    return replace(
        events[-1],
        text="".join(event.text for event in events),
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
        logprobs=tuple(position for event in events for position in event.logprobs),
    )
