"""Files and batches on disk, each owner's apart, bounded in all. Its verbs wait for the disk: for threads.

    DIR/lock                        held by the server that has the folder
    DIR/reserve                     room for the last state of batches, freed when the disk is full
    DIR/<digest of the owner>/files/file-....json     what a file is, written when the file is whole
                                    file-....jsonl    its lines; without the other, one that is being written
                              batches/batch_....json  a batch, written anew in each of its statuses

Names of files and batches are made here, and those that callers send are looked up in memory, never on disk. What says
how far a batch is takes the place of what said so before, in one step, and is on the disk before anything builds on it.
A state that cannot be read is kept as `*.damaged`, and the others are served.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

from jpaged import json_text
from jpaged.errors import AlreadyExists, InvalidArgument, NotFound, QueueFull, StorageError
from jpaged.http.batching.values import Batch, StoredFile, new_id

_T = TypeVar("_T")

MAX_FILES = 20_000
"""Files of all owners together; each is known in memory."""
MAX_BATCHES = 10_000
"""Batches of all owners together that are known; the oldest that have ended are forgotten first."""
MAX_LIVE_BATCHES = 1000
_COPY_BYTES = 1 << 20
_RESERVE_BYTES = 1 << 20
_RETRY_S = 60.0
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Owned:
    """What is known of one owner."""

    folder: Path
    files: dict[str, StoredFile]
    batches: dict[str, Batch]
    num_bytes: int = 0

    @property
    def num_live(self) -> int:
        """Batches that have not ended."""
        return sum(one.is_live for one in self.batches.values())


class Store:
    """The folder of `--batch-dir`, held against other servers until `close`.

    Args:
        root: made where there is none.
        max_bytes: of all files together.
        share: what one owner may have of the files, bytes and live batches that others leave, up to 1.

    Raises:
        InvalidArgument: another server has it, or it cannot be written.
    """

    def __init__(self, root: Path, max_bytes: int, share: float = 1.0) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._share = share
        self._guard = threading.RLock()
        self._owners: dict[str, _Owned] = {}
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _locked(root)
        except OSError as error:
            raise InvalidArgument("batch_dir", f"{root} cannot be used: {error.strerror or error}") from error
        try:
            for folder in sorted(root.glob("*/batches")):
                self._read(folder.parent)
            self._reserve()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the folder go."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def add_file(self, owner: str, source: IO[bytes], filename: str) -> StoredFile:
        """Keep what a caller sent.

        Raises:
            StorageError: there is no room for it, in all, for the owner or on the disk.
        """
        with self._guard:
            owned = self._owned(owner)
            num_others = sum(len(one.files) for one in self._owners.values() if one is not owned)
            if len(owned.files) >= (most := self._most(MAX_FILES, num_others)):
                raise StorageError(f"{len(owned.files)} files are kept, the limit is {most}: delete some")
            folder = owned.folder
        with _disk_errors("the file"):
            file = StoredFile(new_id("file-"), 0, int(time.time()), filename, "batch")
            path = folder / "files" / f"{file.id}.jsonl"
            num_bytes = 0
            try:
                with path.open("xb") as target:
                    while part := source.read(_COPY_BYTES):
                        self.grow(owner, len(part))
                        num_bytes += len(part)
                        target.write(part)
                    target.flush()
                    os.fsync(target.fileno())
                return self._note_file(owner, replace(file, num_bytes=num_bytes))
            except BaseException:
                with contextlib.suppress(OSError):
                    path.unlink()
                self.shrink(owner, num_bytes)
                raise

    def add_output(self, owner: str, file_id: str, filename: str) -> StoredFile | None:
        """Make a file of what a batch wrote under an id; None, and nothing is left, where that is empty."""
        with _disk_errors("an output"):
            path = self.path(owner, file_id)
            if not path.exists() or not path.stat().st_size:
                path.unlink(missing_ok=True)
                return None
            return self._note_file(
                owner, StoredFile(file_id, path.stat().st_size, int(time.time()), filename, "batch_output")
            )

    def file(self, owner: str, file_id: str) -> StoredFile:
        """Return a file; raises NotFound where the owner has none of that id."""
        with self._guard:
            owned = self._owners.get(owner)
            if owned is None or file_id not in owned.files:
                raise NotFound(f"file_id: there is no file {file_id[:80]!r}")
            return owned.files[file_id]

    def files(self, owner: str) -> list[StoredFile]:
        """Return an owner's files, the newest first."""
        with self._guard:
            owned = self._owners.get(owner)
            return list(reversed(owned.files.values())) if owned else []

    def path(self, owner: str, file_id: str) -> Path:
        """Return where the lines of a file are, or will be; the id is one that was made here."""
        with self._guard:
            return self._owned(owner).folder / "files" / f"{file_id}.jsonl"

    def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file.

        Raises:
            NotFound: the owner has none of that id.
            AlreadyExists: a batch that has not ended reads it.
        """
        with self._guard:
            self.file(owner, file_id)
            for batch in self._owned(owner).batches.values():
                if batch.is_live and batch.input_id == file_id:
                    raise AlreadyExists(f"file_id: batch {batch.id} reads it: cancel the batch first")
            path = self.path(owner, file_id)
            with _disk_errors("the file"):
                path.with_suffix(".json").unlink(missing_ok=True)
                self._remove(self._owned(owner), path)
            del self._owned(owner).files[file_id]

    def grow(self, owner: str, num_bytes: int) -> None:
        """Take room of an owner for bytes that are written next; raises StorageError if there is none."""
        with self._guard:
            owned = self._owned(owner)
            num_others = sum(one.num_bytes for one in self._owners.values() if one is not owned)
            most = self._most(self._max_bytes, num_others)
            if owned.num_bytes + num_bytes > most:
                used = f"{owned.num_bytes} of {most} bytes are used (max_batch_storage, tenant_batch_share)"
                raise StorageError(f"there is no room for {num_bytes} bytes more: {used}; delete files")
            owned.num_bytes += num_bytes

    def shrink(self, owner: str, num_bytes: int) -> None:
        """Return room that `grow` has taken."""
        with self._guard:
            owned = self._owned(owner)
            owned.num_bytes = max(0, owned.num_bytes - num_bytes)

    def add_batch(self, batch: Batch) -> None:
        """Keep a new batch, which is known once it is on disk.

        Raises:
            QueueFull: too many have not ended.
            StorageError: the disk cannot be written.
        """
        with self._guard:
            every = [one for owned in self._owners.values() for one in owned.batches.values()]
            num_mine = self._owned(batch.owner).num_live
            most = self._most(MAX_LIVE_BATCHES, sum(one.is_live for one in every) - num_mine)
            if num_mine >= most:
                problem = f"{num_mine} batches have not ended, the limit is {most} (tenant_batch_share)"
                raise QueueFull(problem, retry_after_s=_RETRY_S)
            ended = sorted((one for one in every if not one.is_live), key=lambda one: one.created_at)
            for old in ended[: max(0, len(every) + 1 - MAX_BATCHES)]:
                self._owned(old.owner).batches.pop(old.id)
                (self._owned(old.owner).folder / "batches" / f"{old.id}.json").unlink(missing_ok=True)
        self.save(batch)
        self._reserve()
        with self._guard:
            self._owned(batch.owner).batches[batch.id] = batch

    def save(self, batch: Batch) -> None:
        """Keep a batch as it is now, on disk; of several that save one batch, the last call is the last to write."""
        with self._guard:
            owned = self._owned(batch.owner)
        with _disk_errors("a batch"):
            self._write(owned.folder / "batches" / f"{batch.id}.json", batch.as_json())

    def note(self, batch: Batch) -> None:
        """Know how far a batch is that `add_batch` has taken; waits for nothing."""
        self._owners[batch.owner].batches[batch.id] = batch

    def batch(self, owner: str, batch_id: str) -> Batch:
        """Return a batch; raises NotFound where the owner has none of that id."""
        with self._guard:
            owned = self._owners.get(owner)
            if owned is None or batch_id not in owned.batches:
                raise NotFound(f"batch_id: there is no batch {batch_id[:80]!r}")
            return owned.batches[batch_id]

    def batches(self, owner: str) -> list[Batch]:
        """Return an owner's batches, the newest first."""
        with self._guard:
            owned = self._owners.get(owner)
            return list(reversed(owned.batches.values())) if owned else []

    def live(self) -> list[Batch]:
        """Return all batches that have not ended, the oldest first."""
        with self._guard:
            found = [one for owned in self._owners.values() for one in owned.batches.values() if one.is_live]
            return sorted(found, key=lambda one: one.created_at)

    def _most(self, limit: int, num_others: int) -> int:
        """Return the part of a limit that an owner may use; others use `num_others` of it."""
        return max(0, int((limit - num_others) * self._share))

    def _owned(self, owner: str) -> _Owned:
        known = self._owners.get(owner)
        if known is None:
            folder = self._root / _digest(owner)
            with _disk_errors("a folder"):
                for name in ("files", "batches"):
                    (folder / name).mkdir(parents=True, exist_ok=True)
                self._write(folder / "owner.json", {"owner": owner})
            known = self._owners[owner] = _load(folder)
        return known

    def _note_file(self, owner: str, file: StoredFile) -> StoredFile:
        self._write(self.path(owner, file.id).with_suffix(".json"), asdict(file))
        with self._guard:
            self._owned(owner).files[file.id] = file
        return file

    def _remove(self, owned: _Owned, path: Path) -> None:
        with self._guard, contextlib.suppress(FileNotFoundError):
            num_bytes = path.stat().st_size
            path.unlink()
            owned.num_bytes = max(0, owned.num_bytes - num_bytes)

    def _read(self, folder: Path) -> None:
        owner = _loaded(folder / "owner.json", lambda value: str(value["owner"]))
        if owner is None and folder.name == _digest(""):
            owner = ""
        if owner is not None:  # that of another is read when its first request comes
            self._owners[owner] = _load(folder)

    def _write(self, path: Path, value: Mapping[str, object]) -> None:
        """Write a small file, on a full disk in the room that is reserved for that."""
        try:
            _write(path, value)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with contextlib.suppress(FileNotFoundError):
                (self._root / "reserve").unlink()
            _write(path, value)

    def _reserve(self) -> None:
        """Take room on the disk in which batches can end when it is full, unless it is still taken."""
        path = self._root / "reserve"
        if path.exists():
            return
        try:
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
        except OSError as error:
            _LOG.warning("%s: %s: if the disk is full, the state of batches may be lost", path, error.strerror or error)
            with contextlib.suppress(OSError):
                path.unlink()


