"""A message channel between two processes: messages in order over TCP, separate from the devices' own collectives.

    | length: u32 | kind: u8 | payload |

The receiver neither unpickles nor executes data. If there is a secret, the other end is authenticated once. JAX's own
rendezvous service has no authentication: both belong on a cluster's private network.

The cluster's secret never travels. Each end proves that it knows the secret, by an answer to the other's challenge:

    process i                                          process 0
    JOIN       a nonce ───────────────────────────────>
    <─────────────────────── CHALLENGE  another nonce, HMAC-SHA256(secret, "process 0", both)
    PROOF      HMAC-SHA256(secret, "another process", both) ──>
    HELLO ...

Later messages are neither encrypted nor signed: this does not protect against an attacker who can change the traffic.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jpaged import json_text
from jpaged.errors import InternalError, Unavailable

_HEADER = struct.Struct("<IB")
_MAX_BYTES = 1 << 28
MAX_STRANGER_BYTES = 4096
"""Limit of a message of a process that has not proved its identity."""
_READ_BYTES = 1 << 16
_RETRY_S = 0.2
_CONNECT_TIMEOUT_S = 5.0
_LEAST_S = 0.001


class MessageKind(enum.IntEnum):
    """Type of a message."""

    HELLO = 1
    """A process joins: its number, and the facts that must be the same everywhere."""
    WELCOME = 2
    """All have joined: the address at which JAX's processes meet."""
    FACTS = 3
    """Facts that a process has found, for process 0 to compare."""
    SETTLED = 4
    """The outcome of that comparison, for all."""
    STEP = 5
    SAMPLE = 6
    MOVES = 7
    COLLECT = 8
    DIGEST = 9
    """Digest of the inputs of a collected step and of its sampled tokens."""
    SHUTDOWN_REQUEST = 10
    """A process received a stop signal: asks process 0 to drain."""
    FAILED = 11
    """The reason why the sender ends."""
    END = 12
    """No more messages follow; exit successfully."""
    COUNT = 13
    """A sequence's tokens are to be counted."""
    TELL = 14
    """Log-probabilities or hidden states are to be computed."""
    HEARTBEAT = 15
    """The sender is alive."""
    COLLECT_AUX = 16
    """The results of the oldest TELL are requested, by a process 0 that has no part in the replica."""
    RESULT = 17
    """The outputs of a step, or of a TELL, for a process 0 that has no part in the replica."""
    JOIN = 32
    """A process that knows a secret wants to send HELLO: a nonce."""
    CHALLENGE = 33
    """The answer: another nonce, and the proof that process 0 knows the secret."""
    PROOF = 34
    """The proof that the process knows it."""


_KINDS = frozenset(int(kind) for kind in MessageKind)


class Channel:
    """One end of a connection. Any thread may send; only one thread receives.

    Args:
        end: a connected socket, which the channel closes.
        peer: HOST:PORT of the other end, for errors.
        max_bytes: maximum size of a received message, until the other end is trusted.
    """

    def __init__(self, end: socket.socket, peer: str, max_bytes: int = _MAX_BYTES) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a step is small, and the others wait for it
        self.peer = peer
        self._socket = end
        self._max_bytes = max_bytes
        self._until_s: float | None = None
        self._lock = threading.Lock()

    def send(self, kind: MessageKind, *parts: bytes) -> None:
        """Send a message whose payload is the parts, concatenated.

        Raises:
            ConnectionError: the other end is gone; names it.
        """
        size = sum(len(part) for part in parts)
        message = b"".join((_HEADER.pack(size, kind), *parts))
        try:
            with self._lock:
                self._socket.sendall(message)
        except OSError as error:
            raise ConnectionError(f"cannot send to {self.peer}: {error}") from error

    def send_json(self, kind: MessageKind, value: Mapping[str, Any]) -> None:
        """Send a message of plain values."""
        self.send(kind, json_text.dumps(value).encode())

    def receive(self) -> tuple[MessageKind, bytearray]:
        """Wait for a message.

        Raises:
            EOFError: the other end is gone, or sent an invalid message; names it.
            TimeoutError: no complete message came within the timeout.
        """
        size, kind = _HEADER.unpack(self._read(_HEADER.size))
        if size > self._max_bytes or kind not in _KINDS:
            raise EOFError(f"{self.peer} sent an invalid message")
        return MessageKind(kind), self._read(size)

    def receive_json(self, kind: MessageKind) -> dict[str, Any]:
        """Wait for a message of one kind, with plain values.

        Raises:
            Unavailable: the other end failed; has its reason.
            InternalError: a message of another kind came.
            EOFError, TimeoutError: as in `receive`.
        """
        got, payload = self.receive()
        if got is MessageKind.FAILED:
            raise Unavailable(payload.decode(errors="replace"))
        if got is not kind:
            raise InternalError(f"expected {kind.name}, received {got.name}")
        return parse_values(payload)

    def set_timeout(self, timeout_s: float | None) -> None:
        """Set the timeout of the next messages; None waits without a limit."""
        self._socket.settimeout(timeout_s)

    def set_deadline(self, until_s: float) -> None:
        """Set a deadline, on the monotonic clock, for everything received, however slowly it comes."""
        self._until_s = until_s

    def expect(self, max_bytes: int) -> None:
        """Set the maximum message size of the other end, which is not trusted yet."""
        self._max_bytes = max_bytes

    def trust(self) -> None:
        """Trust the other end: remove the limits on size and time."""
        self._max_bytes, self._until_s = _MAX_BYTES, None
        self._socket.settimeout(None)

    def close(self) -> None:
        """Close the connection for both ends; wakes a thread that waits in `receive`. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        # grows with the received bytes, not with the size that a header claims
        buffer = bytearray(min(size, _READ_BYTES))
        begin = 0
        while begin < size:
            if begin == len(buffer):
                buffer.extend(bytes(min(size, 2 * begin) - begin))
            if self._until_s is not None:
                self._socket.settimeout(max(_LEAST_S, self._until_s - time.monotonic()))
            try:
                with memoryview(buffer) as view:
                    count = self._socket.recv_into(view[begin:])
            except TimeoutError:
                raise
            except OSError as error:
                raise EOFError(f"cannot receive from {self.peer}: {error}") from error
            if count == 0:
                raise EOFError(f"the connection to {self.peer} was closed")
            if self._until_s is not None and time.monotonic() > self._until_s:
                raise TimeoutError("timed out")
            begin += count
        return buffer


def parse_values(payload: bytes | bytearray) -> dict[str, Any]:
    """Parse the plain values of a payload.

    Raises:
        EOFError: it is no JSON object, so the sender is no jpaged process.
    """
    try:
        values = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise EOFError("the message is not JSON") from error
    if not isinstance(values, dict):
        raise EOFError("the message is not a JSON object")
    return values


def joined(host: str, port: int) -> str:
    """Format an address as HOST:PORT, or [HOST]:PORT if the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def interface_for(host: str) -> str:
    """Return the address that process 0 listens on if others connect to `host`: every interface, or loopback only."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return "::1" if host == "::1" else "127.0.0.1"
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def listen(host: str, port: int) -> socket.socket:
    """Listen at the address; port 0 takes a free one.

    Raises:
        OSError: the port cannot be bound.
    """
    interface = interface_for(host)
    is_v6 = ":" in interface
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    return socket.create_server((interface, port), family=family, dualstack_ipv6=interface == "::")


def hold_port(host: str) -> socket.socket:
    """Reserve a free port while the socket is open, for a server that shares it through SO_REUSEPORT, such as gRPC."""
    interface = interface_for(host)
    holder = socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((interface, 0))
    return holder


def connect(host: str, port: int, timeout_s: float) -> Channel:
    """Connect, with retries until the timeout: the other end may start later.

    Raises:
        Unavailable: no connection in time.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            end = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
        except OSError as error:
            if time.monotonic() >= until_s:
                raise Unavailable(
                    f"process 0 did not answer at {joined(host, port)} for {timeout_s:g} s: {error}"
                ) from error
            time.sleep(_RETRY_S)
            continue
        end.settimeout(None)
        return Channel(end, joined(host, port), MAX_STRANGER_BYTES)


