"""Files and batches on disk, separately per owner, with total limits. Methods wait for the disk: call them on threads.

    DIR/lock                        held by the server that uses the folder
    DIR/reserve                     reserved space for the final state of batches, freed when the disk is full
    DIR/<digest of the owner>/files/file-....json     metadata of a file, written when the file is complete
                                    file-....jsonl    the lines; without metadata, an incomplete file
                             batches/batch_....json  a batch, rewritten at each change of status

Names of files and batches are generated here; names from callers are looked up in memory, never on disk. A new state
replaces the old one atomically, and is on disk before anything depends on it. An unreadable state is kept as
`*.damaged`, and the others are served.

`StoredFile` and `Batch` are files and batches as stored, and as OpenAI's API returns them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from jpaged import json_text
from jpaged.access.keys import ApiKey, Role
from jpaged.errors import AlreadyExists, InvalidArgument, NotFound, QueueFull, StorageError

LIVE = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
"""Statuses of unfinished batches; the others are completed, failed, expired and cancelled."""
MAX_WINDOW_S = 30 * 86400
MAX_METADATA = 16
MAX_METADATA_NAME = 64
MAX_METADATA_VALUE = 512
_WINDOW = re.compile(r"([0-9]{1,7})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def new_id(kind: str) -> str:
    """Return a unique id: `file-...`, `batch_...`."""
    return f"{kind}{uuid.uuid4().hex}"


def get_window_s(text: Any) -> int:
    """Return the seconds of a completion window.

    Raises:
        InvalidArgument: it is not a time such as 24h or 30m, up to 30 days.
    """
    match = _WINDOW.fullmatch(text) if isinstance(text, str) else None
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not 1 <= seconds <= MAX_WINDOW_S:
        raise InvalidArgument(
            "body.completion_window", f"{str(text)[:80]!r} is not a time from 1s to 30d, such as 24h or 30m"
        )
    return seconds


def get_metadata(value: Any) -> dict[str, str]:
    """Return a caller's metadata within OpenAI's limits; None becomes empty.

    Raises:
        InvalidArgument: values are not strings, too many or too long.
    """
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise InvalidArgument("body.metadata", f"must be an object of at most {MAX_METADATA} strings")
    for name, text in value.items():
        if not isinstance(text, str) or len(name) > MAX_METADATA_NAME or len(text) > MAX_METADATA_VALUE:
            limits = f"names may have {MAX_METADATA_NAME} characters, strings {MAX_METADATA_VALUE}"
            raise InvalidArgument(
                f"body.metadata.{name[:MAX_METADATA_NAME]}", f"is not a string, or too long: {limits}"
            )
    return value


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a caller uploaded, or that a batch has written.

    Attributes:
        purpose: `batch` or `batch_output`.
    """

    id: str
    num_bytes: int
    created_at: int
    filename: str
    purpose: str

    def shown(self) -> dict[str, Any]:
        """Return the file in OpenAI's format."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class BatchError:
    """Reason why a batch could not run; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Numbers of finished lines of a batch."""

    completed: int = 0
    failed: int = 0

    @property
    def num_done(self) -> int:
        """Lines that need no further run."""
        return self.completed + self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as stored.

    Attributes:
        owner: scope of the batch and the files; `tenant` is the tenant of the requests.
        key_id, role: of the key that created it, whose permissions apply to the lines; None on a server without keys.
        output_id, error_id: ids of the output files, whether or not they exist.
        has_output, has_errors: those files exist.
        times: time of entering each status, by OpenAI's field names.
        num_lines: lines of the input, once they are counted.
        num_takes: number of resumes since a line last completed.
    """

    id: str
    owner: str
    tenant: str
    endpoint: str
    input_id: str
    output_id: str
    error_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    metadata: Mapping[str, str] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)
    errors: tuple[BatchError, ...] = ()
    num_lines: int = 0
    counts: BatchCounts = BatchCounts()
    has_output: bool = False
    has_errors: bool = False
    num_takes: int = 0
    model: str | None = None
    key_id: str | None = None
    role: str | None = None

    @property
    def key(self) -> ApiKey | None:
        """The key that created it; None on a server without keys."""
        if self.key_id is None or self.role is None:
            return None
        return ApiKey(self.key_id, self.tenant, Role[self.role.upper()])

    @property
    def is_live(self) -> bool:
        """True if it is unfinished."""
        return self.status in LIVE

    def as_json(self) -> dict[str, Any]:
        """Return the batch as stored on disk."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Batch:
        """Parse a stored batch; raise TypeError, KeyError or ValueError for anything else."""
        known = {one.name for one in fields(cls)}
        value = {"key_id": None, "role": None, **value}  # batches of earlier releases have neither
        if value.keys() != known:
            raise ValueError(f"fields {sorted(value.keys() ^ known)}")
        errors = tuple(BatchError(**one) for one in value["errors"])
        return cls(**{**value, "errors": errors, "counts": BatchCounts(**value["counts"])})

    def shown(self) -> dict[str, Any]:
        """Return the batch in OpenAI's format."""
        stamps = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        counts = self.counts
        errors = [{"code": e.code, "message": e.message, "line": e.line, "param": e.param} for e in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in stamps},
            "request_counts": {"total": self.num_lines, "completed": counts.completed, "failed": counts.failed},
            "metadata": dict(self.metadata) or None,
        }


_T = TypeVar("_T")

