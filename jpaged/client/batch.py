"""Runs an OpenAI batch file against servers: the work shared, retries, and an output that can be taken up again.

A line of output is written when its request has ended. A second run keeps what succeeded and what can never succeed,
and runs the others: those without a line, and those that failed for a reason that may pass (`results.PASSING`).
A server that goes away has its lines run by the others; when all are gone for longer than the retries reach, the run
ends; what it has written stays.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Protocol

from jpaged.client.aio import AsyncClient
from jpaged.client.batching.targets import ELSEWHERE, Lines, Targets, targets_in
from jpaged.client.channel import require_target
from jpaged.client.results import Results, replace_file
from jpaged.client.tls import Tls
from jpaged.errors import InvalidArgument, JpagedError
from jpaged.openai.answers import Answers
from jpaged.openai.lines import BadLine, Line, failure_line, parse_file

DEFAULT_MAX_CONCURRENCY = 256
"""Twice the rows that a server has by default."""
PARQUET_SUFFIX = ".parquet"
GZIP_SUFFIX = ".gz"
_GZIP_MAGIC = b"\x1f\x8b"
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Where to read, where to write, whom to ask, and how much at a time.

    Attributes:
        input_path: lines of JSON, compressed by gzip or not; Parquet if the name ends in .parquet, or a folder of such
            files.
        output_path: lines of JSON, by its name compressed (.gz) or Parquet (.parquet).
        target: one server, or several of one model.
        max_concurrency: requests in flight to each server at most, whatever places it says it has.
        timeout_s: for each try of a request; None is none.
        api_key: what servers with keys let it in with.
        tls: whom it believes and what it shows; None connects in clear.
        proxy: as of `Client`.
    """

    input_path: Path
    output_path: Path
    target: str | Sequence[str]
    max_concurrency: int = DEFAULT_MAX_CONCURRENCY
    timeout_s: float | None = None
    api_key: str = field(default="", repr=False)
    tls: Tls | None = None
    proxy: str | None = None

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise InvalidArgument("--max-concurrency", f"{self.max_concurrency} is below the limit of 1")
        if self.timeout_s is not None and not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise InvalidArgument("--timeout", f"{self.timeout_s} s is not a number above 0; leave it out for no limit")
        for target in self.targets:
            require_target("--target", target)

    @property
    def targets(self) -> tuple[str, ...]:
        """Every server by itself; raises InvalidArgument where one is named twice."""
        return targets_in([self.target] if isinstance(self.target, str) else self.target)


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What a run did. Lines that an earlier run had finished are in `num_skipped`, failed ones `num_failed_before`.

    Attributes:
        num_answered: how many lines each server has answered, by its name.
    """

    num_lines: int = 0
    num_skipped: int = 0
    num_failed_before: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    elapsed_s: float = 0.0
    num_answered: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_done(self) -> int:
        """Lines that need no further run."""
        return self.num_skipped + self.num_succeeded + self.num_failed

    @property
    def has_failures(self) -> bool:
        """Whether a request failed, in this run or in one before."""
        return self.num_failed + self.num_failed_before > 0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, over the whole run."""
        return self.completion_tokens / self.elapsed_s if self.elapsed_s else 0.0


class Source(Protocol):
    """The lines of an input, which can be gone through several times."""

    @property
    def ids(self) -> Collection[str]: ...

    @property
    def num_lines(self) -> int: ...

    def __iter__(self) -> Iterator[Line | BadLine]: ...


