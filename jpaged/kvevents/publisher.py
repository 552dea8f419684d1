"""A server's KV events: messages in order to whoever subscribes, and again to who has missed some.

    engine's thread ── changes of a step ──> queue ── this thread ──> PUB      (topic, sequence number, message)
                                                          └──────────> ROUTER   from a number on: (number, message) ...
                                                                                and at the end (-1, nothing)

The frames are those of vLLM: sequence numbers of 8 bytes, big-endian, from 0. What the queue has no room for is
dropped with its number, so that who subscribes sees a gap that nobody can fill, and counted.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from jpaged.config import KVEventsOptions
from jpaged.errors import InvalidArgument
from jpaged.kvevents.encoding import Encoder
from jpaged.pool import Change

_LOG = logging.getLogger(__name__)
_HIGH_WATER_MARK = 100_000
_END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 1000
_JOIN_S = 5.0
_WAKE = "inproc://jpaged-kv-events-{}"
_numbers = itertools.count()

Clock = Callable[[], float]


class Publisher:
    """Tells of one replica. Implements `jpaged.engine.kv.changes.ChangeSink`.

    Attributes:
        endpoint, replay_endpoint: where it is bound, with the ports that were taken.

    Args:
        encoder: of the replica; its rank is added to the ports.

    Raises:
        InvalidArgument: an address cannot be bound.
    """

    def __init__(self, options: KVEventsOptions, encoder: Encoder, clock: Clock = time.time) -> None:
        self._encoder = encoder
        self._clock = clock
        self._topic = options.kv_events_topic.encode()
        self._max_waiting = options.kv_events_buffer
        self._waiting: deque[tuple[int, float, Sequence[Change]]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=options.kv_events_buffer)
        self._next = 0
        self._is_closed = False
        self._context = zmq.Context()
        self._publish = self._context.socket(zmq.PUB)
        self._publish.set_hwm(_HIGH_WATER_MARK)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.set_hwm(options.kv_events_buffer + 1)  # a router drops what is over it
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
        """Takes the changes of a step; False where too many steps wait already. The engine's thread calls it alone."""
        number, self._next = self._next, self._next + 1
        if self._is_closed or len(self._waiting) >= self._max_waiting:
            return False
        self._waiting.append((number, self._clock(), changes))
        self._wake_up()
        return True

    def close(self) -> None:
        """Tells what waits, and then gives the addresses back. Idempotent; called when the engine has ended."""
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
            """It has been told so often that it has yet to hear of the first time."""

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
        poller.register(self._replay, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                is_closed = self._is_closed  # before what it was closed behind is told
                if self._woken in ready:
                    while self._woken.poll(0):
                        self._woken.recv()
                    self._tell()
                if is_closed:
                    return
                if self._replay in ready:
                    self._answer(self._replay.recv_multipart())
        except Exception:  # the top of the thread: the server goes on without its events
            _LOG.exception("KV events are told no longer")
        finally:
            self._publish.close(linger=_LINGER_MS)
            self._replay.close(linger=_LINGER_MS)
            self._woken.close(linger=0)

    def _tell(self) -> None:
        while self._waiting:
            number, time_s, changes = self._waiting[0]
            message = self._encoder.encode(changes, time_s)
            self._publish.send_multipart((self._topic, number.to_bytes(8, "big"), message))
            self._kept.append((number, message))
            self._waiting.popleft()

    def _answer(self, frames: list[bytes]) -> None:
        """Sends what is kept from a number on."""
        if len(frames) != 3 or len(frames[2]) != 8:
            _LOG.warning("a request for KV events that were missed has frames of %s bytes", [*map(len, frames)])
            return
        who, _, first = frames
        for number, message in self._kept:
            if number >= int.from_bytes(first, "big"):
                self._replay.send_multipart((who, b"", number.to_bytes(8, "big"), message))
        self._replay.send_multipart((who, b"", _END, b""))


def with_rank(endpoint: str, rank: int) -> str:
    """The address of a replica: each has the next port, or a path of its own."""
    if not rank:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def is_ipv6(endpoint: str) -> bool:
    """Whether an address is one of IPv6, which ZeroMQ takes only where it is told so."""
    return endpoint.startswith("tcp://[")
