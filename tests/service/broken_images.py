"""Broken and hostile files of pictures, from a seed."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def picture(kind: str, height: int = 40, width: int = 56, seed: int = 0) -> bytes:
    """A file of noise in blocks."""
    rng = np.random.default_rng(seed)
    pixels = np.kron(rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8), np.ones((8, 8, 1), np.uint8))
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, kind)
    return written.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_bomb(width: int, height: int, num_rows: int | None = None, depth: int = 1) -> bytes:
    """A black PNG; its pixels take a thousandth of their size, and end after `num_rows`."""
    row = b"\0" + bytes((width * depth + 7) // 8)
    packed = zlib.compress(row * (height if num_rows is None else num_rows), 9)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def text_bomb() -> bytes:
    """A PNG whose compressed text has 8 MB."""
    packed = zlib.compress(bytes(8_000_000), 1)
    content = png_bomb(8, 8)
    return content[:33] + chunk(b"zTXt", b"Comment\0\0" + packed) + content[33:]


def fixed() -> Iterator[bytes]:
    """Files that are each broken in a way of their own."""
    gif, bmp = picture("GIF"), picture("BMP")
    yield b""
    yield b"\0"
    yield b"GIF89a"
    yield b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    yield b"%PDF-1.7\n"
    yield b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    yield b"II*\0" + bytes(100)
    yield png_bomb(1 << 20, 1 << 20, num_rows=1)
    yield png_bomb(60_000, 60_000, num_rows=100)
    yield png_bomb(0, 5)
    yield png_bomb(2_000, 2_000, num_rows=3)
    yield png_bomb(2**31 - 1, 2**31 - 1, num_rows=0)
    yield text_bomb()
    yield gif[:6] + struct.pack("<HH", 65535, 65535) + gif[10:]
    yield bmp[:18] + struct.pack("<ii", 2**31 - 1, 2**31 - 1) + bmp[26:]
    yield bmp[:18] + struct.pack("<ii", -5, 0) + bmp[26:]
    yield bmp[:28] + struct.pack("<H", 77) + bmp[30:]
    yield b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff" * 6
    yield b"\x89PNG\r\n\x1a\n" + chunk(b"tEXt", b"a\0b") * 2000
    yield b"\xff\xd8" + (b"\xff\xe1" + struct.pack(">H", 2)) * 5000


def broken(count: int, seed: int = 0) -> Iterator[bytes]:
    """Files of which nearly all are broken: those of `fixed`, then truncated, flipped and mixed ones."""
    rng = np.random.default_rng(seed)
    rest = iter(tuple(fixed()))
    for number in range(count):
        if (content := next(rest, None)) is not None:
            yield content
            continue
        kind = FORMATS[number % len(FORMATS)]
        whole = bytearray(picture(kind, seed=number))
        match number % 3:
            case 0:
                yield bytes(whole[: rng.integers(1, len(whole) * 3 // 4)])
            case 1:
                for place in rng.integers(0, min(len(whole), 64), 12):
                    whole[place] = rng.integers(256)
                yield bytes(whole)
            case _:
                other = picture(FORMATS[(number + 1) % len(FORMATS)], seed=number)
                cut = int(rng.integers(8, len(whole) // 2))
                yield bytes(whole[:cut]) + other[cut:]
