"""One batch from its first line to its last, or until it expires, is cancelled, or the server ends.

    validating ──> in_progress ──> finalizing ──> completed
        └─> failed      ├─────────────────────> expired
                        └─> cancelling ───────> cancelled

When the server ends, a batch keeps its status; the next server resumes it, and runs the lines without output.

Answers go to one output file, failures to another. `ConcurrencyLimiter` is the number of lines that may run now without
delaying interactive requests.

Lines use rows that no other request has, except a few reserved for newcomers, and no line starts while a request waits.
With the policy `priority`, they also have the lowest priority.

`Threads` does the disk I/O: one thread writes, in the order of the calls; two read. `BatchJobRunner` resumes all
unfinished batches when the server accepts requests, and leaves them in their state when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from jpaged import json_text
from jpaged.access.authenticator import background, enter
from jpaged.config import HttpOptions
from jpaged.errors import InternalError, InvalidArgument, JpagedError, StorageError, TryLater, Unavailable
from jpaged.http.batches.store import Batch, BatchCounts, BatchError, Store
from jpaged.http.embeddings import LocalServer
from jpaged.openai.lines import Answers, BadLine, Line, LocalCalls, failure_line, parse_line
from jpaged.service.service import Service, Stage

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
        self.counts = BatchCounts(completed, failed)
        self._answers, self._errors = _opened(answers), _opened(errors)

    def add_answer(self, custom_id: str, text: str) -> None:
        """Write the output line of a line that was answered."""
        self._add(self._answers, custom_id, text)
        self.counts = BatchCounts(self.counts.completed + 1, self.counts.failed)

    def add_failure(self, custom_id: str, error: JpagedError) -> None:
        """Write the output line of a line that failed permanently."""
        self._add(self._errors, custom_id, failure_line(custom_id, error))
        self.counts = BatchCounts(self.counts.completed, self.counts.failed + 1)

    def add_expired(self, custom_id: str) -> None:
        """Write the output line of a line whose completion window has passed."""
        error = {"code": "batch_expired", "message": "the completion window ended before this request ran"}
        line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": None, "error": error}
        self._add(self._errors, custom_id, json_text.dumps(line) + "\n")
        self.counts = BatchCounts(self.counts.completed, self.counts.failed + 1)

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


PRIORITY = 1 << 20
"""Priority of lines: lower numbers are served first, and clients rarely use such a large one."""
_KEPT_SHARE = 0.25
_POLL_S = 0.02


class ConcurrencyLimiter:
    """Slots for lines of all batches together, granted in order of arrival."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turn = asyncio.Lock()
        self._num_taken = 0

    async def take(self) -> bool:
        """Wait for a slot; return False, without a slot, if the server accepts no more lines."""
        async with self._turn:
            while True:
                if not self._is_serving():
                    return False
                if self._has_room():
                    self._num_taken += 1
                    return True
                await asyncio.sleep(_POLL_S)

    def give_back(self) -> None:
        """Release a slot."""
        self._num_taken -= 1

    def _is_serving(self) -> bool:
        return self._service.state.stage is Stage.SERVING

    def _has_room(self) -> bool:
        engine = self._service.state.loaded().engine
        num_rows = engine.geometry.max_num_seqs * max(1, len(engine.replica_loads()))
        load = engine.load()
        free = num_rows - int(num_rows * _KEPT_SHARE)
        num_others = max(0, load.num_running - self._num_taken)
        return load.num_waiting == 0 and self._num_taken < max(1, free - num_others)


_T = TypeVar("_T")


