"""Publisher of a server's KV cache events: messages in order, with replay of missed ones.

    engine thread ── changes of a step ──> queue ── this thread ──> PUB      (topic, sequence number, message)
                                                        └──────────> ROUTER   from a number on: (number, message) ...
                                                                              and at the end (-1, empty)

The frames are those of vLLM: sequence numbers of 8 bytes, big-endian, from 0. Events that do not fit into the queue are
dropped with their number and counted, so subscribers see a gap that no replay can fill.

Replays are sent in parts as the subscriber reads them. Some replays run at once; one whose subscriber reads nothing for
a while is dropped. Events are sent to each subscriber as its queue allows. The queue holds no more messages than are
kept for replay, so a subscriber can request what it missed.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from jpaged.config import KVEventsOptions
from jpaged.errors import InvalidArgument
from jpaged.kvevents.encoding import Encoder
from jpaged.pool import Change

_LOG = logging.getLogger(__name__)
_MAX_KEPT_BYTES = 256 << 20
"""Maximum total size of messages kept for replay, unless there is only one."""
_MAX_ANSWERS = 64
"""Maximum number of concurrent replays; further requests wait."""
_ANSWER_MESSAGES = 64
"""Maximum number of replayed messages that wait to be read."""
_MAX_QUESTION_BYTES = 1024
_AGAIN_MS, _STALLED_S = 5, 10.0
"""Retry interval of a replay whose subscriber has no room, and time without progress after which it is dropped."""
_END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 1000
_JOIN_S = 5.0
_WAKE = "inproc://jpaged-kv-events-{}"
_numbers = itertools.count()

Clock = Callable[[], float]


@dataclass(slots=True)
class _Replay:
    """Replay that is in progress.

    Attributes:
        numbers: messages that were kept when it was requested; some may have been dropped since.
        sent_at_s: time of the last progress.
    """

    who: bytes
    numbers: deque[int]
    sent_at_s: float


class Publisher:
    """Publisher of one replica. Implements `jpaged.engine.kv_cache.events.KVEventSink`.

    Attributes:
        endpoint, replay_endpoint: bound addresses, with the actual ports.

    Args:
        encoder: encoder of the replica, whose rank is added to the ports.

    Raises:
        InvalidArgument: an address cannot be bound.
    """

    def __init__(self, options: KVEventsOptions, encoder: Encoder, clock: Clock = time.time) -> None:
        self._encoder = encoder
        self._clock = clock
        self._topic = options.kv_events_topic.encode()
        self._max_waiting = options.kv_events_buffer
        self._waiting: deque[tuple[int, float, Sequence[Change]]] = deque()
        self._kept = OrderedDict[int, bytes]()
        self._kept_bytes = 0
        self._answers: list[_Replay] = []
        self._next = 0
        self._is_closed = False
        self._context = zmq.Context()
        self._publish = self._context.socket(zmq.PUB)
        self._publish.set_hwm(options.kv_events_buffer)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.set_hwm(_ANSWER_MESSAGES)
        self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise if a message would be dropped
        self._replay.setsockopt(zmq.MAXMSGSIZE, _MAX_QUESTION_BYTES)
        name = _WAKE.format(next(_numbers))
        self._woken = self._context.socket(zmq.PULL)
        self._woken.bind(name)
        self._wake = self._context.socket(zmq.PUSH)
        self._wake.connect(name)
        try:
            self.endpoint = self._bind(self._publish, "kv_events_endpoint", options.kv_events_endpoint)
            self.replay_endpoint = self._bind(
                self._replay, "kv_events_replay_endpoint", options.kv_events_replay_endpoint
            )
        except InvalidArgument:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="jpaged-kv-events", daemon=True)
        self._thread.start()

    def publish(self, changes: Sequence[Change]) -> bool:
        """Queue the changes of a step; return False if the queue is full. Only the engine thread calls it."""
        number, self._next = self._next, self._next + 1
        if self._is_closed or len(self._waiting) >= self._max_waiting:
            return False
        self._waiting.append((number, self._clock(), changes))
        self._wake_up()
        return True

    def close(self) -> None:
        """Publish what is queued, then release the addresses. Idempotent; called after the engine has ended."""
        if not self._is_closed:
            self._is_closed = True
            self._wake_up()
            self._thread.join(_JOIN_S)
            self._wake.close(linger=0)
            if not self._thread.is_alive():
                self._context.term()

    def _wake_up(self) -> None:
        try:
            self._wake.send(b"", zmq.NOBLOCK)
        except zmq.Again:
            """The thread has many wake-ups pending already."""

    def _bind(self, socket: zmq.Socket[bytes], field: str, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        address = with_rank(endpoint, self._encoder.rank)
        socket.setsockopt(zmq.IPV6, is_ipv6(address))
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise InvalidArgument(field, f"{address}: {error.strerror}") from error
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        wait_ms: int | None = None
        try:
            while True:
                poller.register(self._replay, zmq.POLLIN if len(self._answers) < _MAX_ANSWERS else 0)
                ready = dict(poller.poll(wait_ms))
                while self._woken in ready and self._woken.poll(0):
                    self._woken.recv()
                # read after the wake-ups, of which `close` sends the last, and before events queued until then are sent
                is_closed = self._is_closed
                if self._woken in ready:
                    self._send_waiting()
                if is_closed:
                    return
                if self._replay in ready:
                    self._begin_answer(self._replay.recv_multipart())
                wait_ms = self._go_on()
        except Exception:  # top level of the thread: the server continues without events
            _LOG.exception("KV cache events stop: the publisher failed")
        finally:
            self._publish.close(linger=_LINGER_MS)
            self._replay.close(linger=_LINGER_MS)
            self._woken.close(linger=0)

    def _send_waiting(self) -> None:
        while self._waiting:
            number, time_s, changes = self._waiting[0]
            message = self._encoder.encode(changes, time_s)
            self._publish.send_multipart((self._topic, number.to_bytes(8, "big"), message))
            self._keep(number, message)
            self._waiting.popleft()

    def _keep(self, number: int, message: bytes) -> None:
        self._kept[number] = message
        self._kept_bytes += len(message)
        while len(self._kept) > self._max_waiting or (self._kept_bytes > _MAX_KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popitem(last=False)[1])

    def _begin_answer(self, frames: list[bytes]) -> None:
        """Start a replay of the kept messages from a number on."""
        if len(frames) != 3 or len(frames[2]) != 8:
            _LOG.warning("ignored a replay request for KV cache events with frames of %s bytes", [*map(len, frames)])
            return
        first = int.from_bytes(frames[2], "big")
        numbers = deque(number for number in self._kept if number >= first)
        self._answers.append(_Replay(frames[0], numbers, time.monotonic()))

    def _go_on(self) -> int | None:
        """Continue each replay; return the milliseconds until the next call, or None if there is no replay.

        Several replays of one subscriber run in sequence.
        """
        going_on, left, now_s, has_sent = set[bytes](), [], time.monotonic(), False
        for answer in self._answers:
            if answer.who not in going_on:
                num_left = len(answer.numbers)
                if self._send_more(answer, now_s):
                    continue
                has_sent |= len(answer.numbers) < num_left
                if now_s - answer.sent_at_s > _STALLED_S:
                    _LOG.warning(
                        "a subscriber does not read its replayed KV cache events: %d messages were not sent",
                        len(answer.numbers),
                    )
                    continue
            going_on.add(answer.who)
            left.append(answer)
        self._answers = left
        return None if not left else 0 if has_sent else _AGAIN_MS

    def _send_more(self, answer: _Replay, now_s: float) -> bool:
        """Send as much of a replay as fits; return True if it is complete or the subscriber is gone."""
        try:
            for _ in range(_ANSWER_MESSAGES):
                while answer.numbers and answer.numbers[0] not in self._kept:
                    answer.numbers.popleft()
                if not answer.numbers:
                    self._replay.send_multipart((answer.who, b"", _END, b""), zmq.NOBLOCK)
                    return True
                number = answer.numbers[0]
                frames = answer.who, b"", number.to_bytes(8, "big"), self._kept[number]
                self._replay.send_multipart(frames, zmq.NOBLOCK)
                answer.numbers.popleft()
                answer.sent_at_s = now_s
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return True
        return False


def with_rank(endpoint: str, rank: int) -> str:
    """Return the address of a replica: each has the next port, or a separate path."""
    if not rank:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def is_ipv6(endpoint: str) -> bool:
    """Return True for an IPv6 address, for which ZeroMQ needs an option."""
    return endpoint.startswith("tcp://[")
