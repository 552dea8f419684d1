"""Threads that wait for the disk, so that the event loop does not: one writes, in the order of the calls; two read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


class Threads:
    """Runs work on files. What was begun is done, also where its caller goes away."""

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, "jpaged-batch-write")
        self._readers = ThreadPoolExecutor(2, "jpaged-batch-read")

    async def write(self, work: Callable[[], _T]) -> _T:
        """Run work behind all that was to be written before; it is done although the caller goes away."""
        done = asyncio.get_running_loop().run_in_executor(self._writer, work)
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        return await asyncio.shield(done)

    async def read(self, work: Callable[[], _T]) -> _T:
        """Run work that changes nothing that another works on."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def close(self) -> None:
        """Wait for what was begun."""
        self._writer.shutdown()
        self._readers.shutdown(cancel_futures=True)
