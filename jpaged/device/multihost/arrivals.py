"""Other processes as they come to process 0. Whoever connects is greeted beside the others: a stranger holds up nobody.

Until it has said who it is, the other end has few seconds for all of it, and may send little. Where there are too many
of those, the one that has been silent longest goes.
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
"""How long processes that are about to say who they are may take for it where all are told why nothing comes of it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A process that has said who it is."""

    channel: Channel
    process: int
    facts: dict[str, str]


class Arrivals:
    """Those who come to a listener, in the order in which they have said who they are.

    Args:
        secret: what they have to know; None where anybody may come.
    """

    def __init__(self, listener: socket.socket, secret: bytes | None) -> None:
        self._listener = listener
        self._secret = secret
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._greeted: dict[Channel, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        self._was_greeted = threading.Condition(self._lock)
        self._has_ended = threading.Event()
        self._takes = True
        self._acceptor = threading.Thread(target=self._accept, name="jpaged-arrivals", daemon=True)
        self._acceptor.start()

    def next(self, timeout_s: float) -> Arrival:
        """Wait for the next one; raises queue.Empty when none came in time."""
        return self._arrived.get(timeout=max(0.0, timeout_s))

    def end(self, why: str = "") -> None:
        """Take no more; those that nobody has taken are closed.

        Args:
            why: told to those among them that have said who they are, also to those that are just saying it.
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
        left = _MAX_GREETED  # of those that came before the end
        while left:
            left -= self._has_ended.is_set()
            try:
                end, address = self._listener.accept()
            except TimeoutError:
                if self._has_ended.is_set():
                    return
                continue
            except OSError as error:  # it was gone before it was there; or this process has no file left for it
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
            if self._takes:  # and so it was not closed from here
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
    """Return the process that a HELLO is of.

    Raises:
        EOFError: it is none; names the field.
    """
    process, facts = hello.get("process_id"), hello.get("facts")
    if not isinstance(process, int) or isinstance(process, bool):
        raise EOFError("its process_id is no whole number")
    if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
        raise EOFError("its facts are no texts by name")
    return Arrival(channel, process, facts)


@contextlib.contextmanager
def arriving(listener: socket.socket, secret: bytes | None) -> Iterator[Arrivals]:
    """Greet whoever comes while the context is open; an error of ours is told to those that are not taken yet."""
    arrivals, why = Arrivals(listener, secret), ""
    try:
        yield arrivals
    except JpagedError as error:
        why = str(error)
        raise
    finally:
        arrivals.end(why)
