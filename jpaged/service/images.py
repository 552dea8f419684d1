"""Pictures as callers send them -> RGB pixels. Files are decoded in child processes: `python -m jpaged.service.images`.

A decoder of pictures is C code that reads bytes of strangers. A child bounds its processor time and memory, survives a
crash, and delays no thread of the server. Size and type are checked before any pixel is decoded:

    server ──number of bytes, bytes──────> child
           <──SIZE (width, height)────────        after the header
           ──GO or STOP──────────────────>
           <──PIXELS or FAILED────────────

Pixels are those of transformers' `load_image`: upright as Exif asks, then `convert("RGB")`, which drops alpha. A
picture of 16 bits keeps the upper eight. The first frame of an animation counts.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import queue
import resource
import signal
import socket
import struct
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jpaged.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 1 << 26
"""Maximum width times height: 67 million, as of a camera of 50 megapixels. Decoding takes 0.8 GB for a moment."""
MAX_FILE_BYTES = 64 << 20
CPU_S = 15.0
"""Processor time for one picture; one of MAX_PIXELS takes up to 2 s."""
_MEMORY_BYTES = 2 << 30
_ANSWER_TIMEOUT_S = 120.0
_NICENESS = 10
"""Priority of children: a core that has both to decode and to generate generates nine tenths of the time."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Names of Pillow's readers. TIFF, which has many decoders of its own, is left out."""
_PLUGINS = {"WEBP": "WebP"}
_SHOWN_FORMATS = "PNG, JPEG, WebP, GIF and BMP"
_SHOWN_CHARS = 120
_COUNT, _SIZE = struct.Struct(">Q"), struct.Struct(">II")
_HEADER, _PIXELS, _FAILED, _GO, _STOP = b"h", b"p", b"f", b"g", b"s"
_ORIENTATION = 0x0112
_DAMAGED = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, LookupError, MemoryError, OSError),
    *(RuntimeError, SyntaxError, TypeError, ValueError, Warning, struct.error),
)
"""Errors that damaged or hostile files cause in Pillow."""
CheckSize = Callable[[int, int], None]


class PictureDecoder:
    """Decodes files of pictures in a few child processes, which the first pictures start. Thread-safe.

    Args:
        num_processes: maximum number of children, and of pictures that are decoded at a time.
    """

    def __init__(self, num_processes: int = 2) -> None:
        self._free: queue.LifoQueue[_DecoderChild | None] = queue.LifoQueue()
        for _ in range(num_processes):
            self._free.put(None)

    def decode(self, field: str, content: bytes, check_size: CheckSize | None = None) -> NDArray[np.uint8]:
        """Return the pixels `[height, width, 3]` of a file. Blocks while other pictures are decoded.

        Args:
            field: name for errors.
            check_size: called with width and height before the pixels are decoded; raises if they are too many.

        Raises:
            InvalidArgument: the file is too large, damaged, or no picture.
            Unavailable: the process that decodes cannot be started, or does not answer.
        """
        if len(content) > MAX_FILE_BYTES:
            raise InvalidArgument(field, f"{len(content)} bytes are over the limit of {MAX_FILE_BYTES} for a picture")
        child = self._free.get()
        try:
            child = child if child is not None and child.process.poll() is None else _DecoderChild()
            return child.decode(field, content, check_size)
        except OSError as error:
            raise Unavailable(f"the process that decodes pictures cannot be started: {error}") from error
        finally:
            self._free.put(child)