def _digest(owner: str) -> str:
    return hashlib.sha256(owner.encode()).hexdigest()[:32]


def _load(folder: Path) -> _Owned:
    """Return what an earlier server has left of an owner; a file of requests that came in part goes."""
    batches = [_loaded(path, Batch.of_json) for path in (folder / "batches").glob("*.json")]
    files = [_loaded(path, lambda value: StoredFile(**value)) for path in (folder / "files").glob("*.json")]
    known_batches = sorted((one for one in batches if one is not None), key=lambda one: one.created_at)
    known_files = sorted((one for one in files if one is not None), key=lambda one: one.created_at)
    owned = _Owned(folder, {one.id: one for one in known_files}, {one.id: one for one in known_batches})
    kept = set(owned.files)
    kept |= {name for one in known_batches if one.is_live for name in (one.output_id, one.error_id)}
    is_sound = not any(folder.glob("*/*.damaged"))  # else they may be a damaged batch's
    for path in (folder / "files").glob("*.jsonl"):
        if path.stem in kept or not is_sound:
            owned.num_bytes += path.stat().st_size
        else:
            path.unlink()
    return owned


def _locked(root: Path) -> int:
    lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise InvalidArgument("batch_dir", f"{root} is held by another server: give each one of its own") from error
    return lock


def _loaded(path: Path, read: Callable[[Any], _T]) -> _T | None:
    """Return what a file holds; None if it is damaged, and then it is renamed."""
    try:
        return read(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        aside = path.with_name(f"{path.name}.damaged")
        _LOG.error("%s was not written by a server of this version (%s): it is kept as %s", path, error, aside)
        with contextlib.suppress(OSError):
            os.replace(path, aside)
        return None


def _write(path: Path, value: Mapping[str, object]) -> None:
    """A crash leaves the old file or the new one, and never a part."""
    new = path.with_suffix(".new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(json_text.dumps(value))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what} cannot be written: {error.strerror or error}") from error
