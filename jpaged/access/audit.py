"""Audit log: a line of JSON per call with caller, time, method, outcome and usage. Never a prompt or an answer.

A thread writes the lines, so that calls never wait for a disk. The file is appended to, and reopened if it was moved,
so that log rotation needs no signal. Lines that cannot be written are counted and lost.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Mapping
from typing import Any

from jpaged import json_text
from jpaged.errors import InvalidArgument, sentence_of

_LOG = logging.getLogger(__name__)

_MAX_WAITING = 10_000
"""Maximum queued lines; further ones are lost."""
_MAX_BATCH = 500
_MODE = 0o640
Line = Mapping[str, Any]


class AuditLog:
    """The audit file, and the thread that writes it.

    Attributes:
        num_written: lines written.
        num_lost: lines not written because the disk was full, or too slow.

    Raises:
        InvalidArgument: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.num_written = 0
        self.num_lost = 0
        self._path = path
        self._is_failing = False
        self._is_cut = False
        try:
            self._file = self._opened()
        except OSError as error:
            raise InvalidArgument("audit_log", f"cannot be written: {sentence_of(error)}") from error
        self._waiting: queue.Queue[Line | None] = queue.Queue(_MAX_WAITING)
        self._writer = threading.Thread(target=self._write_all, name="jpaged-audit", daemon=True)
        self._writer.start()

    def write(self, line: Line) -> None:
        """Queue a line; never blocks."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lose(1, "the disk is too slow")

    def close(self, timeout_s: float) -> None:
        """Write the queued lines within the timeout, and close the file."""
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._writer.join(timeout_s)

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            lines = [self._waiting.get()]
            while len(lines) < _MAX_BATCH and lines[-1] is not None:
                try:
                    lines.append(self._waiting.get_nowait())
                except queue.Empty:
                    break
            if lines[-1] is None:
                lines.pop()
                is_open = False
            if lines:
                self._write([line for line in lines if line is not None])
        os.close(self._file)

    def _write(self, lines: list[Line]) -> None:
        content = "".join(json_text.dumps(line) + "\n" for line in lines).encode()
        try:
            self._follow()
            self._append(b"\n" + content if self._is_cut else content)
        except OSError as error:
            self._lose(len(lines), sentence_of(error))
            return
        self.num_written += len(lines)
        if self._is_failing:
            self._is_failing = False
            _LOG.warning("audit_log: %s is writable again; %d lines were lost", self._path, self.num_lost)

    def _append(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            written = os.write(self._file, left)
            self._is_cut = left[:written].tobytes()[-1:] != b"\n"
            left = left[written:]

    def _follow(self) -> None:
        """Reopen the file if its path now has another file, or none."""
        mine = os.fstat(self._file)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            file = self._opened()
            os.close(self._file)
            self._file, self._is_cut = file, False

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)

    def _lose(self, num_lines: int, why: str) -> None:
        self.num_lost += num_lines
        if not self._is_failing:
            self._is_failing = True
            _LOG.error("audit_log: cannot write %s, lines are lost: %s", self._path, why)
