"""A server's KV events as they come: in order, what was missed asked for again, a server that began anew told apart.

0 1 2 . . 5     a gap: 3 and 4 are asked for; what the server does not have any more makes all it told worthless
0 1 2 0         it has begun anew, and holds nothing of what it told before; so may one whose connection was lost
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence

import zmq

from jpaged.errors import InvalidArgument
from jpaged.kvevents.encoding import Cleared, Event, decode

_LOG = logging.getLogger(__name__)
_REPLAY_TIMEOUT_MS = 2000
_JOIN_S = 5.0
_HIGH_WATER_MARK = 100_000
_numbers = itertools.count()

Take = Callable[[Sequence[Event]], None]


class Subscriber:
    """Reads the events of one server on a thread.

    Args:
        take: given the events of each message, in order, on that thread; `Cleared` where what was told before counts no
            longer.
        replay_endpoint: who answers what was missed; None is nobody.
    """

    def __init__(self, endpoint: str, take: Take, *, replay_endpoint: str | None = None, topic: str = "") -> None:
        self._take = take
        self._order = Order()
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.set_hwm(_HIGH_WATER_MARK)
        self._stop = self._context.socket(zmq.PAIR)
        self._stopped = self._context.socket(zmq.PAIR)
        self._lost = self._events.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._replay = None
        try:
            self._events.connect(endpoint)
            self._events.setsockopt(zmq.SUBSCRIBE, topic.encode())
            name = f"inproc://jpaged-kv-subscriber-{next(_numbers)}"
            self._stopped.bind(name)
            self._stop.connect(name)
            if replay_endpoint is not None:
                self._replay = self._context.socket(zmq.DEALER)
                self._replay.set_hwm(0)
                self._replay.connect(replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidArgument("kv_events", f"{endpoint}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="jpaged-kv-subscriber", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Reads no further. Idempotent."""
        if not self._stop.closed:
            self._stop.send(b"")
            self._thread.join(_JOIN_S)
            self._stop.close(linger=0)
            if not self._thread.is_alive():
                self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        poller.register(self._lost, zmq.POLLIN)
        try:
            while self._stopped not in (ready := dict(poller.poll())):
                if self._lost in ready:
                    self._lost.recv_multipart()
                    self._order.lost()
                    self._take((Cleared(),))
                elif self._events in ready:
                    self._read(self._events.recv_multipart())
        except Exception:  # the top of the thread: whoever asks goes on with what is known
            _LOG.exception("KV events are read no longer")
        finally:
            self._events.disable_monitor()
            for socket in (self._events, self._lost, self._stopped, self._replay):
                if socket is not None:
                    socket.close(linger=0)

    def _read(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            _LOG.warning("a message of KV events has frames of %s bytes", [*map(len, frames)])
            return
        number = int.from_bytes(frames[1], "big")
        if self._order.begins_anew(number):
            self._take((Cleared(),))
        if (first := self._order.missing_from(number)) is not None:
            self._catch_up(first, number)
        self._give(number, frames[2])

    def _catch_up(self, first: int, end: int) -> None:
        """Takes the messages from `first` up to `end`, of which the server may have some."""
        for number, message in self._ask(first):
            if number >= end:
                break
            if self._order.missing_from(number) is not None:
                self._take((Cleared(),))
            self._give(number, message)
        if self._order.missing_from(end) is not None:
            self._take((Cleared(),))

    def _ask(self, first: int) -> list[tuple[int, bytes]]:
        """What the server has kept from a number on; nothing where it does not say in time."""
        if self._replay is None:
            return []
        while self._replay.poll(0):  # of an answer that was too late
            self._replay.recv_multipart()
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[int, bytes]] = []
        while self._replay.poll(_REPLAY_TIMEOUT_MS):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or not frames[2]:
                break
            found.append((int.from_bytes(frames[1], "big"), frames[2]))
        return found

    def _give(self, number: int, message: bytes) -> None:
        self._order.taken(number)
        try:
            events, _ = decode(message)
        except InvalidArgument as error:
            _LOG.warning("KV events %d: %s", number, error)
            events = [Cleared()]
        self._take(events)


class Order:
    """The numbers of messages: which come next. No I/O."""

    def __init__(self) -> None:
        self._last = -1

    def lost(self) -> None:
        """Whatever comes next may be of a server that has started again: it is as before the first."""
        self._last = -1

    def begins_anew(self, number: int) -> bool:
        """The server has started again: its numbers do not go on. Then it is as before the first."""
        if number > self._last:
            return False
        self.lost()
        return True

    def missing_from(self, number: int) -> int | None:
        """The first number before this one that did not come; None where none is missing."""
        return self._last + 1 if number > self._last + 1 else None

    def taken(self, number: int) -> None:
        """The message of a number was taken; those before it will not be any more."""
        self._last = number