_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_OPTION = "cluster_secret_file"


def prove(channel: Channel, secret: bytes) -> None:
    """Require process 0 to prove that it knows the secret, and prove that this process does.

    Raises:
        Unavailable: process 0 does not know it, or has none.
        EOFError, OSError: the other end is gone.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    channel.send(MessageKind.JOIN, mine)
    kind, payload = channel.receive()
    if kind is MessageKind.FAILED:
        raise Unavailable(payload.decode(errors="replace"))
    theirs, proof = bytes(payload[:_NONCE_BYTES]), bytes(payload[_NONCE_BYTES:])
    if kind is not MessageKind.CHALLENGE or not hmac.compare_digest(proof, _proof(secret, b"process 0", mine, theirs)):
        raise Unavailable(f"{channel.peer} is not process 0: it does not have the secret ({_OPTION})")
    channel.send(MessageKind.PROOF, _proof(secret, b"another process", mine, theirs))


def require_proof(channel: Channel, secret: bytes | None, max_hello_bytes: int) -> bytearray:
    """Wait for another process's HELLO, after its proof if there is a secret, and return the HELLO.

    Raises:
        Unavailable: it does not know the secret, or only one of the two has a secret; it receives the error.
        EOFError, OSError: the other end is gone, or too slow.
    """
    kind, payload = channel.receive()
    if kind is MessageKind.JOIN and secret is not None:
        if len(payload) != _NONCE_BYTES:
            raise EOFError(f"received a nonce of {len(payload)} bytes")
        mine, theirs = secrets.token_bytes(_NONCE_BYTES), bytes(payload)
        channel.send(MessageKind.CHALLENGE, mine, _proof(secret, b"process 0", theirs, mine))
        kind, payload = channel.receive()
        expected = _proof(secret, b"another process", theirs, mine)
        if kind is not MessageKind.PROOF or not hmac.compare_digest(bytes(payload), expected):
            raise _send_failure(channel, f"it does not have the secret ({_OPTION})")
        channel.expect(max_hello_bytes)
        kind, payload = channel.receive()
    elif kind is MessageKind.JOIN:
        raise _send_failure(channel, f"it has a secret ({_OPTION}), but process 0 has none")
    elif secret is not None:
        raise _send_failure(channel, f"it has no secret, but process 0 requires one ({_OPTION})")
    if kind is not MessageKind.HELLO:
        raise EOFError(f"HELLO was expected, {kind.name} came")
    return payload


def _proof(secret: bytes, who: bytes, nonce: bytes, other: bytes) -> bytes:
    return hmac.digest(secret, b"jpaged " + who + b"\0" + nonce + other, "sha256")


def _send_failure(channel: Channel, problem: str) -> Unavailable:
    channel.send(MessageKind.FAILED, problem.encode())
    return Unavailable(problem)