class _DecoderChild:
    """One process and the server's end of the socket. `end` runs when the object is garbage-collected."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as opened:
            ours, theirs = socket.socketpair()
            self._connection = opened.enter_context(ours)
            self._connection.settimeout(_ANSWER_TIMEOUT_S)
            self._answers = opened.enter_context(ours.makefile("rb"))
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "jpaged.service.images"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the server, which drains
                )
            self.end = weakref.finalize(self, _end, self.process, opened.pop_all())

    def decode(self, field: str, content: bytes, check_size: CheckSize | None) -> NDArray[np.uint8]:
        """Return the pixels of a file; raise as `PictureDecoder.decode` does."""
        try:
            return self._decode(field, content, check_size)
        except TimeoutError as error:
            self.end()
            what = f"the process that decodes pictures did not answer within {_ANSWER_TIMEOUT_S} s"
            raise Unavailable(what) from error
        except (OSError, EOFError) as error:
            self.process.kill()
            code = self.process.wait()
            self.end()
            how = f"takes more than {CPU_S:g} s to decode" if code == -signal.SIGPROF else "cannot be decoded"
            raise InvalidArgument(field, f"{how}: the picture ended the decoder") from error
        except InvalidArgument:
            raise
        except BaseException:  # such as MemoryError: the rest of an answer must not become the next picture
            self.end()
            raise

    def _decode(self, field: str, content: bytes, check_size: CheckSize | None) -> NDArray[np.uint8]:
        self._connection.sendall(_COUNT.pack(len(content)))
        self._connection.sendall(content)
        if (kind := _read(self._answers, 1)) == _HEADER:
            width, height = _SIZE.unpack(_read(self._answers, _SIZE.size))
            try:
                check_pixels(field, width, height)
                if check_size is not None:
                    check_size(width, height)
            except BaseException:
                self._connection.sendall(_STOP)
                raise
            self._connection.sendall(_GO)
            kind = _read(self._answers, 1)
        if kind == _FAILED:
            (length,) = _COUNT.unpack(_read(self._answers, _COUNT.size))
            raise InvalidArgument(field, _read(self._answers, length).decode(errors="replace"))
        width, height = _SIZE.unpack(_read(self._answers, _SIZE.size))
        try:
            check_pixels(field, width, height)
        except InvalidArgument:
            self.end()
            raise
        pixels_hwc = np.empty((height, width, 3), np.uint8)
        view = pixels_hwc.data.cast("B")
        while view:
            if not (num_read := self._answers.readinto(view)):
                raise EOFError
            view = view[num_read:]
        return pixels_hwc


def _end(process: subprocess.Popen[bytes], open_files: contextlib.ExitStack) -> None:
    process.kill()
    process.wait()
    open_files.close()


def _read(frames: IO[bytes], count: int) -> bytes:
    content = frames.read(count)
    if len(content) < count:
        raise EOFError
    return content


def check_pixels(field: str, width: int, height: int) -> None:
    """Raise InvalidArgument if a picture of this size has no pixels, or too many."""
    if not width or not height:
        raise InvalidArgument(field, f"is a picture of {width} x {height} pixels: at least one is needed")
    if width * height > MAX_PIXELS:
        raise InvalidArgument(field, f"is a picture of {width} x {height} pixels, over the limit of {MAX_PIXELS}")


def read_pixels(field: str, given: Any) -> NDArray[np.uint8]:
    """Return the pixels of an image of Pillow, or of an array or tensor `[height, width, channels]` of uint8.

    Channels are 1, 3 or 4, or absent; they may come first, as in PyTorch.

    Raises:
        InvalidArgument: it is something else, or damaged.
    """
    if hasattr(given, "convert") and hasattr(given, "size"):
        width, height = given.size
        check_pixels(field, width, height)
        try:
            return _to_rgb(given)
        except _DAMAGED as error:
            raise InvalidArgument(field, f"cannot be decoded: {_describe(error)}") from error
    try:
        pixels = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(field, f"is neither a picture nor an array: {_describe(error)}") from error
    if pixels.dtype != np.uint8:
        raise InvalidArgument(field, f"has the type {pixels.dtype.name}; pixels must be uint8, from 0 to 255")
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4) and pixels.shape[0] in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4):
        raise InvalidArgument(field, f"has the shape {pixels.shape}; must be (height, width, 1, 3 or 4)")
    check_pixels(field, pixels.shape[1], pixels.shape[0])
    rgb = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[..., :3]
    return np.array(rgb, order="C")  # a copy: the caller may change its array


def decode_file(content: bytes, check_size: Callable[[int, int], bool]) -> NDArray[np.uint8] | None:
    """Return the pixels of a file, in this process; None if `check_size` returns False.

    Raises:
        ValueError: it is no picture, or damaged.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
                if not check_size(*picture.size):
                    return None
                return _to_rgb(picture)
    except UnidentifiedImageError as error:
        raise ValueError(f"is not a picture in one of the formats {_SHOWN_FORMATS}") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"cannot be decoded: {_describe(error)}") from error
    except _DAMAGED as error:
        raise ValueError(f"cannot be decoded: {_describe(error)}") from error


