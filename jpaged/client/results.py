"""The output file of a batch: one line per request, safe against crashes, concurrent runs and a full disk.

open     take the lock, cut off a last line that a crash left incomplete, and read the file
retake   remove the lines of requests that run again, in one step: a new file replaces the old one
append   write a line completely or not at all
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jpaged.errors import InvalidArgument, JpagedError

PASSING = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED", "INTERNAL", "UNKNOWN", "DATA_LOSS"})
"""Status codes of failures that another run may not meet: the server was unavailable, too slow, or ended.

INTERNAL is included: the engine or a device failed. All other codes are caused by the request and stay:
INVALID_ARGUMENT, NOT_FOUND, UNIMPLEMENTED, RESOURCE_EXHAUSTED (a limit of gRPC's; runs wait for a full queue).
"""

_BEGINNINGS = (b'{"id":"batch_req_', b'{"id": "batch_req_')
"""An incomplete line is cut only if it has one of these beginnings; any other file is left alone."""


_PASSING_STATUSES = frozenset({499, 500, 503, 504})


def failure_in(line: Mapping[str, Any]) -> str | None:
    """Return the gRPC status or the code of a line's failure; None if the line has an answer.

    Raises:
        KeyError, TypeError: it is not a line of output.
    """
    answer, failure = line["response"], line["error"]
    if failure is not None:
        return str(failure["code"])
    if answer is None or answer.get("status_code", 200) == 200:
        return None
    return "UNAVAILABLE" if answer["status_code"] in _PASSING_STATUSES else str(answer["body"]["error"]["code"])


class OutputError(JpagedError):
    """The output cannot be read or written, or another run holds it."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line in the file with its byte range; `code` is the failure's code, None on success."""

    custom_id: str | None
    code: str | None
    start: int
    end: int


class Results:
    """The output file, locked against other runs from `__enter__` to `__exit__` or the process's end.

    Args:
        path: created if missing; a link is followed.
        custom_ids: those of the input.
        restore: called under the lock with the path if the file is missing: it may create one.

    Raises:
        InvalidArgument: it is not a regular file, or the output of another batch.
        OutputError: it cannot be opened, or another run holds it; names the run.
    """

    def __init__(self, path: Path, custom_ids: Collection[str], restore: Callable[[Path], None] | None = None) -> None:
        self._restore = restore
        self._name = path
        self._path = Path(os.path.realpath(path))
        self._custom_ids = custom_ids
        self._kept: list[_Entry] = []
        self._has_others = False
        self._lock = -1
        self._file = -1
        self._num_bytes = 0

    @property
    def lock_path(self) -> Path:
        """The lock file next to the output; it names its holder, and exists only while it is locked."""
        return self._path.with_name(self._path.name + ".lock")

    @property
    def finished(self) -> set[str]:
        """The custom_ids of lines that stay."""
        return {entry.custom_id for entry in self._kept if entry.custom_id is not None}

    @property
    def num_failed(self) -> int:
        """Number of failed requests among the lines that stay."""
        return sum(entry.code is not None for entry in self._kept)

    def __enter__(self) -> Self:
        if self._path.exists() and not self._path.is_file():
            raise InvalidArgument("--output", f"{self._name} is not a regular file")
        try:
            self._lock = self._take_lock()
            if self._restore is not None and not self._path.exists():
                self._restore(self._path)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._read()
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                raise self._refused("opened", error) from error
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def retake(self) -> None:
        """Remove lines that do not stay: transient failures, lines without an id, duplicates of an id.

        Raises:
            OutputError: there is no room for a second file; the first is unchanged.
        """
        if self._has_others:
            try:
                self._replace()
            except OSError as error:
                raise self._refused("rewritten", error) from error
            self._has_others = False

    def append(self, line: str) -> None:
        """Append a line, completely or not at all.

        Raises:
            OutputError: the disk is full, or a limit is reached; the file is unchanged.
        """
        data = line.encode()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            with contextlib.suppress(OSError):  # otherwise the next run cuts it off
                os.ftruncate(self._file, self._num_bytes)
            raise self._refused("written", error) from error
        self._num_bytes += len(data)

    def _take_lock(self) -> int:
        while True:
            lock = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                who = os.pread(lock, 1024, 0).decode(errors="replace") or "another run"
                os.close(lock)
                if not isinstance(error, BlockingIOError):
                    raise
                raise OutputError(f"--output: {self._name} is being written by {who}: wait until it ends") from error
            if _is_at(lock, self.lock_path):
                with contextlib.suppress(OSError):  # the lock works even if a full disk cannot hold its text
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return lock
            os.close(lock)  # the previous holder has removed the file

    def _release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                self.lock_path.unlink()
            os.close(self._lock)
        self._file = self._lock = -1

    def _read(self) -> None:
        entries, end = [], 0
        with self._path.open("rb") as file:
            for number, text in enumerate(file, start=1):  # bytes: texts may contain other line ends
                if not text.endswith(b"\n"):
                    if not any(text.startswith(begin) or begin.startswith(text) for begin in _BEGINNINGS):
                        raise self._stranger(number)
                    break
                entries.append(self._entry(number, text, end))
                end += len(text)
        os.ftruncate(self._file, end)
        best: dict[str, _Entry] = {}
        for entry in entries:
            if entry.custom_id is not None and entry.code not in PASSING:
                first = best.setdefault(entry.custom_id, entry)
                if first.code is not None and entry.code is None:
                    best[entry.custom_id] = entry
        self._kept = sorted(best.values(), key=lambda entry: entry.start)
        self._has_others = len(self._kept) < len(entries)
        self._num_bytes = end

    def _entry(self, number: int, text: bytes, start: int) -> _Entry:
        try:
            value = json.loads(text)
            custom_id, answer, failure = value["custom_id"], value["response"], value["error"]
            code = failure_in(value)
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise self._stranger(number) from error
        if not isinstance(custom_id, str | None) or (answer is None) == (failure is None):
            raise self._stranger(number)
        if custom_id is not None and custom_id not in self._custom_ids:
            where = f"{self._name}: line {number}"
            raise InvalidArgument(where, f"custom_id {custom_id!r} is not in the input: this is another batch's output")
        return _Entry(custom_id, code, start, start + len(text))

    def _stranger(self, number: int) -> InvalidArgument:
        return InvalidArgument(f"{self._name}: line {number}", "is not a line of batch output: move the file away")

    def _replace(self) -> None:
        """Replace the file atomically: a crash leaves the old file or the new one."""
        path = self._path.with_name(self._path.name + ".new")
        new = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            os.fchmod(new, os.fstat(self._file).st_mode & 0o7777)
            with open(new, "wb", closefd=False) as buffered:
                for entry in self._kept:
                    buffered.write(os.pread(self._file, entry.end - entry.start, entry.start))
            os.fsync(new)
            os.replace(path, self._path)
        except BaseException:
            os.close(new)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        os.close(self._file)
        self._file, self._num_bytes = new, os.fstat(new).st_size

    def _refused(self, what: str, error: OSError) -> OutputError:
        return OutputError(f"--output: {self._name} cannot be {what}: {error.strerror or error}")


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file completely, or leave the existing one.

    Raises:
        OutputError: it cannot be written.
    """
    new = path.with_name(path.name + ".new")
    try:
        write(new)
        with new.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(new, path)
    except gzip.BadGzipFile:
        raise
    except OSError as error:
        raise OutputError(f"--output: {path} cannot be written: {error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
