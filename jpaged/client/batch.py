"""Runs an OpenAI batch file against servers: distribution, retries, and an output that can be resumed.

A line of output is written when its request has ended. A second run keeps successes and permanent failures, and runs
the rest: requests without a line, and those with a transient failure (`results.PASSING`).

Several servers of one model share the lines. Each server pulls lines when it has capacity:

    Lines ──take──> Target: a window of calls in flight ──> a result
       ^────return──── it is full, or lost

The window is the number of rows that the server reports. A slow server has free capacity less often, and so gets fewer
lines; near the end it takes no line that the others would finish sooner. A line is in one place at any time, so that it
gets one result.

Lines of a server that fails are run by the others. If all servers are unavailable for longer than the retries take, the
run ends; written lines stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import math
import re
import shutil
import time
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Generic, Protocol, TypeVar

from jpaged.client.aio import AsyncClient
from jpaged.client.channel import Backoff, Tls, require_target
from jpaged.client.results import Results, replace_file
from jpaged.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    JpagedError,
    PermissionDenied,
    TryLater,
    Unavailable,
    Unsupported,
)
from jpaged.openai.lines import Answers, BadLine, Line, failure_line, parse_file
from jpaged.server_load import Load
from jpaged.types import ModelInfo

LOST = (Unavailable, Cancelled)
"""Errors of calls whose server ends or is unreachable."""
ELSEWHERE = (TryLater, *LOST)
"""After these errors another server, or the same one later, can run the line."""

_ROWS_FACTOR = 2
"""Calls per row: the next request waits for the row while an answer is sent."""
_LATENCY_SHARE = 0.2
"""Weight of the newest answer in the moving average of a server's latency."""
_MAX_TRIES = 8
"""Number of consecutive failures after which a server counts as gone."""
_MAX_LOSSES = 2 * _MAX_TRIES
"""Number of servers that a line may lose before it fails: the line may be what crashes them."""
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 15.0
_LOAD_INTERVAL_S = 1.0
_MEET_TIMEOUT_S = 30.0
_SCHEME = re.compile(r"[a-z0-9-]+:[^0-9,]|ipv[46]:")


