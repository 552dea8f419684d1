"""Frames between a server and the process that renders: one byte of kind, four of length, UTF-8.

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
    """Content of a frame."""

    QUESTION = b"q"
    """Template, variables, messages, tools and limits, as JSON."""
    TEMPLATE = b"s"
    """A template; the child replies with its variables."""
    NAMES = b"n"
    """The variables that a template reads before it sets them, as JSON."""
    RENDERED = b"t"
    """The text."""
    RAISED = b"r"
    """The message that the template raised by `raise_exception`."""
    FAILED = b"f"
    """The error that running it raised."""
    OVER = b"o"
    """The memory limit that it exceeded."""
    LONG = b"l"
    """The number of bytes rendered, which is over the limit."""


def send(connection: socket.socket, kind: Kind, text: str) -> None:
    """Send one frame."""
    payload = text.encode()
    connection.sendall(_HEAD.pack(kind.value, len(payload)) + payload)


def receive(frames: IO[bytes]) -> tuple[Kind, str]:
    """Read one frame from a socket's file. Blocks.

    Raises:
        EOFError: the peer has closed.
        TimeoutError: the socket's timeout has passed.
    """
    kind, length = _HEAD.unpack(_read(frames, _HEAD.size))
    return Kind(kind), _read(frames, length).decode()


def _read(frames: IO[bytes], count: int) -> bytes:
    content = frames.read(count)
    if len(content) < count:
        raise EOFError
    return content
