"""What travels between a server and the process that renders: a byte of kind, four of length, UTF-8.

server ──QUESTION (JSON)──────────────────> child
       <──RENDERED, RAISED, FAILED or OVER──
"""

from __future__ import annotations

import enum
import socket
import struct
import time

_HEAD = struct.Struct(">cI")
_PIECE_BYTES = 1 << 20


class Kind(enum.Enum):
    """What a frame holds."""

    QUESTION = b"q"
    """Template, variables, messages and limits, as JSON."""
    RENDERED = b"t"
    """The text."""
    RAISED = b"r"
    """The message that the template raised by `raise_exception`."""
    FAILED = b"f"
    """The error that running it raised."""
    OVER = b"o"
    """The limit of memory that it passed."""
    LONG = b"l"
    """How many bytes it rendered, more than were asked for."""


def send(connection: socket.socket, kind: Kind, text: str) -> None:
    """Sends one frame."""
    payload = text.encode()
    connection.sendall(_HEAD.pack(kind.value, len(payload)) + payload)


def receive(connection: socket.socket, until_s: float | None = None) -> tuple[Kind, str]:
    """Waits for one frame, until a time on the monotonic clock; None waits for ever.

    Raises:
        EOFError: the other side has ended.
        TimeoutError: it is later than that.
    """
    kind, length = _HEAD.unpack(_read(connection, _HEAD.size, until_s))
    return Kind(kind), _read(connection, length, until_s).decode()


def _read(connection: socket.socket, count: int, until_s: float | None) -> bytearray:
    received = bytearray()
    while len(received) < count:
        if until_s is not None:
            connection.settimeout(max(until_s - time.monotonic(), 1e-3))
        piece = connection.recv(min(count - len(received), _PIECE_BYTES))
        if not piece:
            raise EOFError
        received += piece
    return received