def _describe(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:_SHOWN_CHARS]


def _to_rgb(picture: Image.Image) -> NDArray[np.uint8]:
    """Return the pixels of an image of Pillow, upright."""
    picture.load()
    turned = _turn_upright(picture)
    if turned.mode.startswith("I") or turned.mode == "F":
        return _to_rgb_from_gray(np.asarray(turned))
    return np.array(turned.convert("RGB"))


def _turn_upright(picture: Image.Image) -> Image.Image:
    """Return a picture as its Exif orientation asks; a damaged orientation is ignored."""
    from PIL import Image

    flips = (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM)
    turns = (Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_270, Image.Transpose.TRANSVERSE)
    ways = dict(enumerate((*flips, *turns, Image.Transpose.ROTATE_90), start=2))
    try:
        way = ways.get(picture.getexif().get(_ORIENTATION, 1))
    except _DAMAGED:
        way = None
    return picture if way is None else picture.transpose(way)


def _to_rgb_from_gray(gray_hw: NDArray[Any]) -> NDArray[np.uint8]:
    """Return gray pixels of more than eight bits with their upper eight, which `convert` would clip to white."""
    if gray_hw.dtype.kind == "f":
        gray_hw = np.nan_to_num(gray_hw)
    highest = float(gray_hw.max(initial=0))
    shifted = gray_hw if highest <= 255 and gray_hw.dtype.itemsize > 2 else gray_hw.astype(np.int64) >> 8
    return np.repeat(np.clip(shifted, 0, 255).astype(np.uint8)[..., None], 3, axis=2)


def _serve(connection: socket.socket) -> None:
    """Decode the pictures of a server until it closes the connection."""
    from PIL import Image

    for name in FORMATS:
        importlib.import_module(f"PIL.{_PLUGINS.get(name, name.capitalize())}ImagePlugin")
    Image.MAX_IMAGE_PIXELS = None  # the server bounds pixels
    requests = connection.makefile("rb")

    def check_size(width: int, height: int) -> bool:
        connection.sendall(_HEADER + _SIZE.pack(width, height))
        return _read(requests, 1) == _GO

    while len(head := requests.read(_COUNT.size)) == _COUNT.size:
        content = _read(requests, _COUNT.unpack(head)[0])
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            pixels_hwc = decode_file(content, check_size)
        except ValueError as error:
            text = str(error).encode(errors="replace")
            connection.sendall(_FAILED + _COUNT.pack(len(text)) + text)
        else:
            if pixels_hwc is not None:
                height, width, _ = pixels_hwc.shape
                connection.sendall(_PIXELS + _SIZE.pack(width, height))
                connection.sendall(np.ascontiguousarray(pixels_hwc).data.cast("B"))
        del content
        pixels_hwc = None
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory() -> None:
    """Bound the memory of this process: what it has now, and some for one picture."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    with contextlib.suppress(OSError, ValueError):
        _limit_memory()
    os.nice(_NICENESS)
    with socket.socket(fileno=os.dup(0)) as _connection:
        _serve(_connection)
