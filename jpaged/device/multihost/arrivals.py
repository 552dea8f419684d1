"""Incoming connections of other processes to process 0, each greeted on its own thread, so strangers block no one.

Until it has identified itself, the other end has a few seconds in total and may send little. If too many connections
wait at once, the oldest one is closed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jpaged.device.multihost.channel import MAX_STRANGER_BYTES, Channel, Kind, joined, values_of
from jpaged.device.multihost.secret import require_proof
from jpaged.errors import JpagedError

_LOG = logging.getLogger(__name__)

_GREETING_S = 10.0
_MAX_GREETED = 64
_MAX_HELLO_BYTES = 1 << 16
"""Limit of the message with facts that must be the same everywhere, from a process that knows the secret."""
_LOOK_S = 0.1
_FAREWELL_S = 1.0
"""How long a failing `end` waits for processes that are still identifying themselves, so that they receive the reason.
"""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A process that has identified itself."""

    channel: Channel
    process: int
    facts: dict[str, str]


class Arrivals:
    """The processes that connect to a listener, in the order in which they identified themselves.

    Args:
        secret: that processes must prove to know; None accepts any process.
    """

    def __init__(self, listener: socket.socket, secret: bytes | None) -> None:
        self._listener = listener
        self._secret = secret
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._greeted: dict[Channel, None] = {}  # in the order of their connections
        self._lock = threading.Lock()
        self._was_greeted = threading.Condition(self._lock)
        self._has_ended = threading.Event()
        self._takes = True
        self._acceptor = threading.Thread(target=self._accept, name="jpaged-arrivals", daemon=True)
        self._acceptor.start()

    def next(self, timeout_s: float) -> Arrival:
        """Wait for the next arrival.

        Raises:
            queue.Empty: none came in time.
        """
        return self._arrived.get(timeout=max(0.0, timeout_s))

    def end(self, why: str = "") -> None:
        """Stop accepting; close the connections that were not taken.

        Args:
            why: sent to those that have identified themselves, including those that are doing so now.
        """
        self._has_ended.set()
        self._acceptor.join()
        with self._lock:
            if why:
                self._was_greeted.wait_for(lambda: not self._greeted, _FAREWELL_S)
            self._takes = False
            for channel in self._greeted:
                channel.close()
        with contextlib.suppress(queue.Empty):
            while True:
                channel = self._arrived.get_nowait().channel
                if why:
                    with contextlib.suppress(OSError):
                        channel.send(Kind.FAILED, why.encode()[:MAX_STRANGER_BYTES])
                channel.close()

    def _accept(self) -> None:
        self._listener.settimeout(_LOOK_S)
        left = _MAX_GREETED  # connections made before the end
        while left:
            left -= self._has_ended.is_set()
            try:
                end, address = self._listener.accept()
            except TimeoutError:
                if self._has_ended.is_set():
                    return
                continue
            except OSError as error:  # it closed before it was accepted, or this process has no file descriptor left
                _LOG.warning("cannot accept connections: %s", error)
                self._has_ended.wait(_LOOK_S)
                continue
            end.settimeout(None)
            channel = Channel(end, joined(*address[:2]), MAX_STRANGER_BYTES)
            channel.set_deadline(time.monotonic() + _GREETING_S)
            with self._lock:
                if len(self._greeted) >= _MAX_GREETED:
                    oldest = next(iter(self._greeted))
                    del self._greeted[oldest]
                    oldest.close()
                self._greeted[channel] = None
            threading.Thread(target=self._greet, args=(channel,), name="jpaged-greeting", daemon=True).start()

    def _greet(self, channel: Channel) -> None:
        try:
            arrival = _arrival_of(channel, values_of(require_proof(channel, self._secret, _MAX_HELLO_BYTES)))
        except (EOFError, OSError, LookupError, TypeError, ValueError, OverflowError, JpagedError) as error:
            if self._takes:  # the connection was not closed by this process
                _LOG.warning(
                    "refused a connection from %s, which is not one of this server's processes: %s", channel.peer, error
                )
            channel.close()
        else:
            channel.trust()
            with self._lock:
                if self._takes:
                    self._arrived.put(arrival)
                else:
                    channel.close()
        finally:
            with self._lock:
                self._greeted.pop(channel, None)
                self._was_greeted.notify_all()


def _arrival_of(channel: Channel, hello: dict[str, Any]) -> Arrival:
    """Parse a HELLO message.

    Raises:
        EOFError: it is invalid; names the field.
    """
    process, facts = hello.get("process_id"), hello.get("facts")
    if not isinstance(process, int) or isinstance(process, bool):
        raise EOFError("its process_id is not an integer")
    if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
        raise EOFError("its facts are not an object of strings")
    return Arrival(channel, process, facts)


@contextlib.contextmanager
def arriving(listener: socket.socket, secret: bytes | None) -> Iterator[Arrivals]:
    """Accept connections while the context is open; a `JpagedError` is sent to those that were not taken."""
    arrivals, why = Arrivals(listener, secret), ""
    try:
        yield arrivals
    except JpagedError as error:
        why = str(error)
        raise
    finally:
        arrivals.end(why)
