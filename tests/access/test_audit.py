"""The audit's file: appended to, followed when it moves, and never waited for."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from jpaged.access import authenticator as audit_module
from jpaged.access.authenticator import AuditLog
from jpaged.errors import InvalidArgument


def lines_of(path: Path) -> list[int]:
    return [json.loads(line)["i"] for line in path.read_text().splitlines()]


def test_lines_are_appended_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"i": -1}\n')
    log = AuditLog(str(path))
    for i in range(1000):
        log.write({"i": i})
    log.close(60)
    assert lines_of(path) == [*range(-1, 1000)]
    assert (log.num_written, log.num_lost) == (1000, 0)
    other = AuditLog(str(tmp_path / "new.jsonl"))
    other.close(60)
    assert (tmp_path / "new.jsonl").stat().st_mode & 0o027 == 0


def test_a_file_that_was_moved_away_is_opened_again(tmp_path: Path) -> None:
    path, moved = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    log = AuditLog(str(path))
    log._write([{"i": 1}])
    path.rename(moved)
    log._write([{"i": 2}])
    path.unlink()
    log._write([{"i": 3}])
    other = tmp_path / "other"
    other.write_text("")
    os.replace(other, path)
    log.write({"i": 4})
    log.close(60)
    assert (lines_of(moved), lines_of(path)) == ([1], [4])


def test_a_full_disk_is_logged_once_and_lines_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog("/dev/full")
    for i in range(3):
        log._write([{"i": i}, {"i": i}])
    log.close(60)
    assert (log.num_written, log.num_lost) == (0, 6)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "lines are lost: No space left on device" in errors[0].getMessage()


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "audit.jsonl", os.write
    log = AuditLog(str(path))

    def cut(file: int, content: bytes) -> int:
        if len(content) < 6:
            raise OSError(28, "No space left on device")
        return write(file, content[:5])

    with monkeypatch.context() as full:
        full.setattr(os, "write", cut)
        log._write([{"i": 1}])
    log._write([{"i": 2}])
    log.close(60)
    assert path.read_text().splitlines() == ['{"i":', '{"i": 2}']
    assert (log.num_written, log.num_lost) == (1, 1)


def test_a_disk_that_is_too_slow_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "_MAX_WAITING", 3)
    let_go, begun, write = threading.Event(), threading.Event(), os.write

    def stuck(file: int, content: bytes) -> int:
        begun.set()
        let_go.wait()
        return write(file, content)

    with monkeypatch.context() as slow:
        slow.setattr(os, "write", stuck)
        log = AuditLog(str(tmp_path / "audit.jsonl"))
        log.write({"i": 0})
        assert begun.wait(60)
        for i in range(1, 10):
            log.write({"i": i})
        assert log.num_lost == 6
        let_go.set()
        log.close(60)
    assert lines_of(tmp_path / "audit.jsonl") == [0, 1, 2, 3]


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"audit_log: cannot be written: .*nowhere/audit.jsonl: No such file"):
        AuditLog(str(tmp_path / "nowhere" / "audit.jsonl"))
