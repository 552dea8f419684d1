"""The kernel's page cache, of the files of a folder: read into it, dropped from it, and how much of them is in it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PIECE_BYTES = 1 << 20
_MOST_LEFT = 0.1


def warm(folder: Path) -> None:
    """Reads all files of a folder, so that the page cache has them."""
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(_PIECE_BYTES):
                pass


def drop(folder: Path) -> float:
    """Writes what is to be written of all files of a folder, and drops them from the page cache; the share that stays.

    Headers stay where a server has mapped them.

    Raises:
        SystemExit: too much stays for anybody to call that cold, as of a file system in memory.
    """
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    left = resident(folder)
    if left > _MOST_LEFT:
        raise SystemExit(f"{left:.0%} of {folder} stay in the page cache: name a --folder on a disk")
    return left


def resident(folder: Path) -> float:
    """The share of a folder's bytes that the page cache has."""
    num_pages = num_resident = 0
    for path in _files(folder):
        pages = _pages(path)
        num_pages += len(pages)
        num_resident += sum(page & 1 for page in pages)
    if not num_pages:
        raise SystemExit(f"{folder} has no file with anything in it")
    return num_resident / num_pages


def _pages(path: Path) -> bytes:
    """A byte for each page of a file, whose lowest bit says that it is in memory: mincore(2)."""
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return b""
        with mmap.mmap(file.fileno(), size) as mapping:
            found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            here = ctypes.c_char.from_buffer(mapping)
            error = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(here)), ctypes.c_size_t(size), found)
            del here  # a mapping closes when nobody points into it
            if error:
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
            return bytes(found)


def _files(folder: Path) -> Iterator[Path]:
    return iter(sorted(path for path in folder.rglob("*.blocks") if path.is_file()))