class FileLines:
    """The lines of a file of JSON, which gzip may have compressed."""

    def __init__(self, path: Path) -> None:
        try:
            data = path.read_bytes()
            self._lines = parse_file(gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InvalidArgument("--input", f"{path} cannot be decompressed: {error}") from error
        except OSError as error:
            raise InvalidArgument("--input", f"{path} cannot be read: {error.strerror or error}") from error
        self.ids = {line.custom_id for line in self._lines if line.custom_id is not None}
        self.num_lines = len(self._lines)

    def __iter__(self) -> Iterator[Line | BadLine]:
        return iter(self._lines)


async def run_batch(options: BatchOptions, on_progress: Callable[[BatchSummary], None]) -> BatchSummary:
    """Runs every line of the input that the output does not hold yet, or holds as failed for a reason that may pass.

    Args:
        options: what to run.
        on_progress: told the summary so far, whenever it has changed.

    Raises:
        InvalidArgument: the input, the output or the servers are not what they should be; nothing was sent.
        OutputError: another run writes the output, or it cannot be written.
        Unavailable: no server was there, or all went away for good.
    """
    source = _source(options.input_path)
    path = options.output_path
    if path.exists() and path.samefile(options.input_path):
        raise InvalidArgument("--output", f"{path} is the input")
    if path.suffix not in (PARQUET_SUFFIX, GZIP_SUFFIX):
        with Results(path, source.ids) as output:
            return await _run(options, source, output, on_progress)
    pack, unpack = _pack_gzip, _unpack_gzip
    if path.suffix == PARQUET_SUFFIX:
        parquet = _parquet(path)
        pack, unpack = parquet.pack, parquet.unpack
    if path.exists() and not path.is_file():
        raise InvalidArgument("--output", f"{path} is not a regular file")

    def restore(journal: Path) -> None:
        if path.exists():
            unpack(path, journal)

    journal = path.with_name(path.name + ".jsonl")
    with Results(journal, source.ids, restore) as output:
        summary = await _run(options, source, output, on_progress)
        pack(journal, path)
    return summary


def _pack_gzip(journal: Path, output: Path) -> None:
    """Compress the gathered lines into the output, and remove them; the old output stays until the new one is whole."""

    def write(new: Path) -> None:
        with journal.open("rb") as lines, gzip.open(new, "wb", compresslevel=6) as compressed:
            shutil.copyfileobj(lines, compressed, _COPY_BYTES)

    replace_file(output, write)
    journal.unlink()


def _unpack_gzip(output: Path, journal: Path) -> None:
    """Write the lines of an output to the journal; raises InvalidArgument if gzip did not make it."""

    def write(new: Path) -> None:
        with gzip.open(output, "rb") as compressed, new.open("wb") as lines:
            shutil.copyfileobj(compressed, lines, _COPY_BYTES)

    try:
        replace_file(journal, write)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidArgument("--output", f"{output} cannot be decompressed: {error}: move the file away") from error


def _source(path: Path) -> Source:
    if path.suffix == PARQUET_SUFFIX or path.is_dir():
        lines: Source = _parquet(path).ParquetLines(path)
        return lines
    return FileLines(path)


def _parquet(path: Path) -> ModuleType:
    """The module that reads and writes it; raises InvalidArgument where pyarrow is missing."""
    try:
        from jpaged.client.batching import parquet
    except ModuleNotFoundError as error:
        raise InvalidArgument(str(path), "is Parquet, which needs pyarrow: pip install 'jpaged[batch]'") from error
    return parquet


async def _run(
    options: BatchOptions, source: Source, output: Results, on_progress: Callable[[BatchSummary], None]
) -> BatchSummary:
    finished = output.finished

    def todo() -> Iterator[Line | BadLine]:
        return (line for line in source if line.custom_id not in finished)

    before = BatchSummary(source.num_lines, len(finished), output.num_failed)
    has_requests = any(isinstance(line, Line) for line in todo())
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(
                AsyncClient(
                    name,
                    timeout_s=options.timeout_s,
                    api_key=options.api_key,
                    tls=options.tls,
                    proxy=options.proxy,
                    resuming=None,
                )
            )
            for name in options.targets
        }
        batch = _Batch(clients, options.max_concurrency, output, before, on_progress)
        on_progress(batch.summary)
        if has_requests:
            await batch.meet()
        output.retake()
        good = batch.refusing(todo())
        if has_requests:
            await batch.run(Lines(good, before.num_lines - before.num_skipped))
        for _ in good:  # there is none, but those that are refused on the way to it
            pass
    return batch.summary


class _Batch:
    """One run: what comes of lines, and the summary of it."""

    def __init__(
        self,
        clients: Mapping[str, AsyncClient],
        max_concurrency: int,
        output: Results,
        summary: BatchSummary,
        on_progress: Callable[[BatchSummary], None],
    ) -> None:
        self.summary = summary
        self._targets = Targets(clients, max_concurrency, partial(self._count, num_retries=1))
        self._output = output
        self._on_progress = on_progress
        self._start_s = time.monotonic()

    async def meet(self) -> None:
        """Waits for a server, and asks which model it has."""
        self._answers = Answers(await self._targets.meet())

    def refusing(self, lines: Iterable[Line | BadLine]) -> Iterator[Line]:
        """The lines that are requests; the others are written as failed when they are passed."""
        for line in lines:
            if isinstance(line, Line):
                yield line
            else:
                self._fail(line, line.error)

    async def run(self, lines: Lines) -> None:
        """Has the servers take the lines."""
        await self._targets.run(lines, self._answer, self._fail)
        self._count()

    async def _answer(self, client: AsyncClient, line: Line) -> bool:
        try:
            answered = await self._answers.answer(client, line)
        except ELSEWHERE:
            raise
        except JpagedError as error:
            self._fail(line, error)
            return False
        else:
            self._output.append(answered.text)
            self._count(
                num_succeeded=1,
                prompt_tokens=answered.prompt_tokens,
                completion_tokens=answered.completion_tokens,
            )
            return True

    def _fail(self, line: Line | BadLine, error: JpagedError) -> None:
        self._output.append(failure_line(line.custom_id, error))
        self._count(num_failed=1)

    def _count(self, **more: int) -> None:
        """Adds to fields of the summary, by their names."""
        counts = {name: getattr(self.summary, name) + number for name, number in more.items()}
        elapsed_s, num_answered = time.monotonic() - self._start_s, self._targets.num_answered
        self.summary = replace(self.summary, **counts, elapsed_s=elapsed_s, num_answered=num_answered)
        self._on_progress(self.summary)