class Threads:
    """Runs work on files. Work that has started completes even if the caller is cancelled."""

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, "jpaged-batch-write")
        self._readers = ThreadPoolExecutor(2, "jpaged-batch-read")

    async def write(self, work: Callable[[], _T]) -> _T:
        """Run work after all earlier writes; it completes even if the caller is cancelled."""
        done = asyncio.get_running_loop().run_in_executor(self._writer, work)
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        return await asyncio.shield(done)

    async def read(self, work: Callable[[], _T]) -> _T:
        """Run work that does not conflict with other work."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def close(self) -> None:
        """Wait for started work."""
        self._writer.shutdown()
        self._readers.shutdown(cancel_futures=True)


_LOG = logging.getLogger(__name__)

_LINES_AT_ONCE = 16
"""Number of lines to read ahead."""
_MAX_TAKES = 16
"""Maximum number of resumes without a completed line: one of its lines may be what crashes the server."""
_MAX_TRIES = 8
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a batch: bytes per line, and number of lines."""

    max_line_bytes: int
    max_lines: int


class BatchJob:
    """A running batch.

    Attributes:
        batch: its current state.
    """

    def __init__(
        self,
        service: Service,
        store: Store,
        threads: Threads,
        places: ConcurrencyLimiter,
        limits: BatchLimits,
        batch: Batch,
    ) -> None:
        self.batch = batch
        self._service = service
        self._store = store
        self._threads = threads
        self._places = places
        self._limits = limits
        self._is_cancelled = asyncio.Event()

    async def run(self) -> None:
        """Run it until it has ended or the server accepts no more lines; cancellation leaves it in its state."""
        try:
            if self.batch.status == "validating":
                await self._validate()
            if self.batch.status == "in_progress":
                await self._work()
            if self.batch.status in ("finalizing", "cancelling"):
                await self._finish("completed" if self.batch.status == "finalizing" else "cancelled")
        except StorageError as error:
            await self._fail(BatchError("storage", str(error)))
        except Exception as error:
            _LOG.error("batch %s failed", self.batch.id, exc_info=error)
            await self._fail(BatchError("internal_error", f"{type(error).__name__}: {error}"))

    async def cancel(self) -> None:
        """Begin to cancel it; answered lines stay."""
        if self.batch.status in ("validating", "in_progress"):
            await self._enter("cancelling")
            self._is_cancelled.set()

    async def _validate(self) -> None:
        path = self._store.path(self.batch.owner, self.batch.input_id)
        limits = self._limits
        check = partial(
            checked, path, self.batch.endpoint, max_line_bytes=limits.max_line_bytes, max_lines=limits.max_lines
        )
        num_lines, errors = await self._threads.read(check)
        if self.batch.status != "validating":
            return
        if errors:
            await self._enter("failed", errors=errors)
            return
        model = self._service.state.loaded().model.name
        await self._enter("in_progress", num_lines=num_lines, model=model)

    async def _work(self) -> None:
        batch, store = self.batch, self._store
        make = partial(
            Outputs,
            store.path(batch.owner, batch.output_id),
            store.path(batch.owner, batch.error_id),
            partial(store.grow, batch.owner),
            partial(store.shrink, batch.owner),
        )
        outputs = await self._threads.write(make)
        try:
            has_progress = outputs.counts.num_done > batch.counts.num_done
            num_takes = 1 if has_progress else batch.num_takes + 1
            await self._note(counts=outputs.counts, num_takes=num_takes)
            if num_takes > _MAX_TAKES:
                problem = f"was resumed {_MAX_TAKES} times, but no line has completed: a line may crash the server"
                await self._fail(BatchError("no_progress", problem))
                return
            ending = await self._run_lines(outputs)
            if ending == "expired":
                await self._threads.write(partial(self._write_expired, outputs))
        finally:
            try:
                await self._threads.write(outputs.close)  # after the lines that are still being written
            finally:
                self._count(outputs)
        if ending == "expired":
            await self._finish("expired")
        elif ending == "completed":
            await self._enter("finalizing")

    async def _run_lines(self, outputs: Outputs) -> str | None:
        """Run the remaining lines; return the outcome, None if lines are left for another server."""
        work = asyncio.create_task(self._run_all(outputs))
        cancelled = asyncio.create_task(self._is_cancelled.wait())
        try:
            remaining_s = max(0.0, self.batch.expires_at - time.time())
            await asyncio.wait((work, cancelled), timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
            if self._is_cancelled.is_set():
                return "cancelled"
            if not work.done():
                return "expired"
            work.result()
            return "completed" if self.batch.counts.num_done >= self.batch.num_lines else None
        finally:
            cancelled.cancel()
            work.cancel()
            await asyncio.wait((work,))

    async def _run_all(self, outputs: Outputs) -> None:
        loaded, http = self._service.state.loaded(), self._service.state.config.http
        answers = Answers(
            loaded.model,
            self._service.run_blocking,
            loaded.adapters.names,
            max_bytes=int(http.max_response_size * 2**20),
            local=LocalCalls(),
        )
        try:
            async with asyncio.TaskGroup() as group:
                async for line in self._todo(outputs):
                    if not await self._places.take():
                        return
                    task = group.create_task(self._answer(answers, outputs, line))
                    task.add_done_callback(lambda _: self._places.give_back())
        except BaseExceptionGroup as errors:  # the first has cancelled all others
            raise errors.exceptions[0] from None

    async def _todo(self, outputs: Outputs) -> AsyncIterator[Line]:
        path = self._store.path(self.batch.owner, self.batch.input_id)
        left = _left(lines_in(path, self._limits.max_line_bytes), frozenset(outputs.done))
        while some := await self._threads.read(lambda: list(itertools.islice(left, _LINES_AT_ONCE))):
            for line in some:
                yield line

    async def _answer(self, answers: Answers, outputs: Outputs, line: Line) -> None:
        enter(background(self.batch.key, self.batch.tenant))
        server = LocalServer(service=self._service, tenant=self.batch.tenant, priority=PRIORITY)
        for num_tries in itertools.count(1):
            try:
                answered = await answers.answer(server, line)
            except TryLater as error:  # a full queue, or a quota
                await asyncio.sleep(error.retry_after_s)
            except Exception as error:
                if self._is_server_ending():
                    return
                if isinstance(error, Unavailable) and num_tries < _MAX_TRIES:
                    await asyncio.sleep(_RETRY_S)
                    continue
                await self._threads.write(partial(outputs.add_failure, line.custom_id, _to_jpaged_error(error)))
                break
            else:
                await self._threads.write(partial(outputs.add_answer, line.custom_id, answered.text))
                break
        self._count(outputs)

    def _is_server_ending(self) -> bool:
        state = self._service.state
        return state.stage is not Stage.SERVING or state.loaded().engine.failure is not None

    def _write_expired(self, outputs: Outputs) -> None:
        path = self._store.path(self.batch.owner, self.batch.input_id)
        for line in _left(lines_in(path, self._limits.max_line_bytes), frozenset(outputs.done)):
            outputs.add_expired(line.custom_id)

    def _count(self, outputs: Outputs) -> None:
        self.batch = replace(self.batch, counts=outputs.counts)
        self._store.note(self.batch)

    async def _finish(self, status: str, **changes: Any) -> None:
        batch = self.batch
        files = [
            await self._threads.write(partial(self._store.add_output, batch.owner, file_id, f"{batch.id}_{what}.jsonl"))
            for file_id, what in ((batch.output_id, "output"), (batch.error_id, "error"))
        ]
        await self._enter(status, has_output=files[0] is not None, has_errors=files[1] is not None, **changes)

    async def _fail(self, error: BatchError) -> None:
        """End it with a failure; answered lines stay available as far as the disk allows."""
        try:
            await self._finish("failed", errors=(error,))
            return
        except JpagedError as another:
            _LOG.error("the outputs of batch %s are lost: %s", self.batch.id, another)
        try:
            await self._enter("failed", errors=(error,))
        except JpagedError as another:  # the next server resumes it, and hits the same error
            _LOG.error("batch %s cannot be saved: %s", self.batch.id, another)

    async def _enter(self, status: str, **changes: Any) -> None:
        times = {**self.batch.times, f"{status}_at": int(time.time())}
        await self._note(status=status, times=times, **changes)

    async def _note(self, **changes: Any) -> None:
        self.batch = replace(self.batch, **changes)
        self._store.note(self.batch)
        await self._threads.write(partial(self._store.save, self.batch))


def _left(lines: Iterator[Line | BadLine], done: frozenset[str]) -> Iterator[Line]:
    return (line for line in lines if isinstance(line, Line) and line.custom_id not in done)


def _to_jpaged_error(error: Exception) -> JpagedError:
    if isinstance(error, JpagedError):
        return error
    _LOG.error("a line of a batch failed", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")


_MAX_RUNNING = 4
"""Maximum running batches, at most one per owner; further ones of an owner wait."""
_WATCH_INTERVAL_S = 0.2


class BatchJobRunner:
    """The batches of one server.

    Args:
        root: the folder of `--batch-dir`.

    Attributes:
        store: files and batches on disk.
        threads: threads for calls of the store.

    Raises:
        InvalidArgument: the folder cannot be used.
    """

    def __init__(self, service: Service, options: HttpOptions, root: Path) -> None:
        share = options.tenant_batch_share if service.state.config.server.isolate_tenants else 1.0
        self.store = Store(root, int(options.max_batch_storage * 2**30), share)
        self.threads = Threads()
        self._service = service
        max_line_bytes = int(service.state.config.server.max_request_size * 2**20)
        self._limits = BatchLimits(max_line_bytes, options.max_batch_lines)
        self._places = ConcurrencyLimiter(service)
        self._running: dict[str, tuple[BatchJob, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to run batches as soon as the server accepts requests."""
        self._main = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop all batches in their current state, and release the folder."""
        tasks = [task for _, task in self._running.values()]
        if self._main is not None:
            tasks.append(self._main)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.to_thread(self.threads.close)
        self.store.close()

    async def add(self, batch: Batch) -> None:
        """Store a new batch, and run it in turn."""
        await self.threads.write(lambda: self.store.add_batch(batch))
        self._changed.set()

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Begin to cancel a batch, and return it.

        Raises:
            NotFound: the owner has no batch of that id.
            InvalidArgument: it has ended.
        """
        batch = self.store.batch(owner, batch_id)
        if batch_id in self._running:
            running = self._running[batch_id][0]
            await running.cancel()
            batch = running.batch
        elif batch.status in ("validating", "in_progress"):
            times = {**batch.times, "cancelling_at": int(time.time())}
            batch = replace(batch, status="cancelling", times=times)
            self.store.note(batch)
            await self.threads.write(lambda: self.store.save(batch))
            self._changed.set()
        if not batch.is_live:
            raise InvalidArgument("batch_id", f"a batch that is {batch.status} cannot be cancelled")
        return batch

    async def _run(self) -> None:
        state = self._service.state
        while state.stage in (Stage.STARTING, Stage.SERVING):
            self._changed.clear()
            if state.stage is Stage.SERVING:
                for batch in self._due():
                    self._begin(batch)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_INTERVAL_S if state.stage is Stage.STARTING else None):
                    await self._changed.wait()

    def _due(self) -> list[Batch]:
        """Return the batches to start: the first of each owner without a running one, up to the limit."""
        owners = {running.batch.owner for running, _ in self._running.values()}
        found = []
        for batch in self.store.live():
            if len(owners) < _MAX_RUNNING and batch.owner not in owners:
                owners.add(batch.owner)
                found.append(batch)
        return found

    def _begin(self, batch: Batch) -> None:
        running = BatchJob(self._service, self.store, self.threads, self._places, self._limits, batch)
        task = asyncio.create_task(running.run())
        self._running[batch.id] = running, task

        def end(_: asyncio.Task[None]) -> None:
            del self._running[batch.id]
            self._changed.set()

        task.add_done_callback(end)
