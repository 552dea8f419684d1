"""One snapshot of the pools for all viewers: encoded once, and read by each at the viewer's pace.

    engine ──pictures──> FrameWriter ──frame 17──> [ newest ] <── watcher that has 16: the change
            (its thread)  (a thread)                         <── watcher that has 12: the whole

A viewer requests the next frame when it has sent the last; a slow one skips frames, and nothing is buffered for it.
Without viewers nothing runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jpaged.errors import QueueFull
from jpaged.pool import Frame, FrameWriter, PoolPicture
from jpaged.service.loaded_model import Stage
from jpaged.service.service import Service

MAX_WATCHERS = 64
_INTERVAL_S = 0.1
_QUIET_S = 1.0
"""Interval of snapshots of idle pools, and time that a viewer waits for a frame before a keep-alive."""
_RETRY_S = 5.0


class Hub:
    """Takes snapshots while there are viewers. Bound to the event loop of the first viewer."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._writer = FrameWriter()
        self._writing = asyncio.Lock()
        self._newest: Frame | None = None
        self._whole: Frame | None = None
        self._changed = asyncio.Event()
        self._num_watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self._loads: Sequence[Any] = ()
        self._looked_s = 0.0
        self.is_over = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watcher]:
        """Watch while the context is open.

        Raises:
            Unavailable: no model is loaded, or the engine has failed.
            QueueFull: there are too many viewers.
        """
        self._service.state.loaded()
        if self._num_watchers >= MAX_WATCHERS:
            raise QueueFull(
                f"{self._num_watchers} clients watch the pool, the limit is {MAX_WATCHERS}", retry_after_s=_RETRY_S
            )
        self._num_watchers += 1
        if self._looking is None:
            self._newest, self._loads = None, ()  # frames from before the first viewer are outdated
            self._looking = asyncio.create_task(self._look())
        try:
            yield Watcher(self)
        finally:
            self._num_watchers -= 1
            if self._num_watchers == 0:
                self._looking.cancel()
                self._looking = None

    @property
    def number(self) -> int | None:
        """Number of the newest frame; None before the first."""
        return None if self._newest is None else self._newest.number

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next frame, the end or the timeout."""
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    async def frame_for(self, seen: int | None) -> Frame:
        """Return the frame that updates a viewer from frame `seen`; there must be a newer one."""
        newest = self._newest
        if newest is not None and newest.base is not None and newest.base == seen:
            return newest
        async with self._writing:
            if self._whole is None or self._whole.number != self._writer.number:
                self._whole = await asyncio.to_thread(self._writer.whole)
            return self._whole

    async def _look(self) -> None:
        try:
            while not self._ends():
                await self._look_once()
                await asyncio.sleep(_INTERVAL_S)
        finally:
            self.is_over = self._ends()
            self._tell()

    async def _look_once(self) -> None:
        engine, now_s = self._service.state.loaded().engine, asyncio.get_running_loop().time()
        loads = engine.replica_loads()
        if loads == self._loads and now_s - self._looked_s < _QUIET_S:
            return
        pictures = await self._pictures()
        if pictures is None:
            return
        self._loads, self._looked_s = loads, now_s
        async with self._writing:
            self._newest = await asyncio.to_thread(self._writer.change, pictures)
        self._tell()

    async def _pictures(self) -> list[PoolPicture] | None:
        """Return the next snapshots; None if the server ends."""
        asked = [asyncio.wrap_future(one) for one in self._service.state.loaded().engine.eyes.pictures()]
        waiting: set[asyncio.Future[PoolPicture]] = set(asked)
        while waiting:
            _, waiting = await asyncio.wait(waiting, timeout=_QUIET_S)
            if waiting and self._ends():
                return None
        return [one.result() for one in asked]

    def _ends(self) -> bool:
        state = self._service.state
        is_drained = state.stage is Stage.DRAINING and self._service.is_idle.is_set()
        return is_drained or state.stage is Stage.FAILED or state.failure is not None

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Watcher:
    """One viewer."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._seen: int | None = None

    async def next(self) -> Frame | None:
        """Return the next frame; None if none came for a while."""
        if self._hub.number == self._seen:
            await self._hub.changed(_QUIET_S)
        if self._hub.number == self._seen:
            return None
        frame = await self._hub.frame_for(self._seen)
        self._seen = frame.number
        return frame

    @property
    def is_over(self) -> bool:
        """True if the server ends, so that no frame follows."""
        return self._hub.is_over
