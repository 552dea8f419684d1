"""Joining of several processes: they compare options, watch each other, and end together.

    process 0   listens ── all joined, equal options ── WELCOME ── jax.distributed ── load ── serve ── END
    process i   connects ── HELLO ─────────────────────┘           jax.distributed ── load ── follow ── exit 0

Each other process has a connection to process 0 (`channel.py`), separate from the devices' collectives. It detects a
process's death at once: a thread waits on it, while device threads may hang in a collective that never ends.
If a process is lost or differs, all end.

Process 0 greets each incoming connection on its own thread, so strangers block no one. Until it has identified itself,
the other end has a few seconds in total and may send little. If too many connections wait at once, the oldest one is
closed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jaxlib.version

from jpaged import json_text
from jpaged.config import EngineConfig
from jpaged.device.multihost.channel import (
    MAX_STRANGER_BYTES,
    Channel,
    MessageKind,
    connect,
    hold_port,
    interface_for,
    joined,
    listen,
    parse_values,
    prove,
    require_proof,
)
from jpaged.device.multihost.heartbeats import Heartbeats, HeartbeatTimes
from jpaged.distributed_env import MultiHost
from jpaged.errors import InternalError, InvalidArgument, JpagedError, ProcessLost, Unavailable
from jpaged.version import __version__

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
class JoinedProcess:
    """A process that has identified itself."""

    channel: Channel
    process: int
    facts: dict[str, str]


class JoiningProcesses:
    """The processes that connect to a listener, in the order in which they identified themselves.

    Args:
        secret: that processes must prove to know; None accepts any process.
    """

    def __init__(self, listener: socket.socket, secret: bytes | None) -> None:
        self._listener = listener
        self._secret = secret
        self._arrived: queue.SimpleQueue[JoinedProcess] = queue.SimpleQueue()
        self._greeted: dict[Channel, None] = {}  # in the order of their connections
        self._lock = threading.Lock()
        self._was_greeted = threading.Condition(self._lock)
        self._has_ended = threading.Event()
        self._takes = True
        self._acceptor = threading.Thread(target=self._accept, name="jpaged-arrivals", daemon=True)
        self._acceptor.start()

    def next(self, timeout_s: float) -> JoinedProcess:
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
                        channel.send(MessageKind.FAILED, why.encode()[:MAX_STRANGER_BYTES])
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
            arrival = _parse_arrival(channel, parse_values(require_proof(channel, self._secret, _MAX_HELLO_BYTES)))
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


def _parse_arrival(channel: Channel, hello: dict[str, Any]) -> JoinedProcess:
    """Parse a HELLO message.

    Raises:
        EOFError: it is invalid; names the field.
    """
    process, facts = hello.get("process_id"), hello.get("facts")
    if not isinstance(process, int) or isinstance(process, bool):
        raise EOFError("its process_id is not an integer")
    if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
        raise EOFError("its facts are not an object of strings")
    return JoinedProcess(channel, process, facts)


@contextlib.contextmanager
def arriving(listener: socket.socket, secret: bytes | None) -> Iterator[JoiningProcesses]:
    """Accept connections while the context is open; a `JpagedError` is sent to those that were not taken."""
    arrivals, why = JoiningProcesses(listener, secret), ""
    try:
        yield arrivals
    except JpagedError as error:
        why = str(error)
        raise
    finally:
        arrivals.end(why)


JAX_HEARTBEAT_TIMEOUT_S = 100
"""Timeout of JAX's own heartbeats; the heartbeats of this package detect a lost host earlier, and identify it."""
END_GRACE_S = 10.0
"""Maximum duration of an orderly shutdown, with a status for every client, after a loss."""
_DEVICES_TIMEOUT_S = 300
_MAX_REASON = 400
"""Characters of a reason in the error of a start whose processes were refused."""
_BLAME_S = 1.0
"""How long processes wait to learn which one is lost: its loss breaks collectives and connections in all of them."""
_TOGETHER = ("model", "cache", "scheduler", "parallel")
_OWN = ("num_processes", "coordinator", "process_id", "join_timeout", "cluster_secret_file")
"""Options of these sections that may differ between processes."""
_NUMBER = struct.Struct("<Q")


