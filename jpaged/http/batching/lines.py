"""The lines of an input, and the lines of output: answers go to one file, failures to another."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from jpaged import json_text
from jpaged.errors import InvalidArgument, JpagedError, StorageError
from jpaged.http.batching.values import BatchError, Counts
from jpaged.openai.lines import BadLine, Line, failure_line, parse_line

MAX_ERRORS = 100
"""Maximum reported errors of an input."""
MAX_CUSTOM_ID_CHARS = 512
_BOM = b"\xef\xbb\xbf"


def lines_in(path: Path, max_line_bytes: int) -> Iterator[Line | BadLine]:
    """Yield the lines of a file, one in memory at a time; skip empty ones."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(max_line_bytes + 1):
            number += 1
            if len(raw) > max_line_bytes:
                while not raw.endswith(b"\n") and (raw := file.readline(max_line_bytes)):
                    pass
                yield _bad(number, f"is over the limit of {max_line_bytes} bytes (max_request_size)")
                continue
            try:
                text = raw.removeprefix(_BOM if number == 1 else b"").decode().removesuffix("\n")
            except UnicodeDecodeError as error:
                yield _bad(number, f"is not UTF-8: byte 0x{raw[error.start]:02x} at {error.start}")
                continue
            if text.strip():
                yield parse_line(number, text)


def checked(path: Path, endpoint: str, *, max_line_bytes: int, max_lines: int) -> tuple[int, tuple[BatchError, ...]]:
    """Return the number of lines of an input, and its errors; an input with errors is not run at all."""
    errors: list[BatchError] = []
    first: dict[str, int] = {}
    num_lines = 0
    for line in lines_in(path, max_line_bytes):
        num_lines += 1
        if num_lines > max_lines:
            errors.append(BatchError("too_many_lines", f"there are more than {max_lines} (max_batch_lines)"))
            break
        error = _line_error(line, endpoint, first)
        if error is not None:
            errors.append(error)
            if len(errors) == MAX_ERRORS:
                break
    if not num_lines:
        errors.append(BatchError("empty_file", "the input has no lines"))
    return num_lines, tuple(errors)


def _line_error(line: Line | BadLine, endpoint: str, first: dict[str, int]) -> BatchError | None:
    if isinstance(line, BadLine):
        return BatchError("invalid_line", str(line.error), line.number, line.error.field.rpartition(": ")[2])
    if line.url != endpoint:
        problem = f"{line.url!r} is not {endpoint!r}, the endpoint of the batch"
        return BatchError("mismatched_url", problem, line.number, "url")
    if len(line.custom_id) > MAX_CUSTOM_ID_CHARS:
        problem = f"{len(line.custom_id)} characters; at most {MAX_CUSTOM_ID_CHARS}"
        return BatchError("invalid_custom_id", problem, line.number, "custom_id")
    number = first.setdefault(line.custom_id, line.number)
    if number != line.number:
        return BatchError("duplicate_custom_id", f"is also that of line {number}", line.number, "custom_id")
    return None


def _bad(number: int, problem: str) -> BadLine:
    return BadLine(number, None, InvalidArgument(f"line {number}", problem))


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("ab", buffering=0)  # unbuffered: bytes that a full disk refused are not retried on close
    except OSError as error:
        raise StorageError(f"an output cannot be written: {error.strerror or error}") from error


class Outputs:
    """The two files that a batch writes. Must not be shared between threads.

    Args:
        grow: reserves disk space for the next bytes, or raises.
        shrink: returns reserved space that is not used.

    Raises:
        StorageError: the disk cannot be written; the files end with the last complete line, and can be closed.

    Attributes:
        counts: numbers of written lines.
        done: their custom_ids.
    """

    def __init__(
        self, answers: Path, errors: Path, grow: Callable[[int], None], shrink: Callable[[int], None] = lambda num: None
    ) -> None:
        self._grow, self._shrink = grow, shrink
        self.done: set[str] = set()
        completed = self._taken_up(answers)
        failed = self._taken_up(errors)
        self.counts = Counts(completed, failed)
        self._answers, self._errors = _opened(answers), _opened(errors)

    def add_answer(self, custom_id: str, text: str) -> None:
        """Write the output line of a line that was answered."""
        self._add(self._answers, custom_id, text)
        self.counts = Counts(self.counts.completed + 1, self.counts.failed)

    def add_failure(self, custom_id: str, error: JpagedError) -> None:
        """Write the output line of a line that failed permanently."""
        self._add(self._errors, custom_id, failure_line(custom_id, error))
        self.counts = Counts(self.counts.completed, self.counts.failed + 1)

    def add_expired(self, custom_id: str) -> None:
        """Write the output line of a line whose completion window has passed."""
        error = {"code": "batch_expired", "message": "the completion window ended before this request ran"}
        line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": None, "error": error}
        self._add(self._errors, custom_id, json_text.dumps(line) + "\n")
        self.counts = Counts(self.counts.completed, self.counts.failed + 1)

    def close(self) -> None:
        """Sync both files to disk and close them."""
        try:
            for file in (self._answers, self._errors):
                if not file.closed:
                    with file:
                        os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(f"an output cannot be written: {error.strerror or error}") from error

    def _add(self, file: IO[bytes], custom_id: str, text: str) -> None:
        """Write a line completely or not at all; a resumed batch cuts off an incomplete one."""
        data = text.encode()
        self._grow(len(data))
        begin, done = os.fstat(file.fileno()).st_size, 0
        try:
            while done < len(data):
                done += file.write(data[done:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), begin)
            self._shrink(len(data))
            raise StorageError(f"an output cannot be written: {error.strerror or error}") from error
        self.done.add(custom_id)

    def _taken_up(self, path: Path) -> int:
        """Read the output of an earlier run, and cut off an incomplete line."""
        num_lines, end = 0, 0
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            for raw in file:
                try:
                    custom_id = json.loads(raw)["custom_id"] if raw.endswith(b"\n") else None
                except (ValueError, KeyError, TypeError):
                    custom_id = None
                if not isinstance(custom_id, str):
                    break
                self.done.add(custom_id)
                num_lines, end = num_lines + 1, end + len(raw)
            if path.stat().st_size > end:
                os.truncate(path, end)
        return num_lines
