"""Threads for disk I/O: one writes, in the order of the calls; two read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