MAX_FILES = 20_000
"""Maximum files of all owners; each is indexed in memory."""
MAX_BATCHES = 10_000
"""Maximum known batches of all owners; the oldest finished ones are dropped first."""
MAX_LIVE_BATCHES = 1000
_COPY_BYTES = 1 << 20
_RESERVE_BYTES = 1 << 20
_RETRY_S = 60.0
_LOG = logging.getLogger(__name__)


class UploadSource(Protocol):
    """Reader of the bytes of a file that a caller sent."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end."""
        ...


@dataclass(slots=True)
class _Owned:
    """Files and batches of one owner."""

    folder: Path
    files: dict[str, StoredFile]
    batches: dict[str, Batch]
    num_bytes: int = 0

    @property
    def num_live(self) -> int:
        """Number of unfinished batches."""
        return sum(one.is_live for one in self.batches.values())


class Store:
    """The folder of `--batch-dir`, locked against other servers until `close`.

    Args:
        root: created if missing.
        max_bytes: limit of all files together.
        share: share that one owner may use of the files, bytes and live batches that others leave free, up to 1.

    Raises:
        InvalidArgument: another server uses it, or it cannot be written.
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
        """Release the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def add_file(self, owner: str, source: UploadSource, filename: str) -> StoredFile:
        """Store an uploaded file.

        Raises:
            StorageError: there is no room for it in total, for the owner or on the disk.
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
        """Register a file that a batch wrote under an id; if it is empty, delete it and return None."""
        with _disk_errors("an output"):
            path = self.path(owner, file_id)
            if not path.exists() or not path.stat().st_size:
                path.unlink(missing_ok=True)
                return None
            return self._note_file(
                owner, StoredFile(file_id, path.stat().st_size, int(time.time()), filename, "batch_output")
            )

    def file(self, owner: str, file_id: str) -> StoredFile:
        """Return a file; raise NotFound if the owner has none of that id."""
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
        """Return the path of a file's lines; the id must be one that was generated here."""
        with self._guard:
            return self._owned(owner).folder / "files" / f"{file_id}.jsonl"

    def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file.

        Raises:
            NotFound: the owner has none of that id.
            AlreadyExists: an unfinished batch reads it.
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
        """Reserve space of an owner for the next bytes; raise StorageError if there is none."""
        with self._guard:
            owned = self._owned(owner)
            num_others = sum(one.num_bytes for one in self._owners.values() if one is not owned)
            most = self._most(self._max_bytes, num_others)
            if owned.num_bytes + num_bytes > most:
                used = f"{owned.num_bytes} of {most} bytes are used (max_batch_storage, tenant_batch_share)"
                raise StorageError(f"there is no room for {num_bytes} bytes more: {used}; delete files")
            owned.num_bytes += num_bytes

    def shrink(self, owner: str, num_bytes: int) -> None:
        """Return space that `grow` has reserved."""
        with self._guard:
            owned = self._owned(owner)
            owned.num_bytes = max(0, owned.num_bytes - num_bytes)

    def add_batch(self, batch: Batch) -> None:
        """Store a new batch; it is visible once it is on disk.

        Raises:
            QueueFull: too many batches are unfinished.
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
        """Write a batch's current state to disk; of several calls for one batch, the last one writes last."""
        with self._guard:
            owned = self._owned(batch.owner)
        with _disk_errors("a batch"):
            self._write(owned.folder / "batches" / f"{batch.id}.json", batch.as_json())

    def note(self, batch: Batch) -> None:
        """Update the known state of a batch without waiting for the disk."""
        self._owners[batch.owner].batches[batch.id] = batch

    def batch(self, owner: str, batch_id: str) -> Batch:
        """Return a batch; raise NotFound if the owner has none of that id."""
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
        """Return all unfinished batches, the oldest first."""
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
        if owner is not None:  # another owner's folder is read at that owner's first request
            self._owners[owner] = _load(folder)

    def _write(self, path: Path, value: Mapping[str, object]) -> None:
        """Write a small file; on a full disk, use the reserved space."""
        try:
            _write(path, value)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with contextlib.suppress(FileNotFoundError):
                (self._root / "reserve").unlink()
            _write(path, value)

    def _reserve(self) -> None:
        """Reserve disk space for the final state of batches, unless it is still reserved."""
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
    """Return an owner's state from an earlier server; delete incompletely uploaded files."""
    batches = [_loaded(path, Batch.of_json) for path in (folder / "batches").glob("*.json")]
    files = [_loaded(path, lambda value: StoredFile(**value)) for path in (folder / "files").glob("*.json")]
    known_batches = sorted((one for one in batches if one is not None), key=lambda one: one.created_at)
    known_files = sorted((one for one in files if one is not None), key=lambda one: one.created_at)
    owned = _Owned(folder, {one.id: one for one in known_files}, {one.id: one for one in known_batches})
    kept = set(owned.files)
    kept |= {name for one in known_batches if one.is_live for name in (one.output_id, one.error_id)}
    is_sound = not any(folder.glob("*/*.damaged"))  # otherwise they may belong to a damaged batch
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
        raise InvalidArgument(
            "batch_dir", f"{root} is used by another server: give each server its own folder"
        ) from error
    return lock


def _loaded(path: Path, read: Callable[[Any], _T]) -> _T | None:
    """Return the contents of a file; if it is damaged, rename it and return None."""
    try:
        return read(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        aside = path.with_name(f"{path.name}.damaged")
        _LOG.error("%s was not written by a server of this version (%s): it is kept as %s", path, error, aside)
        with contextlib.suppress(OSError):
            os.replace(path, aside)
        return None


def _write(path: Path, value: Mapping[str, object]) -> None:
    """Replace a file atomically: a crash leaves the old file or the new one."""
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
