"""All unfinished batches: resumed when the server accepts requests, and left in their state when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path

from jpaged.config import HttpOptions
from jpaged.errors import InvalidArgument
from jpaged.http.batching.pacing import Places
from jpaged.http.batching.running import Limits, Running
from jpaged.http.batching.store import Store
from jpaged.http.batching.threads import Threads
from jpaged.http.batching.values import Batch
from jpaged.service.loaded_model import Stage
from jpaged.service.service import Service

_MAX_RUNNING = 4
"""Maximum running batches, at most one per owner; further ones of an owner wait."""
_WATCH_INTERVAL_S = 0.2


class Runner:
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
        self._limits = Limits(max_line_bytes, options.max_batch_lines)
        self._places = Places(service)
        self._running: dict[str, tuple[Running, asyncio.Task[None]]] = {}
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
        running = Running(self._service, self.store, self.threads, self._places, self._limits, batch)
        task = asyncio.create_task(running.run())
        self._running[batch.id] = running, task

        def end(_: asyncio.Task[None]) -> None:
            del self._running[batch.id]
            self._changed.set()

        task.add_done_callback(end)
