"""Carries events from the engine's thread to the readers of one event loop, in as many messages as there is time for.

    engine thread                     event loop
    put(event) -> pending - wake -> deliver -> stream.buffer - release -> read -> one message

A step puts one event for each row; the first of them wakes the loop, the others ride along, so a step costs one wake-up
however many rows it had, and none where all of them can wait. Putting never waits.

A message takes 0.1 ms of processor time, of the server and of a client on the same machine, whatever it holds; a token
of a small model takes as long. So messages have a rate: streams speak in rounds, and a round of n messages is followed
by n / rate seconds in which tokens gather. Few streams speak at every step. A stream's first token and its last never
wait, and no other for more than MAX_WAIT_S. Rounds, because messages that go together take fewer wake-ups and writes.

A caller that reads slowly finds what came meanwhile merged as well. What a stream can hold is bounded by what its
request may generate.

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
MAX_WAIT_S = 0.1
"""A token waits no longer for others to go with it."""
_LONG_PAUSE_S = 0.005
"""In a pause between rounds that is longer the loop is not woken by what can wait for its end."""


class OutputStream:
    """The events of one request, in order, for one reader. Lives on the event loop.

    Args:
        is_whole: its reader is told nothing before the last event has come.

    Attributes:
        is_ended: its last event has come, read or not.
    """

    def __init__(self, bridge: Bridge, *, is_whole: bool = False) -> None:
        self._bridge = bridge
        self._buffer: dict[int, deque[OutputEvent]] = {}
        self._usage = Usage()
        self._has_events = asyncio.Event()
        self._is_whole = is_whole
        self._has_begun = False
        self._has_put = False  # of the engine's thread
        self.is_ended = False

    def put(self, event: OutputEvent) -> None:
        """Takes an event; for the engine's thread."""
        is_urgent = event.is_last or not (self._has_put or self._is_whole)
        self._has_put = True
        self._bridge.put(self, event, is_urgent=is_urgent)

    @property
    def is_waiting(self) -> bool:
        """Its reader may be told of something, and is not yet."""
        return bool(self._buffer) and not (self._is_whole or self._has_events.is_set())

    def add(self, event: OutputEvent) -> int:
        """Takes an event, for the event loop; the first and the last are released with what is there.

        Returns:
            how many messages that makes.
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
        """Takes a last event that is not the engine's, after what the engine has sent; for the event loop."""
        self._bridge.deliver()
        self.add(event)

    def release(self) -> int:
        """Lets the reader have what there is; returns how many messages that makes, none when it has it already."""
        if self._has_events.is_set() or not self._buffer:
            return 0
        self._has_events.set()
        return len(self._buffer)

    async def read(self) -> OutputEvent:
        """Waits for an event and merges into it those that can be sent in the same message; usage never falls.

        Raises:
            Exception: the request failed; the error of its last event.
        """
        await self._has_events.wait()
        events = self._take()
        if not self._buffer:
            self._has_events.clear()
        merged = events[0] if len(events) == 1 else _merged(events, events[-1].usage)
        if merged.error is not None:
            raise merged.error
        if merged.usage.completion_tokens < self._usage.completion_tokens:  # another sequence's message came first
            return _merged(events, self._usage)
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
    """Carries events from the engine's thread to the streams of one event loop; see above.

    Args:
        messages_per_s: what all streams together are sent in a second; may be infinite.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, messages_per_s: float) -> None:
        self._loop = loop
        self._message_s = 1.0 / messages_per_s
        self._lock = threading.Lock()
        self._pending: list[tuple[OutputStream, OutputEvent]] = []
        self._is_woken = False
        self._is_pause = False
        # Streams whose readers were not told of what there is, and when they are.
        self._waiting: dict[OutputStream, None] = {}
        self._next_round_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, stream: OutputStream, event: OutputEvent, *, is_urgent: bool) -> None:
        """Queues an event for a stream; for the engine's thread. Never waits for a reader.

        Args:
            is_urgent: wakes the loop; what is not urgent lies until the next round, where that is known to come.
        """
        with self._lock:
            self._pending.append((stream, event))
            if self._is_woken or (self._is_pause and not is_urgent):
                return
            self._is_woken = True
        try:
            self._loop.call_soon_threadsafe(self.deliver)
        except RuntimeError:  # the loop is closed: the server is gone, and with it every reader
            return

    def deliver(self) -> None:
        """Hands over what has come, for the event loop, and begins a round when it is time."""
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
        """Has all streams speak that have something to say; a pause that was set before is over."""
        waiting, self._waiting = self._waiting, {}
        self._postpone(sum([stream.release() for stream in waiting]), now_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_pause(self) -> None:
        """Begins the round that was set for now, whatever was sent meanwhile: who has waited for it waits no longer."""
        self._timer, self._next_round_s = None, 0.0
        self.deliver()

    def _postpone(self, num_messages: int, now_s: float) -> None:
        """Has the next round come later by the time that messages take, and MAX_WAIT_S from now at most."""
        next_s = max(now_s, self._next_round_s) + num_messages * self._message_s
        self._next_round_s = min(next_s, now_s + MAX_WAIT_S)


def _num_tokens(event: OutputEvent) -> int:
    """Counts the tokens of its log-probabilities too; a request has as many of them at each position."""
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
