"""The blocks that a batch is cut into, and the parts that their results are. No Ray, and no engine.

A block is some consecutive lines of a file, and named by its place and the digest of their content, as its part is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from jpaged.client.parquet import COLUMNS, SUFFIX, get_rows, row_line
from jpaged.client.results import PASSING, failure_in
from jpaged.errors import InvalidArgument, JpagedError
from jpaged.openai.lines import BadLine, Line, parse_line

SUFFIXES = (".jsonl", SUFFIX)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive lines of one file.

    Attributes:
        begin: the first byte; in Parquet the first row of the row group.
        end: behind the last byte, or row.
        row_group: of Parquet.
        first_number: the number that its first line has in the file, from 1.
        num_lines: how many results it wants.
        digest: of the content.
    """

    path: str
    begin: int
    end: int
    row_group: int
    first_number: int
    num_lines: int
    digest: str


@dataclass(frozen=True, slots=True)
class Block:
    """A span, and its place among all spans of the input."""

    index: int
    span: Span

    @property
    def part(self) -> str:
        """The name of the file of its results."""
        return f"part-{self.index:06d}-{self.span.digest}.jsonl"


@dataclass(frozen=True, slots=True)
class Tally:
    """What a part holds: results that succeeded, that failed, and of these those that another run may not meet."""

    num_succeeded: int = 0
    num_failed: int = 0
    num_passing: int = 0

    def __add__(self, other: Tally) -> Tally:
        mine, others = asdict(self), asdict(other)
        return Tally(**{name: mine[name] + others[name] for name in mine})


