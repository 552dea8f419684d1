"""What travels between a server and the process that renders: a byte of kind, four of length, UTF-8.

server ──QUESTION (JSON)────────────────────────> child
       <──RENDERED, RAISED, FAILED, OVER or LONG──
       ──TEMPLATE────────────────────────────────>
       <──NAMES (JSON) or FAILED──────────────────
"""

from __future__ import annotations

import enum
import socket
import struct
from typing import IO

_HEAD = struct.Struct(">cI")


class Kind(enum.Enum):
    """What a frame holds."""

    QUESTION = b"q"
    """Template, variables, messages, tools and limits, as JSON."""
    TEMPLATE = b"s"
    """A template, whose variables are asked for."""
    NAMES = b"n"
    """The variables that a template uses and does not set before, as JSON."""
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


def receive(frames: IO[bytes]) -> tuple[Kind, str]:
    """Waits for one frame of a socket's file.

    Raises:
        EOFError: the other side has ended.
        TimeoutError: the socket has a limit of time, and it has passed.
    """
    kind, length = _HEAD.unpack(_read(frames, _HEAD.size))
    return Kind(kind), _read(frames, length).decode()


def _read(frames: IO[bytes], count: int) -> bytes:
    content = frames.read(count)
    if len(content) < count:
        raise EOFError
    return content
