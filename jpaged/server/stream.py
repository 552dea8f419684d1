"""From the engine's thread to asyncio: one bridge a server, one stream a request.

    engine thread                     event loop
    put(event) ─> pending ─ wake ─> deliver ─> stream.buffer ─> read ─> one message

A step puts one event for each row; the first of them wakes the loop, the others ride along, so a step costs one wake-up
however many rows it had. Putting never waits: a caller that reads slowly finds what came meanwhile merged into few
messages. What a stream can hold is bounded by what its request may generate.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from jpaged.types import OutputEvent

MAX_TOKENS_PER_MESSAGE = 4096
"""Merged events stay below it: 4096 tokens with 20 alternatives each are 1.3 MB, and clients take 4 MB by default."""


class OutputStream:
    """The events of one request, in order, for one reader. Lives on the event loop."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._buffer: deque[OutputEvent] = deque()
        self._has_events = asyncio.Event()
        self._is_ended = False

    def put(self, event: OutputEvent) -> None:
        """Takes an event; for the engine's thread."""
        self._bridge.put(self, event)

    def end(self, error: Exception, request_id: str) -> None:
        """Ends the stream for its reader after what has come so far; whatever comes later is left out."""
        self.add(OutputEvent(request_id=request_id, is_last=True, error=error))

    def add(self, event: OutputEvent) -> None:
        """Takes an event; for the event loop."""
        if not self._is_ended:
            self._is_ended = event.is_last
            self._buffer.append(event)
            self._has_events.set()

    async def read(self) -> OutputEvent:
        """Waits for an event and merges into it those that can be sent in the same message.

        Raises:
            Exception: the request failed; the error of its last event.
        """
        await self._has_events.wait()
        events = [self._buffer.popleft()]
        num_tokens = len(events[0].token_ids)
        while self._buffer and _can_follow(events[-1], self._buffer[0]):
            num_tokens += len(self._buffer[0].token_ids)
            if num_tokens > MAX_TOKENS_PER_MESSAGE:
                break
            events.append(self._buffer.popleft())
        if not self._buffer:
            self._has_events.clear()
        merged = events[0] if len(events) == 1 else _merged(events)
        if merged.error is not None:
            raise merged.error
        return merged


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


def _can_follow(event: OutputEvent, following: OutputEvent) -> bool:
    return event.index == following.index and event.finish is None and following.error is None


def _merged(events: Sequence[OutputEvent]) -> OutputEvent:
    return replace(
        events[-1],
        text="".join(event.text for event in events),
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
        logprobs=tuple(position for event in events for position in event.logprobs),
    )