def targets_in(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the servers that are named, one or several (separated by commas) in a text.

    Raises:
        InvalidArgument: one is named twice.
    """
    names: list[str] = []
    for text in texts:
        names += [text] if _SCHEME.match(text) else [name.strip() for name in text.split(",")]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument("--target", f"{name} is given twice")
    return tuple(names)


def compute_window(load: Load, num_open: int, max_concurrency: int) -> int:
    """Return the maximum number of calls in flight to a server, at least 1.

    Args:
        load: load that the server reports.
        num_open: calls in flight from this client; the server's other requests belong to other clients.
        max_concurrency: upper limit.
    """
    num_others = max(0, load.num_running + load.num_waiting - num_open)
    return max(1, min(max_concurrency, _ROWS_FACTOR * load.max_num_seqs - num_others))


class BatchServer(Protocol):
    """Information that a server reports."""

    async def model_info(self) -> ModelInfo: ...

    async def load(self) -> Load: ...


_S = TypeVar("_S", bound=BatchServer)


class Lines:
    """The lines that wait to be run, and the number of lines being run.

    Args:
        lines: read lazily, when they are taken.
        num_lines: maximum number of lines.
    """

    def __init__(self, lines: Iterator[Line], num_lines: int) -> None:
        self._lines = lines
        self._num_unread = num_lines
        self._returned: deque[Line] = deque()
        self._num_open = 0
        self._num_losses: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Upper bound of the lines that wait."""
        return len(self._returned) + self._num_unread

    @property
    def is_done(self) -> bool:
        """True if every line has its result."""
        return not self.num_waiting and not self._num_open

    def take(self) -> Line | None:
        """Return a line to run, returned ones first; None if none waits."""
        if self._returned:
            line: Line | None = self._returned.popleft()
        else:
            line = next(self._lines, None)
            self._num_unread = 0 if line is None else self._num_unread - 1
        self._num_open += line is not None
        return line

    def give_back(self, line: Line) -> None:
        """Put a line back, to run it again."""
        self._num_open -= 1
        self._returned.append(line)

    def note_loss(self, line: Line) -> int:
        """Return the number of servers lost while running this line."""
        self._num_losses[line.custom_id] += 1
        return self._num_losses[line.custom_id]

    def finish(self) -> None:
        """Record that a line has its result."""
        self._num_open -= 1


class BatchTarget(Generic[_S]):
    """One server: availability, window of calls and latency.

    Args:
        max_concurrency: maximum calls in flight, whatever the server reports.
    """

    def __init__(self, name: str, server: _S, max_concurrency: int) -> None:
        self.name = name
        self.server = server
        self.model: ModelInfo | None = None
        self.is_there = False
        self.num_absences = 0
        self.num_open = 0
        self.num_answered = 0
        self.latency_s: float | None = None
        self._max_concurrency = max_concurrency
        self._window = self._num_rows = max_concurrency
        self._paused_until_s = 0.0
        self._pauses = self._absences = _backoff()

    @property
    def window(self) -> int:
        """Allowed calls in flight; until the first answer shows the latency, at most the number of rows."""
        return self._window if self.latency_s is not None else min(self._window, self._num_rows)

    @property
    def answers_per_s(self) -> float:
        """Lines that it answers per second with its window full; 0 before the first answer."""
        return self.window / max(self.latency_s, 1e-9) if self.latency_s is not None else 0.0

    def pause_left_s(self, now_s: float) -> float:
        """Return the remaining backoff after a full queue or a failure."""
        return max(0.0, self._paused_until_s - now_s)

    def is_open(self, now_s: float) -> bool:
        """Return True if it is believed to be available and accepting calls."""
        return self.is_there and not self.pause_left_s(now_s)

    def note_model(self, model: ModelInfo) -> None:
        """Record that it is available, and its model."""
        self.model, self.is_there = model, True

    def note_load(self, load: Load) -> None:
        """Set the window by its load."""
        self._num_rows = max(1, min(self._max_concurrency, load.max_num_seqs))
        self._window = compute_window(load, self.num_open, self._max_concurrency)

    def note_answer(self, took_s: float | None) -> None:
        """Record an answer; `took_s` is None if it should not count for the latency."""
        self.num_answered += 1
        if took_s is not None:
            newest = _LATENCY_SHARE if self.latency_s is not None else 1.0
            self.latency_s = newest * took_s + (1 - newest) * (self.latency_s or 0.0)
        self.num_absences = 0
        self._pauses, self._absences = _backoff(), _backoff()

    def note_full(self, now_s: float, retry_after_s: float) -> None:
        """Shrink the window after a full queue, and pause until the server's retry time."""
        self._window = max(1, self.num_open - 1)
        if not self.pause_left_s(now_s):
            self._paused_until_s = now_s + self._pauses.next_s(retry_after_s)

    def note_absence(self, now_s: float) -> None:
        """Record that it is unavailable, and back off exponentially until it answers."""
        self.is_there = False
        self.num_absences += 1
        self._paused_until_s = now_s + self._absences.next_s()


class BatchTargets(Generic[_S]):
    """All servers of a run.

    Args:
        servers: by the names used in errors.
        max_concurrency: maximum calls in flight per server.
        on_retry: called whenever a line, or a query of a server, is retried.
    """

    def __init__(self, servers: Mapping[str, _S], max_concurrency: int, on_retry: Callable[[], None]) -> None:
        self._targets = [BatchTarget(name, server, max_concurrency) for name, server in servers.items()]
        self._on_retry = on_retry
        self._failure: Exception | None = None
        self._changed = _Signal()

    @property
    def num_answered(self) -> dict[str, int]:
        """Number of lines answered by each server, by name."""
        return {target.name: target.num_answered for target in self._targets}

    async def meet(self) -> ModelInfo:
        """Query the model of all servers, and wait for one if none is available; return the model.

        Raises:
            InvalidArgument: two servers have different models.
            Unavailable: none was available after all retries.
        """
        while True:
            await asyncio.gather(*(self._meet(target) for target in self._targets))
            self._require_one_model()
            for target in self._targets:
                if target.model is not None:
                    return target.model
            self._require_one_left()
            self._on_retry()
            await asyncio.sleep(min(target.pause_left_s(_now_s()) for target in self._targets))

    async def run(
        self, lines: Lines, answer: Callable[[_S, Line], Awaitable[bool]], fail: Callable[[Line, JpagedError], None]
    ) -> None:
        """Run lines until each has its result.

        Args:
            lines: the lines to run.
            answer: runs a line on a server and stores its result; returns True if the server ran it and did not refuse
                it at once. An error of `ELSEWHERE` returns the line to the queue, any other error ends the run.
            fail: stores the failure of a line whose servers were lost repeatedly.

        Raises:
            InvalidArgument: a server that became available later has another model.
            Unavailable: all servers are gone.
        """
        try:
            async with asyncio.TaskGroup() as group:

                async def call(target: BatchTarget[_S], line: Line) -> None:
                    await self._call(target, line, lines, answer, fail)

                def begin(target: BatchTarget[_S], line: Line) -> None:
                    target.num_open += 1
                    group.create_task(call(target, line))

                helpers = [group.create_task(self._pull(target, lines, begin)) for target in self._targets]
                helpers += [group.create_task(self._watch(target)) for target in self._targets]
                while not lines.is_done:
                    await self._changed.wait()
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as errors:  # the first has cancelled all others
            raise errors.exceptions[0] from None

    async def _pull(
        self, target: BatchTarget[_S], lines: Lines, begin: Callable[[BatchTarget[_S], Line], None]
    ) -> None:
        while True:
            if not target.is_there:
                self._require_one_left()
                await asyncio.sleep(target.pause_left_s(_now_s()))
                await self._meet(target)
                self._require_one_model()
                continue
            while self._may_take(target, lines.num_waiting) and (line := lines.take()) is not None:
                begin(target, line)
            if lines.is_done:  # the remaining lines were invalid, so no answer will signal the end
                self._changed.fire()
            await self._changed.wait(target.pause_left_s(_now_s()) or None)

    def _may_take(self, target: BatchTarget[_S], num_waiting: int) -> bool:
        """Return True if a server has capacity, and would answer before the others finish all waiting lines."""
        now_s = _now_s()
        if not (target.is_open(now_s) and target.num_open < target.window):
            return False
        others = [other for other in self._targets if other is not target and other.is_open(now_s)]
        latencies_s = [other.latency_s for other in others if other.latency_s is not None]
        if target.latency_s is None or not latencies_s:
            return True
        others_s = min(latencies_s) + num_waiting / sum(other.answers_per_s for other in others)
        return target.latency_s <= others_s

    async def _call(
        self,
        target: BatchTarget[_S],
        line: Line,
        lines: Lines,
        answer: Callable[[_S, Line], Awaitable[bool]],
        fail: Callable[[Line, JpagedError], None],
    ) -> None:
        began_s = _now_s()
        try:
            has_run = await answer(target.server, line)
        except TryLater as error:
            target.note_full(_now_s(), error.retry_after_s)
            self._run_again(line, lines)
        except LOST as error:
            if target.is_there:
                target.note_absence(_now_s())
                self._failure = error
            if lines.note_loss(line) < _MAX_LOSSES:
                self._run_again(line, lines)
            else:
                fail(line, error)
                lines.finish()
        else:
            target.note_answer(_now_s() - began_s if has_run else None)
            lines.finish()
        finally:
            target.num_open -= 1
            self._changed.fire()

    def _run_again(self, line: Line, lines: Lines) -> None:
        lines.give_back(line)
        self._on_retry()

    async def _meet(self, target: BatchTarget[_S]) -> None:
        """Query a server's model and load."""
        try:
            async with asyncio.timeout(_MEET_TIMEOUT_S):
                target.note_model(await target.server.model_info())
        except (*ELSEWHERE, DeadlineExceeded, TimeoutError) as error:
            target.note_absence(_now_s())
            self._failure = error
        else:
            await self._measure(target)

    def _require_one_left(self) -> None:
        if all(target.num_absences >= _MAX_TRIES for target in self._targets):
            raise Unavailable(str(self._failure) or f"no response within {_MEET_TIMEOUT_S:.0f} s") from self._failure

    async def _watch(self, target: BatchTarget[_S]) -> None:
        while True:
            await asyncio.sleep(_LOAD_INTERVAL_S)
            if target.is_there:
                await self._measure(target)
                self._changed.fire()

    async def _measure(self, target: BatchTarget[_S]) -> None:
        """Query a server's load; if it reports none (as a proxy), the window stays at its limit."""
        with contextlib.suppress(*ELSEWHERE, DeadlineExceeded, PermissionDenied, Unsupported, TimeoutError):
            async with asyncio.timeout(_MEET_TIMEOUT_S):
                target.note_load(await target.server.load())

    def _require_one_model(self) -> None:
        met = [(target.name, target.model) for target in self._targets if target.model is not None]
        for name, model in met[1:]:
            first = met[0][1]
            differences = [
                f"{one.name} is {getattr(model, one.name)!r}, not {getattr(first, one.name)!r}"
                for one in dataclasses.fields(ModelInfo)
                if one.name != "aliases" and getattr(model, one.name) != getattr(first, one.name)
            ]
            if differences:
                raise InvalidArgument(
                    "--target", f"{name} serves another model than {met[0][0]}: {'; '.join(differences)}"
                )


class _Signal:
    """Wakes all waiters at every change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the next change, or for the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()


def _backoff() -> Backoff:
    return Backoff(_FIRST_BACKOFF_S, 2.0, _MAX_BACKOFF_S)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


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


class LineSource(Protocol):
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


def _source(path: Path) -> LineSource:
    if path.suffix == PARQUET_SUFFIX or path.is_dir():
        lines: LineSource = _parquet(path).ParquetLines(path)
        return lines
    return FileLines(path)


def _parquet(path: Path) -> ModuleType:
    """Return the module for Parquet; raise InvalidArgument if pyarrow is missing."""
    try:
        from jpaged.client import parquet
    except ModuleNotFoundError as error:
        raise InvalidArgument(str(path), "is Parquet, which needs pyarrow: pip install 'jpaged[batch]'") from error
    return parquet


async def _run(
    options: BatchOptions, source: LineSource, output: Results, on_progress: Callable[[BatchSummary], None]
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
        batch = _BatchRun(clients, options.max_concurrency, output, before, on_progress)
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


class _BatchRun:
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
        self._targets = BatchTargets(clients, max_concurrency, partial(self._count, num_retries=1))
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
