"""Runs an OpenAI batch file against servers: distribution, retries, and an output that can be resumed.

A line of output is written when its request has ended. A second run keeps successes and permanent failures, and runs
the rest: requests without a line, and those with a transient failure (`results.PASSING`).

Lines of a server that fails are run by the others. If all servers are unavailable for longer than the retries take, the
run ends; written lines stay.
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
from jpaged.openai.lines import Answers, BadLine, Line, failure_line, parse_file

DEFAULT_MAX_CONCURRENCY = 256
"""Twice a server's default number of rows."""
PARQUET_SUFFIX = ".parquet"
GZIP_SUFFIX = ".gz"
_GZIP_MAGIC = b"\x1f\x8b"
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options of a batch run: files, servers and concurrency.

    Attributes:
        input_path: lines of JSON, compressed by gzip or not; Parquet if the name ends in .parquet, or a folder of such
            files.
        output_path: lines of JSON; compressed if the name ends in .gz, Parquet if in .parquet.
        target: one server, or several of one model.
        max_concurrency: maximum requests in flight per server, even if it reports more rows.
        timeout_s: timeout of each attempt of a request; None for none.
        api_key: key for servers that require one.
        tls: certificates; None connects without TLS.
        proxy: as in `Client`.
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
        """The list of servers; raises InvalidArgument if one is named twice."""
        return targets_in([self.target] if isinstance(self.target, str) else self.target)


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """Result of a run. Lines finished by earlier runs count in `num_skipped`, failed ones in `num_failed_before`.

    Attributes:
        num_answered: number of lines answered by each server, by name.
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
        """True if a request failed, in this run or an earlier one."""
        return self.num_failed + self.num_failed_before > 0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, over the whole run."""
        return self.completion_tokens / self.elapsed_s if self.elapsed_s else 0.0


class Source(Protocol):
    """The lines of an input; can be iterated several times."""

    @property
    def ids(self) -> Collection[str]: ...

    @property
    def num_lines(self) -> int: ...

    def __iter__(self) -> Iterator[Line | BadLine]: ...


class FileLines:
    """The lines of a JSON file, optionally compressed by gzip."""

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
    """Run every line of the input whose result is missing in the output or a transient failure.

    Args:
        options: files, servers and concurrency.
        on_progress: called with the summary whenever it changes.

    Raises:
        InvalidArgument: the input, the output or the servers are invalid; nothing was sent.
        OutputError: another run writes the output, or it cannot be written.
        Unavailable: no server was available, or all became unavailable.
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
    """Compress the journal into the output, and remove it; the old output stays until the new one is complete."""

    def write(new: Path) -> None:
        with journal.open("rb") as lines, gzip.open(new, "wb", compresslevel=6) as compressed:
            shutil.copyfileobj(lines, compressed, _COPY_BYTES)

    replace_file(output, write)
    journal.unlink()


def _unpack_gzip(output: Path, journal: Path) -> None:
    """Decompress an output into the journal; raise InvalidArgument if it is not gzip."""

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
    """Return the module for Parquet; raise InvalidArgument if pyarrow is missing."""
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
        for _ in good:  # consume the remaining invalid lines, which are written as failed
            pass
    return batch.summary


class _Batch:
    """One run: the results of lines, and the summary."""

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
        """Wait for a server, and query its model."""
        self._answers = Answers(await self._targets.meet())

    def refusing(self, lines: Iterable[Line | BadLine]) -> Iterator[Line]:
        """Yield the lines that are valid requests; write the others as failed."""
        for line in lines:
            if isinstance(line, Line):
                yield line
            else:
                self._fail(line, line.error)

    async def run(self, lines: Lines) -> None:
        """Run the lines on the servers."""
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
        """Add to fields of the summary, by name."""
        counts = {name: getattr(self.summary, name) + number for name, number in more.items()}
        elapsed_s, num_answered = time.monotonic() - self._start_s, self._targets.num_answered
        self.summary = replace(self.summary, **counts, elapsed_s=elapsed_s, num_answered=num_answered)
        self._on_progress(self.summary)
