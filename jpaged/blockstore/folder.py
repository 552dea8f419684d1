"""Folder of the block store: locked by one server at a time, and limited in size.

    <dir>/LOCK                      locked while a server uses the folder; the kernel releases it with the process
    <dir>/<identity, 64 hex>/       blocks of one model, dtype, layout and kernels
        000000.blocks ...           files of slots

Files of other identities stay until their room is needed; then the least recently used identity is removed first. Files
with other names are neither counted nor touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from jpaged.errors import InvalidArgument

logger = logging.getLogger(__name__)

_IDENTITY = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"\d{6}\.blocks")
_GIB = 1 << 30
_LOCK_WAIT_S, _LOCK_PAUSE_S = 10.0, 0.05
"""Timeout and polling interval for the lock: a killed server keeps it until the kernel has freed its memory."""


class StoreFolder:
    """Folder that this process has locked until `close`.

    Args:
        path: folder, which is created if missing.
        max_bytes: maximum size of all block files in it.
        lock_wait_s: timeout for a lock of another process.

    Raises:
        InvalidArgument: it cannot be created or written, another process has locked it, or the disk has too little
            room.
    """

    def __init__(self, path: Path, max_bytes: int, *, lock_wait_s: float = _LOCK_WAIT_S) -> None:
        self.path = path
        self.max_bytes = max_bytes
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise InvalidArgument("kv_disk_dir", f"{path} cannot be written: {error.strerror}") from None
        try:
            self._take_lock(lock_wait_s)
            self._check_room()
        except BaseException:
            os.close(self._lock)
            raise

    def of_identity(self, identity: bytes) -> Path:
        """Return the folder of an identity, which is created if missing.

        Raises:
            InvalidArgument: it cannot be created.
        """
        path = self.path / identity.hex()
        try:
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                logger.warning("%s is not a folder and is removed", path)
                path.unlink()
            path.mkdir(mode=0o700, exist_ok=True)
            os.utime(path)
        except OSError as error:
            raise InvalidArgument("kv_disk_dir", f"{path} cannot be written: {error.strerror}") from None
        return path

    def make_room(self, num_bytes: int, mine: Path) -> bool:
        """Remove files of other identities as needed; return True if num_bytes more are within the limit."""
        total, others = 0, list[tuple[float, Path, int]]()
        for path, size in self._files():
            total += size
            if path.parent != mine:
                others.append((_used_s(path.parent), path, size))
        for used_s, path, size in sorted(others):
            if total + num_bytes <= self.max_bytes:
                break
            if discard(path, "its space is needed, and its model is not served"):
                total -= size
                with contextlib.suppress(OSError):
                    os.utime(path.parent, (used_s, used_s))  # losing a file is not a use
        return total + num_bytes <= self.max_bytes

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def _take_lock(self, wait_s: float) -> None:
        until_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
                    problem = f"{self.path} is used by another server (process {holder or 'unknown'})"
                    raise InvalidArgument("kv_disk_dir", f"{problem}: each server must have its own folder") from None
                time.sleep(_LOCK_PAUSE_S)
            except OSError as error:
                raise InvalidArgument("kv_disk_dir", f"{self.path} cannot be locked: {error.strerror}") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _check_room(self) -> None:
        held = sum(size for _, size in self._files())
        disk = os.statvfs(self.path)
        room = disk.f_bavail * disk.f_frsize + held
        if room < self.max_bytes:
            raise InvalidArgument(
                "kv_disk_space",
                f"{self.max_bytes / _GIB:.3g} GiB is too large: {self.path} has {room / _GIB:.3g} GiB free",
            )

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Yield every block file of all identities, and its size."""
        for folder in _entries(self.path, _IDENTITY):
            for path in _entries(folder, _FILE):
                try:
                    yield path, path.lstat().st_size
                except OSError:
                    continue


def block_files(folder: Path) -> list[Path]:
    """Return the block files in the folder of an identity, by number."""
    return sorted(_entries(folder, _FILE))


def file_name(number: int) -> str:
    """Return the name of a block file."""
    return f"{number:06d}.blocks"


def discard(path: Path, reason: str) -> bool:
    """Remove a block file and log the reason; return False if it cannot be removed."""
    try:
        path.unlink()
    except OSError as error:
        logger.warning("disk offload: %s is unusable (%s) and cannot be removed: %s", path, reason, error.strerror)
        return False
    logger.warning("disk offload: removed %s: %s", path, reason)
    return True


def _entries(folder: Path, name: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            return [Path(entry.path) for entry in found if name.fullmatch(entry.name)]
    except OSError:
        return []


def _used_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
