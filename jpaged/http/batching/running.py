"""One batch from its first line to its last, or until it expires, is cancelled, or the server ends.

    validating ──> in_progress ──> finalizing ──> completed
        └─> failed      ├─────────────────────> expired
                        └─> cancelling ───────> cancelled

When the server ends, a batch keeps its status; the next server resumes it, and runs the lines without output.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jpaged.access.call_context import background, enter
from jpaged.errors import InternalError, JpagedError, StorageError, TryLater, Unavailable
from jpaged.http.batching.lines import Outputs, checked, lines_in
from jpaged.http.batching.pacing import PRIORITY, Places
from jpaged.http.batching.store import Store
from jpaged.http.batching.threads import Threads
from jpaged.http.batching.values import Batch, BatchError
from jpaged.http.local import LocalServer
from jpaged.openai.answers import Answers
from jpaged.openai.lines import BadLine, Line
from jpaged.service.loaded_model import Stage
from jpaged.service.service import Service

_LOG = logging.getLogger(__name__)

_LINES_AT_ONCE = 16
"""Number of lines to read ahead."""
_MAX_TAKES = 16
"""Maximum number of resumes without a completed line: one of its lines may be what crashes the server."""
_MAX_TRIES = 8
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a batch: bytes per line, and number of lines."""

    max_line_bytes: int
    max_lines: int


class Running:
    """A running batch.

    Attributes:
        batch: its current state.
    """

    def __init__(
        self, service: Service, store: Store, threads: Threads, places: Places, limits: Limits, batch: Batch
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
                self._count(outputs)
        finally:
            self._count(outputs)
            await self._threads.write(outputs.close)
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
            self._service.work,
            loaded.adapters.names,
            max_bytes=int(http.max_response_size * 2**20),
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
                await self._threads.write(partial(outputs.add_failure, line.custom_id, _told(error)))
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


def _told(error: Exception) -> JpagedError:
    if isinstance(error, JpagedError):
        return error
    _LOG.error("a line of a batch failed", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")
