"""Subscriber of a server's KV cache events: in order, with replay of missed messages and detection of restarts.

0 1 2 . . 5     a gap: 3 and 4 are requested; if the server has dropped them, all its earlier events are discarded
0 1 2 0         it has restarted, and all its earlier events are discarded; so they are after a lost connection
connected       all kept messages are requested, so that an idle server is known too
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from jpaged.errors import InvalidArgument
from jpaged.kvevents.encoding import MAX_MESSAGE_BYTES, Cleared, Event, decode
from jpaged.kvevents.publisher import is_ipv6

_LOG = logging.getLogger(__name__)
_REPLAY_TIMEOUT_MS = 2000
_JOIN_S = 5.0
_SETTLE_MS = 1000
"""A server that is idle for this long after the connection is asked once more, for events sent in between."""
_HIGH_WATER_MARK = 100_000
_MAX_KEPT = 1_000_000
"""Maximum number of messages read per replay: no server keeps more."""
_HEARTBEAT_MS, _SILENCE_MS = 5_000, 15_000
"""Heartbeat interval, and the silence after which a connection is lost, for machines that fail without closing it."""
_numbers = itertools.count()

Take = Callable[[Sequence[Event]], None]


class Subscriber:
    """Reader of one server's events, on a thread.

    Args:
        take: called on that thread with the events of each message, in order; `Cleared` discards all earlier ones.
        replay_endpoint: address for replays; None for none.
        context: ZeroMQ context, which several subscribers may share; None creates one.

    Attributes:
        is_heard: the server is connected, and its kept messages were read.

    Raises:
        InvalidArgument: an address is invalid.
    """

    def __init__(
        self,
        endpoint: str,
        take: Take,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.is_heard = False
        self._take = take
        self._order = Order()
        self._settle_ms: int | None = None
        self._is_own = context is None
        self._context = zmq.Context() if context is None else context
        self._replay_endpoint = replay_endpoint
        self._events = self._context.socket(zmq.SUB)
        self._events.set_hwm(_HIGH_WATER_MARK)
        self._events.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._events.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._events.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        self._stop = self._context.socket(zmq.PAIR)
        self._stopped = self._context.socket(zmq.PAIR)
        self._links = self._events.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._events.setsockopt(zmq.IPV6, is_ipv6(endpoint))
            self._events.connect(endpoint)
            self._events.setsockopt(zmq.SUBSCRIBE, topic.encode())
            name = f"inproc://jpaged-kv-subscriber-{next(_numbers)}"
            self._stopped.bind(name)
            self._stop.connect(name)
            if replay_endpoint is not None:
                self._asking().close(linger=0)
        except zmq.ZMQError as error:
            self._close_sockets()
            self._stop.close(linger=0)
            if self._is_own:
                self._context.term()
            raise InvalidArgument("kv_events", f"{endpoint}, {replay_endpoint}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="jpaged-kv-subscriber", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if not self._stop.closed:
            self._stop.send(b"")
            self._thread.join(_JOIN_S)
            self._stop.close(linger=0)
            if self._is_own and not self._thread.is_alive():
                self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        poller.register(self._links, zmq.POLLIN)
        try:
            while self._stopped not in (ready := dict(poller.poll(self._settle_ms))):
                if not ready:
                    self._hear_kept()
                    self._settle_ms = None
                elif self._links in ready:
                    if parse_monitor_message(self._links.recv_multipart())["event"] == zmq.EVENT_DISCONNECTED:
                        self._lose()
                    else:
                        self._begin()
                elif self._events in ready:
                    self._settle_ms = None
                    self._read(self._events.recv_multipart())
        except Exception:  # top level of the thread: the index keeps what is known
            _LOG.exception("KV cache events stop: the subscriber failed")
        finally:
            self.is_heard = False
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._events.disable_monitor()
        for socket in (self._events, self._links, self._stopped):
            socket.close(linger=0)

    def _lose(self) -> None:
        """Handle a lost connection: discard all events, those still queued included."""
        self.is_heard, self._settle_ms = False, None
        while self._events.poll(0):
            self._read(self._events.recv_multipart())
        self._order.lost()
        self._take((Cleared(),))

    def _begin(self) -> None:
        """Handle a new connection: request all messages that the server has kept."""
        if self._order.next:
            self._order.lost()
            self._take((Cleared(),))
        self._hear_kept()
        self._settle_ms = _SETTLE_MS
        self.is_heard = True

    def _hear_kept(self) -> None:
        """Read all kept messages that were not read before."""
        for number, message in self._ask(self._order.next):
            if self._order.missing_from(number) is not None:
                self._take((Cleared(),))
            self._give(number, message)
        self._order.was_replayed()

    def _read(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            _LOG.warning("ignored a message of KV cache events with frames of %s bytes", [*map(len, frames)])
            return
        number = int.from_bytes(frames[1], "big")
        if self._order.is_repeated(number):
            return
        if self._order.begins_anew(number):
            self._take((Cleared(),))
        if (first := self._order.missing_from(number)) is not None:
            self._catch_up(first, number)
        self._give(number, frames[2])

    def _catch_up(self, first: int, end: int) -> None:
        """Request the messages from `first` up to `end`, some of which the server may have dropped."""
        for number, message in self._ask(first):
            if number >= end:
                break
            if self._order.missing_from(number) is not None:
                self._take((Cleared(),))
            self._give(number, message)
        if self._order.missing_from(end) is not None:
            self._take((Cleared(),))

    def _asking(self) -> zmq.Socket[bytes]:
        """Return a new socket for a replay: a late reply to an earlier request then reaches no reader."""
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.set_hwm(_HIGH_WATER_MARK)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.IPV6, is_ipv6(str(self._replay_endpoint)))
            socket.connect(str(self._replay_endpoint))
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return socket

    def _ask(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yield the server's kept messages from a number on; stop on a timeout, or if the numbers decrease."""
        if self._replay_endpoint is None:
            return
        with self._asking() as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self._stopped, zmq.POLLIN)  # a server that is gone does not delay `close`
            for _ in range(_MAX_KEPT):
                ready = dict(poller.poll(_REPLAY_TIMEOUT_MS))
                if not ready or self._stopped in ready:
                    return
                frames = socket.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != 8 or not frames[2]:
                    return
                if (number := int.from_bytes(frames[1], "big")) < first:
                    return
                first = number + 1
                yield number, frames[2]

    def _give(self, number: int, message: bytes) -> None:
        self._order.taken(number)
        try:
            events, _ = decode(message)
        except InvalidArgument as error:
            _LOG.warning("KV cache events %d: %s", number, error)
            events = [Cleared()]
        self._take(events)


class Order:
    """Tracker of message numbers. No I/O."""

    def __init__(self) -> None:
        self._last = self._replayed_to = -1

    @property
    def next(self) -> int:
        """Return the next expected number."""
        return self._last + 1

    def lost(self) -> None:
        """Reset the state, because the next message may come from a restarted server."""
        self._last = self._replayed_to = -1

    def was_replayed(self) -> None:
        """Record the end of a replay: its messages may arrive a second time as published ones."""
        self._replayed_to = self._last

    def is_repeated(self, number: int) -> bool:
        """Return True for a message that was already replayed; the first other message ends the check."""
        if number <= self._replayed_to:
            return True
        self._replayed_to = -1
        return False

    def begins_anew(self, number: int) -> bool:
        """Return True and reset the state if the number shows that the server has restarted."""
        if number > self._last:
            return False
        self.lost()
        return True

    def missing_from(self, number: int) -> int | None:
        """Return the first missing number before this one, or None."""
        return self.next if number > self.next else None

    def taken(self, number: int) -> None:
        """Record that a message was read; earlier ones are not expected any more."""
        self._last = number