def files_in(path: Path) -> list[Path]:
    """Return the files of an input, in the order of their names.

    Raises:
        InvalidArgument: there is none.
    """
    inside = path.rglob("*") if path.is_dir() else [path]
    files = sorted(file for file in inside if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise InvalidArgument(
            "INPUT", f"{path} is no file, and no folder of files, that end in {' or '.join(SUFFIXES)}"
        )
    return files


def spans_of(path: str, block_lines: int) -> tuple[list[Span], bytes]:
    """Cut a file into spans of so many lines, the last of a file or row group shorter.

    Returns:
        The spans, and 16 bytes for each custom_id: of two that are the same the same.

    Raises:
        InvalidArgument: it cannot be read as what its name says.
    """
    spans, ids = [], []
    for chunk in _chunks(_rows(path) if path.endswith(SUFFIX) else _texts(path), block_lines):
        digest = hashlib.sha256()
        for entry in chunk:
            digest.update(entry.content)
            if entry.custom_id is not None:
                ids.append(hashlib.sha256(entry.custom_id.encode(errors="surrogatepass")).digest()[:16])
        first, last = chunk[0], chunk[-1]
        where = (first.begin, last.end, first.row_group, first.number)
        spans.append(Span(path, *where, len(chunk), digest.hexdigest()[:16]))
    return spans, b"".join(ids)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of a file, with what `Span` says of several."""

    number: int
    begin: int
    end: int
    row_group: int
    content: bytes
    custom_id: str | None


def _texts(path: str) -> Iterator[_Entry]:
    begin = 0
    with open(path, "rb") as file:
        for number, text in enumerate(file, start=1):
            end = begin + len(text)
            if text.strip():
                yield _Entry(number, begin, end, 0, text, _parsed(path, number, text).custom_id)
            begin = end


def _rows(path: str) -> Iterator[_Entry]:
    begin, previous = 0, 0
    for number, (group, row) in enumerate(get_rows(Path(path)), start=1):
        begin = begin if group == previous else 0
        content = repr(row).encode(errors="surrogatepass")
        yield _Entry(number, begin, begin + 1, group, content, row_line(number, row).custom_id)
        begin, previous = begin + 1, group


def _chunks(entries: Iterable[_Entry], block_lines: int) -> Iterator[list[_Entry]]:
    chunk: list[_Entry] = []
    for entry in entries:
        if chunk and (len(chunk) == block_lines or entry.row_group != chunk[0].row_group):
            yield chunk
            chunk = []
        chunk.append(entry)
    if chunk:
        yield chunk


def _parsed(path: str, number: int, text: bytes) -> Line | BadLine:
    try:
        return parse_line(number, text.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: line {number}", "is not UTF-8") from error


def blocks_of(found: Sequence[tuple[list[Span], bytes]], path: Path) -> list[Block]:
    """Return the blocks of all files of an input.

    Raises:
        InvalidArgument: no line has a custom_id, or two share one.
    """
    blocks = [Block(index, span) for index, span in enumerate(span for spans, _ in found for span in spans)]
    ids = np.frombuffer(b"".join(ids for _, ids in found), "S16")
    if blocks and not len(ids):
        raise InvalidArgument("INPUT", f"{path}: no line has a custom_id")
    if (num_twice := len(ids) - len(np.unique(ids))) > 0:
        raise InvalidArgument("INPUT", f"{path}: {num_twice} lines have the custom_id of another")
    return blocks


class Parts:
    """The folder of results, held against other runs from `__enter__` to `__exit__`."""

    def __init__(self, folder: Path, blocks: Sequence[Block]) -> None:
        self._folder = folder
        self._blocks = blocks
        self._lock = -1

    def __enter__(self) -> Parts:
        self._folder.mkdir(exist_ok=True)
        self._lock = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise InvalidArgument("OUTPUT", f"{self._folder} is being written by another run") from error
        for torn in self._folder.glob(".part-*"):
            torn.unlink()
        expected = {block.part for block in self._blocks}
        for part in sorted(self._folder.glob("part-*.jsonl")):
            if part.name not in expected:
                problem = "is of another input or --block-lines: choose another folder, or move it away"
                raise InvalidArgument("OUTPUT", f"{part} {problem}")
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._lock)

    def missing(self) -> list[Block]:
        """Return the blocks that have no part, or one with failures that another run may not meet."""
        missing = []
        for block in self._blocks:
            path = self._folder / block.part
            if not path.exists() or tally_of(path).num_passing:
                missing.append(block)
        return missing

    def total(self) -> Tally:
        """Add up all parts; raises JpagedError where one has not a result for each line."""
        total = Tally()
        for block in self._blocks:
            tally = tally_of(self._folder / block.part)
            if (num_results := tally.num_succeeded + tally.num_failed) != block.span.num_lines:
                raise JpagedError(f"{block.part} has {num_results} results of {block.span.num_lines}")
            total += tally
        return total


def tally_of(part: Path) -> Tally:
    """Count what a part says."""
    codes = [failure_in(json.loads(line)) for line in part.read_bytes().split(b"\n")[:-1]]
    failed = [code for code in codes if code is not None]
    return Tally(len(codes) - len(failed), len(failed), sum(code in PASSING for code in failed))


class Reader:
    """Reads spans; it keeps the row group that it read last, for spans come in order."""

    def __init__(self) -> None:
        self._row_group: tuple[str, int, Any] = ("", 0, None)

    def lines(self, span: Span) -> list[Line | BadLine]:
        """Return the lines of a span."""
        if span.path.endswith(SUFFIX):
            rows = self._rows(span).slice(span.begin, span.end - span.begin).to_pylist()
            return [row_line(number, row) for number, row in enumerate(rows, start=span.first_number)]
        with open(span.path, "rb") as file:
            file.seek(span.begin)
            texts = file.read(span.end - span.begin).split(b"\n")
        numbered = enumerate(texts, start=span.first_number)
        return [_parsed(span.path, number, text) for number, text in numbered if text.strip()]

    def _rows(self, span: Span) -> Any:
        path, row_group, table = self._row_group
        if (path, row_group) != (span.path, span.row_group):
            with pq.ParquetFile(span.path) as file:
                table = file.read_row_group(span.row_group, columns=list(COLUMNS))
            self._row_group = (span.path, span.row_group, table)
        return table


class Part:
    """The results of one block, as a worker writes them: whole, or not at all.

    Beside it is a mark for each time that a worker began with it and did not end.
    """

    def __init__(self, folder: Path, block: Block) -> None:
        self._folder = folder
        self._name = block.part

    def begin(self) -> int:
        """Note that a worker begins; return how many have done so in this run."""
        (self._folder / f".{self._name}.try-{uuid.uuid4().hex}").touch()
        return len(self._marks())

    def write(self, lines: Iterable[str]) -> None:
        """Write the results in one step."""
        new = self._folder / f".{self._name}.{uuid.uuid4().hex}"
        with new.open("wb") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        new.rename(self._folder / self._name)
        for mark in self._marks():
            mark.unlink(missing_ok=True)

    def _marks(self) -> list[Path]:
        return list(self._folder.glob(f".{self._name}.try-*"))