def leave(code: int) -> None:
    """Exit this process at once: other threads may hang in a collective, and JAX's own shutdown would wait for them."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def get_facts(config: EngineConfig, multihost: MultiHost) -> dict[str, str]:
    """Return the facts that must be the same in all processes before anything is loaded."""
    facts = {
        "jpaged version": __version__,
        "jax version": jax.__version__,
        "jaxlib version": jaxlib.version.__version__,
        "num_processes": str(multihost.num_processes),
    }
    for section in _TOGETHER:
        options = getattr(config, section)
        names = [name for name in options.__slots__ if name not in _OWN]
        facts |= {name: str(getattr(options, name)) for name in names}
    return facts


def require_same(mine: Mapping[str, Any], other: Mapping[str, Any], process_id: int) -> None:
    """Compare the facts of process 0 with those of another.

    Raises:
        InvalidArgument: names the first field that differs, and both values.
    """
    for name in (*mine, *(name for name in other if name not in mine)):
        a, b = mine.get(name, "missing"), other.get(name, "missing")
        if a != b:
            raise InvalidArgument(name, f"is {a} in process 0 and {b} in process {process_id}; they must be equal")


class LeaderServer(Protocol):
    """The server that runs process 0. Both methods may be called on any thread."""

    def fail(self, error: JpagedError) -> None:
        """End the server, because all processes must end. Called once."""
        ...

    def drain(self) -> None:
        """Drain the server: another process received a stop signal."""
        ...


class Leader:
    """The side of process 0.

    Args:
        channels: to the other processes.
        owner: notified of events, on the leader's threads.
        port_holder: keeps the port where JAX's processes meet.

    Attributes:
        failure: why all must end; None otherwise.
    """

    def __init__(
        self, channels: Mapping[int, Channel], owner: LeaderServer, port_holder: socket.socket | None = None
    ) -> None:
        self.failure: JpagedError | None = None
        self._owner = owner
        self._on_digest: dict[int, Callable[[int, bytearray], None]] = {}
        self._on_result: dict[int, Callable[[bytearray], None]] = {}
        self._num_replicas = 0
        self._channels = dict(sorted(channels.items()))
        self._port_holder = port_holder
        self._facts: dict[int, queue.SimpleQueue[bytearray]] = {i: queue.SimpleQueue() for i in channels}
        self._lock = threading.Lock()
        self._has_failed = threading.Event()
        self._is_ending = False
        self._heartbeats: Heartbeats | None = None
        self._silent: set[int] = set()
        self._watchers = [
            threading.Thread(target=self._watch, args=(i, channel), name=f"jpaged-process-{i}", daemon=True)
            for i, channel in self._channels.items()
        ]
        for watcher in self._watchers:
            watcher.start()

    @property
    def num_processes(self) -> int:
        return len(self._channels) + 1

    def send(self, kind: MessageKind, *parts: bytes, to: Iterable[int] | None = None) -> None:
        """Send a message to other processes.

        Args:
            to: their numbers; None is every other process.

        Raises:
            JpagedError: a process is lost, which is named; all must end.
        """
        for process in self._channels if to is None else to:
            try:
                self._channels[process].send(kind, *parts)
            except OSError as error:
                self.wait_for_failure(_BLAME_S)  # its last message may still arrive
                lost = _lost(process, self.num_processes, error)
                self.fail(lost)
                raise self.failure or lost from error

    def listen_for_heartbeats(self, times: HeartbeatTimes) -> None:
        """Start sending heartbeats, and fail if a process stays silent."""

        def lose(process: int) -> None:
            self._silent.add(process)
            self._channels[process].close()  # before sending the error: a process that does not read would block that
            self.fail(_lost(process, self.num_processes, times.silence))

        self._heartbeats = Heartbeats(self._channels, times, lose)

    def take_digests(self, on_digest: Callable[[int, bytearray], None], processes: Iterable[int]) -> None:
        """Add a replica: set the callback for the digests of these processes, called on the threads that receive them.

        Args:
            on_digest: called as (process, payload).
        """
        self._num_replicas += 1
        self._on_digest.update(dict.fromkeys(processes, on_digest))

    def take_results(self, on_result: Callable[[bytearray], None], process: int) -> None:
        """Set the callback for the results of a process, called on the thread that receives them."""
        self._on_result[process] = on_result

    def release_replica(self) -> bool:
        """Remove a replica; return True if it was the last one, after which the other processes may end."""
        with self._lock:
            self._num_replicas -= 1
            return self._num_replicas <= 0

    def least(self, value: int) -> int:
        """Return the minimum over all processes, for `device.executor.Least`."""
        values = [_NUMBER.unpack(facts.get())[0] for facts in self._facts.values()]
        smallest = int(min(value, *values))
        self.send(MessageKind.SETTLED, _NUMBER.pack(smallest))
        return smallest

    def agree(self, facts: Mapping[str, str]) -> None:
        """Compare the facts of the others with those of this process.

        Raises:
            InvalidArgument: a fact differs; all processes receive the error.
        """
        try:
            for process, waiting in self._facts.items():
                require_same(facts, parse_values(waiting.get()), process)
        except InvalidArgument as error:
            self.broadcast(error)
            raise
        self.send(MessageKind.SETTLED)

    def fail(self, error: JpagedError) -> None:
        """End all processes. The first error counts; if an orderly end takes longer than a grace period, exit."""
        with self._lock:
            if self.failure is not None or self._is_ending:
                return
            self.failure = error
        self._has_failed.set()
        self.broadcast(error)
        deadline = threading.Timer(END_GRACE_S, self._end_anyway)
        deadline.daemon = True
        deadline.start()
        self._owner.fail(error)

    def wait_for_failure(self, timeout_s: float) -> JpagedError | None:
        """Wait to learn which process is lost: a collective fails slightly before the connection does."""
        self._has_failed.wait(timeout_s)
        return self.failure

    def broadcast(self, error: Exception) -> None:
        """Send the error to the others, which end with it."""
        _broadcast(self._channels.values(), MessageKind.FAILED, error)

    def end(self, timeout_s: float = END_GRACE_S) -> bool:
        """Ask the others to exit successfully, and wait for them; return False on timeout. Idempotent."""
        with self._lock:
            is_first, self._is_ending = not self._is_ending, True
        if is_first:
            _broadcast(self._channels.values(), MessageKind.END)
        until_s = time.monotonic() + timeout_s
        for watcher in self._watchers:
            watcher.join(max(0.0, until_s - time.monotonic()))
        return not any(watcher.is_alive() for watcher in self._watchers)

    def _watch(self, process: int, channel: Channel) -> None:
        while True:
            try:
                kind, payload = channel.receive()
            except EOFError as error:
                if process not in self._silent:
                    self.fail(_lost(process, self.num_processes, error))
                return
            if self._heartbeats is not None:
                self._heartbeats.heard(process)
            match kind:
                case MessageKind.HEARTBEAT:
                    """Already recorded above."""
                case MessageKind.DIGEST if process in self._on_digest:
                    self._on_digest[process](process, payload)
                case MessageKind.RESULT if process in self._on_result:
                    self._on_result[process](payload)
                case MessageKind.FACTS:
                    self._facts[process].put(payload)
                case MessageKind.SHUTDOWN_REQUEST:
                    self._owner.drain()
                case MessageKind.FAILED:
                    text = payload.decode(errors="replace")
                    self.fail(ProcessLost(f"process {process} of {self.num_processes} failed: {text}"))
                case _:
                    self.fail(InternalError(f"process {process} sent an unexpected {kind.name}"))

    def _end_anyway(self) -> None:
        _LOG.error("all processes exit: %s", self.failure)
        leave(JpagedError.exit_code if self.failure is None else self.failure.exit_code)


class Follower:
    """The side of every other process. Messages of process 0 wait in a queue, in order.

    Args:
        on_end: called by the watching thread with the exit code and a message if this process must end at once.
    """

    def __init__(self, channel: Channel, multihost: MultiHost, on_end: Callable[[int, str], None]) -> None:
        self._messages: queue.SimpleQueue[tuple[MessageKind, bytearray]] = queue.SimpleQueue()
        self._on_end = on_end
        self._is_following = False
        self._channel = channel
        self._name = f"process {multihost.process_id} of {multihost.num_processes}"
        self._settled: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        self._is_ending = False
        self._was_notified = threading.Event()
        self._has_failed = False
        self._heartbeats: Heartbeats | None = None
        self._busy_since_s: float | None = None
        threading.Thread(target=self._watch, name="jpaged-process-0", daemon=True).start()

    def send(self, kind: MessageKind, *parts: bytes) -> None:
        """Send a message to process 0. The watching thread handles its loss."""
        try:
            self._channel.send(kind, *parts)
        except OSError:
            _LOG.debug("%s was not sent: process 0 is lost", kind.name)

    def least(self, value: int) -> int:
        """Return the minimum over all processes, for `device.executor.Least`."""
        self.send(MessageKind.FACTS, _NUMBER.pack(value))
        return int(_NUMBER.unpack(self._settled.get())[0])

    def agree(self, facts: Mapping[str, str]) -> None:
        """Let process 0 compare these facts; returns if they are the same, and ends the process otherwise."""
        self.send(MessageKind.FACTS, json_text.dumps(facts).encode())
        self._settled.get()

    def follow(self) -> Iterator[tuple[MessageKind, bytearray]]:
        """Yield the messages of process 0, in order; from now on the caller handles END."""
        self._is_following = True
        while True:
            self._busy_since_s = None
            message = self._messages.get()
            self._busy_since_s = time.monotonic()
            yield message

    def is_ready(self, stall_timeout_s: float) -> bool:
        """Return True if it serves and no message of process 0 has taken longer than this. Callable from any thread."""
        since_s = self._busy_since_s
        is_stalled = since_s is not None and time.monotonic() - since_s >= stall_timeout_s
        return self._is_following and not self._is_ending and not self._was_notified.is_set() and not is_stalled

    def listen_for_heartbeats(self, times: HeartbeatTimes) -> None:
        """Start sending heartbeats, and end this process if process 0 stays silent."""

        def end(process: int) -> None:
            del process
            self._was_notified.set()
            self._on_end(ProcessLost.exit_code, f"{self._name} exits: process 0 is lost: {times.silence}")

        self._heartbeats = Heartbeats({0: self._channel}, times, end)

    def wish_to_stop(self) -> None:
        """Ask process 0 to drain and end all."""
        self.send(MessageKind.SHUTDOWN_REQUEST)

    @property
    def exit_code(self) -> int:
        """Exit code of this process: its own failure, or the loss of another process."""
        return InternalError.exit_code if self._has_failed else ProcessLost.exit_code

    def report(self, error: Exception) -> None:
        """Report to process 0 why this process ends.

        If a collective may have broken, first wait a moment for a message of process 0.
        """
        is_clear = isinstance(error, JpagedError) and not isinstance(error, InternalError)
        if is_clear or not self._was_notified.wait(_BLAME_S):
            self._has_failed = True
            what = str(error) if is_clear else f"{type(error).__name__}: {error}"
            self.send(MessageKind.FAILED, what.encode())

    def _watch(self) -> None:
        while True:
            try:
                kind, payload = self._channel.receive()
            except EOFError as error:
                self._was_notified.set()
                if not self._is_ending:
                    self._on_end(self.exit_code, f"{self._name} exits: process 0 is lost: {error}")
                return
            if self._heartbeats is not None:
                self._heartbeats.heard(0)
            match kind:
                case MessageKind.HEARTBEAT:
                    """Already recorded above."""
                case MessageKind.SETTLED:
                    self._settled.put(payload)
                case MessageKind.FAILED:
                    self._was_notified.set()
                    self._on_end(self.exit_code, f"{self._name} exits: {payload.decode(errors='replace')}")
                case MessageKind.END:
                    self._is_ending = True
                    self._messages.put((kind, payload))
                    if not self._is_following:
                        self._on_end(0, f"{self._name} exits before it started")
                case _:
                    self._messages.put((kind, payload))


def lead(config: EngineConfig, multihost: MultiHost, say: Callable[[str], None], owner: LeaderServer) -> Leader:
    """Join all processes, as process 0.

    Raises:
        InvalidArgument: the address cannot be bound, or a process has other options or versions.
        Unavailable: some did not join in time; names them.
    """
    host, port = multihost.address
    secret = config.cluster_secret()
    if secret is None and interface_for(host) not in ("127.0.0.1", "::1"):
        say("process 0 accepts any connection as one of its processes: set cluster_secret_file to authenticate them")
    try:
        listener = listen(host, port)
    except OSError as error:
        raise InvalidArgument("coordinator", f"cannot listen on {multihost.coordinator}: {error}") from error
    with listener:
        port = listener.getsockname()[1]
        say(
            f"process 0 of {multihost.num_processes} waits for the others at {joined(host, port)} "
            f"(from {multihost.source})"
        )
        facts, timeout_s = get_facts(config, multihost), config.parallel.join_timeout
        channels = gather(listener, facts, multihost, timeout_s, secret)
    holder = hold_port(host)
    jax_port = holder.getsockname()[1]
    for process, channel in channels.items():
        try:
            channel.send_json(MessageKind.WELCOME, {"port": jax_port})
        except OSError as error:
            raise _lost(process, multihost.num_processes, error) from error
        channel.set_timeout(None)
    leader = Leader(channels, owner, holder)
    leader.listen_for_heartbeats(HeartbeatTimes.of(config.parallel))
    _join_devices(multihost, jax_port)
    return leader


def follow(
    config: EngineConfig, multihost: MultiHost, say: Callable[[str], None], on_end: Callable[[int, str], None]
) -> Follower:
    """Join process 0, as another process.

    Raises:
        Unavailable: process 0 did not answer in time, or refused; has the reason.
    """
    host, port = multihost.address
    say(
        f"process {multihost.process_id} of {multihost.num_processes} follows {multihost.coordinator} "
        f"(from {multihost.source})"
    )
    secret = config.cluster_secret()
    timeout_s = config.parallel.join_timeout
    channel = connect(host, port, timeout_s)
    # Process 0 waits for the others for this long, and then sends FAILED.
    channel.set_deadline(time.monotonic() + timeout_s + _BLAME_S)
    try:
        if secret is not None:
            prove(channel, secret)
        hello = json_text.dumps({"process_id": multihost.process_id, "facts": get_facts(config, multihost)}).encode()
        if secret is None and len(hello) > MAX_STRANGER_BYTES:
            needed = f"options of {len(hello)} bytes, over {MAX_STRANGER_BYTES}, require a secret between processes"
            raise InvalidArgument("cluster_secret_file", f"is missing: {needed}")
        channel.send(MessageKind.HELLO, hello)
        welcome_port = _get_port(channel.receive_json(MessageKind.WELCOME))
    except TimeoutError as error:
        channel.close()
        raise Unavailable(
            f"process 0 at {multihost.coordinator} did not answer within {timeout_s:g} s (join_timeout)"
        ) from error
    except (EOFError, OSError) as error:
        channel.close()
        raise Unavailable(
            f"process 0 at {multihost.coordinator} exited before all processes joined: {error}"
        ) from error
    except JpagedError:
        channel.close()
        raise
    channel.trust()
    follower = Follower(channel, multihost, on_end)
    follower.listen_for_heartbeats(HeartbeatTimes.of(config.parallel))
    _join_devices(multihost, welcome_port)
    return follower


def gather(
    listener: socket.socket,
    facts: Mapping[str, str],
    multihost: MultiHost,
    timeout_s: float,
    secret: bytes | None = None,
) -> dict[int, Channel]:
    """Wait until every other process has sent HELLO, with proof of the secret if there is one, and compare its facts.

    Without a secret, anyone can send a HELLO: a process that cannot join is refused, and the others are awaited.

    Raises:
        InvalidArgument: with a secret, a fact differs or a process came twice. All processes receive the error.
        Unavailable: some did not join in time; names them, and why those that came were refused.
    """
    channels: dict[int, Channel] = {}
    refused: dict[int, str] = {}
    until_s = time.monotonic() + timeout_s
    with arriving(listener, secret) as arrivals:
        try:
            while len(channels) < multihost.num_processes - 1:
                try:
                    arrival = arrivals.next(until_s - time.monotonic())
                except queue.Empty:
                    missing = sorted(set(range(1, multihost.num_processes)) - channels.keys())
                    reasons = "".join(f"; {refused[process]}" for process in missing if process in refused)
                    raise Unavailable(
                        f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))} of "
                        f"{multihost.num_processes} did not join within {timeout_s:g} s (join_timeout){reasons}"
                    ) from None
                if (problem := _find_problem(arrival, facts, multihost.num_processes)) is not None:
                    _refuse(arrival, problem)
                    continue
                try:
                    _require_new(channels, arrival.process)
                    require_same(facts, arrival.facts, arrival.process)
                except InvalidArgument as error:
                    _refuse(arrival, str(error))
                    if secret is not None:
                        raise
                    refused[arrival.process] = str(error)[:_MAX_REASON]
                    continue
                channels[arrival.process] = arrival.channel
        except JpagedError as error:
            _broadcast(channels.values(), MessageKind.FAILED, error)
            for channel in channels.values():
                channel.close()
            raise
    return channels


def _get_port(welcome: Mapping[str, Any]) -> int:
    """Return the port of a WELCOME.

    Raises:
        EOFError: it has none.
    """
    port = welcome.get("port")
    if not isinstance(port, int) or not 0 < port < 1 << 16:
        raise EOFError("the process at this address is not process 0")
    return port


def _find_problem(arrival: JoinedProcess, facts: Mapping[str, str], num_processes: int) -> str | None:
    """Return why the sender of a HELLO cannot join; None if it can."""
    if not 1 <= arrival.process < num_processes:
        return f"process_id: {arrival.process} is not from 1 to {num_processes - 1}"
    if differing := facts.keys() ^ arrival.facts.keys():
        return f"facts: only one process has {min(differing)}; all must run the same jpaged"
    return None


def _refuse(arrival: JoinedProcess, problem: str) -> None:
    """Reject a process, and continue to wait for the others."""
    _LOG.warning("refused %s: %s", arrival.channel.peer, problem)
    _broadcast([arrival.channel], MessageKind.FAILED, problem)
    arrival.channel.close()


def _require_new(channels: Mapping[int, Channel], process: int) -> None:
    if process in channels:
        raise InvalidArgument("process_id", f"{process} joined twice; every process must have its own number")


def _join_devices(multihost: MultiHost, port: int) -> None:
    """Make the devices of all processes visible to JAX in each."""
    host = multihost.address[0]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its SIGTERM handler would replace the one of this process, which drains.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        joined(host, port),
        multihost.num_processes,
        multihost.process_id,
        local_device_ids=None if multihost.local_device is None else [multihost.local_device],
        cluster_detection_method="deactivate",
        initialization_timeout=_DEVICES_TIMEOUT_S,
        heartbeat_timeout_seconds=JAX_HEARTBEAT_TIMEOUT_S,
        coordinator_bind_address=joined(interface_for(host), port),
    )


def _broadcast(channels: Iterable[Channel], kind: MessageKind, what: object = "") -> None:
    """Send to all channels; ignore those that are closed."""
    for channel in channels:
        with contextlib.suppress(OSError):
            channel.send(kind, str(what).encode()[:MAX_STRANGER_BYTES])  # longer messages are rejected before WELCOME


def _lost(process: int, num_processes: int, error: object) -> ProcessLost:
    return ProcessLost(f"process {process} of {num_processes} is lost: {error}")
