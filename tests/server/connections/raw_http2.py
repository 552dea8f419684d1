"""HTTP/2 by hand, for what no client of gRPC sends."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from types import TracebackType

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM = ACK = 1
END_HEADERS = 4
HEADER_TABLE_SIZE, INITIAL_WINDOW_SIZE = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def message(content: bytes, *, compressed: bool = False) -> bytes:
    """A gRPC message as it travels."""
    return bytes([compressed]) + struct.pack(">I", len(content)) + content


class Connection:
    """A client of one connection; each call ends with the status that the server sends."""

    def __init__(self, port: int, settings: Mapping[int, int] | None = None) -> None:
        self._port = port
        asked = {HEADER_TABLE_SIZE: 0, **(settings or {})}  # without a table every header comes as a literal
        self._settings = b"".join(struct.pack(">HI", key, value) for key, value in asked.items())
        self._next_stream = 1

    async def __aenter__(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.writer.write(PREFACE + frame(SETTINGS, 0, 0, self._settings))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()

    def begin(self, path: bytes, body: bytes | None, headers: tuple[tuple[bytes, bytes], ...] = ()) -> int:
        """Sends a whole call; its stream. A body of None leaves the call open."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        named = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"here")]
        named += [(b"te", b"trailers"), (b"content-type", b"application/grpc"), *headers]
        block = b"".join(_literal(name) + _string(value) for name, value in named)
        self.writer.write(frame(HEADERS, END_HEADERS, stream, block))
        if body is not None:
            self.writer.write(frame(DATA, END_STREAM, stream, body))
        return stream

    async def status(self, stream: int) -> tuple[int, str]:
        """Reads until the call ends: its grpc-status and grpc-message."""
        async with asyncio.timeout(300):
            while True:
                kind, flags, number, payload = await self.read()
                # Who answers before all of a call was read resets it after the status: a call before this one, by now.
                if kind == GOAWAY or (kind == RST_STREAM and number == stream):
                    raise ConnectionError(f"frame {kind}: {payload!r}")
                if kind == HEADERS and number == stream and flags & END_STREAM:
                    return int(_header(payload, b"grpc-status")), _header(payload, b"grpc-message").decode()

    async def read(self) -> tuple[int, int, int, bytes]:
        """The next frame: kind, flags, stream, payload. Pings and settings are answered."""
        head = await self.reader.readexactly(9)
        size, kind, flags, stream = int.from_bytes(head[:3], "big"), head[3], head[4], int.from_bytes(head[5:], "big")
        payload = await self.reader.readexactly(size)
        if kind in (PING, SETTINGS) and not flags & ACK:
            self.writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))
        return kind, flags, stream, payload


def _literal(name: bytes) -> bytes:
    return b"\x00" + _string(name)


def _string(text: bytes) -> bytes:
    """An HPACK string without Huffman coding: a length of 7 bits, or more bytes."""
    if len(text) < 127:
        return bytes([len(text)]) + text
    rest, encoded = len(text) - 127, bytearray([127])
    while rest >= 128:
        encoded.append(rest % 128 + 128)
        rest //= 128
    return bytes([*encoded, rest]) + text


def _header(block: bytes, name: bytes) -> bytes:
    """The value of a header that was sent as a literal, as gRPC sends those that change."""
    start = block.index(name) + len(name)
    size = block[start]
    return block[start + 1 : start + 1 + size] if size < 127 else block[start + 3 :]
