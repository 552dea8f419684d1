"""File of slots of one size, with a table of their headers.

    0       magic, identity, bytes of a block, number of slots, CRC
    4096    128 bytes a slot: time of last use | length of the key, key, hash, CRC
    ...     the slots, from a multiple of 4096 on

A slot's header is cleared before its contents are written, and written after them, so a crash in between leaves an
empty slot. The hash covers identity, key and contents, and is verified on every read. It detects lost pages, early
headers and bytes of other files.

The space is allocated when a file is created, so writing a page never runs out of disk. Headers and contents are
accessed with `pread` and `pwrite` instead of a mapping: a failing disk or a truncated file is an error, not a signal.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_MAGIC = b"jpaged/blocks/1\0"
_FILE = struct.Struct("<16s32sQQ")
_CRC = struct.Struct("<I")
_USED = struct.Struct("<Q")
_MAX_USED = (1 << 62) - 1
"""The use counter has no CRC, because it is written on every use; a damaged one is clamped to this."""
_NAMED = struct.Struct("<B64s32s")
_HEADER_BYTES, _PAGE_BYTES = 128, 4096
MAX_KEY_BYTES = 64


class Damaged(Exception):
    """The file is no block file, or has other blocks; the message states why."""


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """Content of a slot.

    Attributes:
        digest: hash of identity, key and contents, 32 bytes.
        used: counter value of the last use.
    """

    key: bytes
    digest: bytes
    used: int


@dataclass(frozen=True, slots=True)
class Form:
    """Format of all files of one folder.

    Attributes:
        identity: 32 bytes: hash of all that the bytes of a block depend on.
    """

    identity: bytes
    bytes_per_block: int
    num_slots: int

    @property
    def slots_begin(self) -> int:
        """Return the file offset of the first slot."""
        return _PAGE_BYTES + _whole_pages(self.num_slots * _HEADER_BYTES)

    @property
    def num_bytes(self) -> int:
        """Return the size of a file."""
        return self.slots_begin + self.num_slots * self.bytes_per_block

    def digest(self, key: bytes, contents: memoryview) -> bytes:
        """Return the hash of a block; releases the GIL."""
        found = hashlib.sha256(self.identity + bytes([len(key)]) + key)
        found.update(contents)
        return found.digest()

    def file_header(self) -> bytes:
        """Return the first bytes of a file."""
        packed = _FILE.pack(_MAGIC, self.identity, self.bytes_per_block, self.num_slots)
        return packed + _CRC.pack(zlib.crc32(packed))

    @classmethod
    def of_file(cls, header: bytes) -> Form:
        """Parse the form from a file header.

        Raises:
            Damaged: the header is invalid.
        """
        packed, crc = header[: _FILE.size], header[_FILE.size : _FILE.size + _CRC.size]
        if len(header) < _FILE.size + _CRC.size or _CRC.unpack(crc)[0] != zlib.crc32(packed):
            raise Damaged("its header is incomplete")
        magic, *rest = _FILE.unpack(packed)
        if magic != _MAGIC:
            raise Damaged(f"it begins with {magic!r}, not with {_MAGIC!r}")
        return cls(*rest)


class Segment:
    """Open file of slots, numbered from 0. The store decides which slots are read and written.

    Every method may raise OSError: the disk failed, or the file was truncated.
    """

    def __init__(self, path: Path, form: Form, descriptor: int) -> None:
        self.path = path
        self.form = form
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path, form: Form) -> Self:
        """Create a file with empty slots, and allocate its disk space.

        Raises:
            OSError: there is no room, or the file exists; no partial file is left.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, form.num_bytes)
            os.pwrite(descriptor, form.file_header(), 0)
            return cls(path, form, descriptor)
        except (OSError, ValueError):
            os.close(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    @classmethod
    def open(cls, path: Path, identity: bytes, bytes_per_block: int) -> Self:
        """Open a file of an earlier process.

        Raises:
            Damaged: it is incomplete, or has other blocks.
            OSError: it cannot be opened, or there is no room for its missing parts.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            form = Form.of_file(os.pread(descriptor, _PAGE_BYTES, 0))
            if (form.identity, form.bytes_per_block) != (identity, bytes_per_block) or not form.num_slots:
                raise Damaged(
                    f"its blocks have {form.bytes_per_block} bytes and the fingerprint {form.identity.hex()[:16]}"
                )
            size = os.fstat(descriptor).st_size
            if size != form.num_bytes:
                raise Damaged(f"it has {size} bytes, not {form.num_bytes}")
            os.posix_fallocate(descriptor, 0, form.num_bytes)  # a copy may have holes
            return cls(path, form, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def headers(self) -> Iterator[tuple[int, SlotHeader | None]]:
        """Yield every slot and its header; None if the slot is empty."""
        table = bytearray(self.form.slots_begin)
        self._fill(memoryview(table), 0)
        for slot in range(self.form.num_slots):
            begin = _header_begin(slot)
            yield slot, _get_header(bytes(table[begin : begin + _HEADER_BYTES]))

    def publish(self, slot: int, header: SlotHeader) -> None:
        """Write the header of a slot whose contents are written."""
        named = _NAMED.pack(len(header.key), header.key, header.digest)
        packed = _USED.pack(header.used) + named + _CRC.pack(zlib.crc32(named))
        self._write_header(slot, packed.ljust(_HEADER_BYTES, b"\0"))

    def touch(self, slot: int, used: int) -> None:
        """Write the use counter of a slot."""
        self._write_header(slot, _USED.pack(used))

    def clear(self, slot: int) -> None:
        """Clear the header of a slot."""
        self._write_header(slot, bytes(_HEADER_BYTES))

    def clear_all(self) -> None:
        """Clear the headers of all slots."""
        self._check_size()
        self._put(memoryview(bytes(self.form.slots_begin - _PAGE_BYTES)), _PAGE_BYTES)

    def write(self, slot: int, contents: memoryview) -> None:
        """Write the contents of a slot; releases the GIL."""
        self._put(contents, self._slot_begin(slot))

    def read(self, slot: int, into: memoryview) -> None:
        """Read the contents of a slot; releases the GIL."""
        self._fill(into, self._slot_begin(slot))

    def _put(self, contents: memoryview, begin: int) -> None:
        done = 0
        while done < len(contents):
            done += os.pwrite(self._descriptor, contents[done:], begin + done)

    def _fill(self, into: memoryview, begin: int) -> None:
        done = 0
        while done < len(into):
            num_bytes = os.preadv(self._descriptor, [into[done:]], begin + done)
            if not num_bytes:
                raise OSError(f"{self.path} was truncated")
            done += num_bytes

    def close(self) -> None:
        """Close the file, which stays on disk."""
        os.close(self._descriptor)

    def _slot_begin(self, slot: int) -> int:
        return self.form.slots_begin + slot * self.form.bytes_per_block

    def _write_header(self, slot: int, packed: bytes) -> None:
        self._check_size()
        self._put(memoryview(packed), _header_begin(slot))

    def _check_size(self) -> None:
        """Raise OSError if the file was removed, or lost its table: a write would extend it again."""
        found = os.fstat(self._descriptor)
        if not found.st_nlink:
            raise OSError(f"{self.path} was removed")
        if found.st_size < self.form.slots_begin:
            raise OSError(f"{self.path} was truncated")


def _header_begin(slot: int) -> int:
    return _PAGE_BYTES + slot * _HEADER_BYTES


def _get_header(packed: bytes) -> SlotHeader | None:
    named_end = _USED.size + _NAMED.size
    named, crc = packed[_USED.size : named_end], packed[named_end : named_end + _CRC.size]
    length, key, digest = _NAMED.unpack(named)
    if not 0 < length <= MAX_KEY_BYTES or _CRC.unpack(crc)[0] != zlib.crc32(named):
        return None
    return SlotHeader(key[:length], digest, min(_USED.unpack_from(packed)[0], _MAX_USED))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
