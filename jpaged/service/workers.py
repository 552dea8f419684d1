"""Thread pools for work that grows with a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")

SMALL = 2000
"""Characters or token ids that are processed inline: about 1 ms."""
_NUM_THREADS = 4


class Workers:
    """Thread pools for work that grows with a request, so that the event loop and its streams never wait for it.

    Texts and token ids have one pool; conversations have another, because a chat template may be slow.
    """

    def __init__(self) -> None:
        self._plain = ThreadPoolExecutor(_NUM_THREADS, "jpaged-text")
        self._chat = ThreadPoolExecutor(_NUM_THREADS, "jpaged-chat")
        self._files = ThreadPoolExecutor(1, "jpaged-files")

    async def run(self, work: Callable[[], _T], size: int | None) -> _T:
        """Run work on `size` characters or ids: inline if few, otherwise on a thread.

        None stands for a conversation, whose cost its size does not show. If the caller is cancelled while the work
        waits for a thread, the work is cancelled too.
        """
        if size is not None and size < SMALL:
            return work()
        pool = self._chat if size is None else self._plain
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def start(self, work: Callable[[], _T]) -> Future[_T]:
        """Start work on a thread and return its future."""
        return self._plain.submit(work)

    async def read(self, work: Callable[[], _T]) -> _T:
        """Run work that reads files, one at a time; it completes even if the caller is cancelled."""
        return await detached(asyncio.get_running_loop().run_in_executor(self._files, work))


async def detached(done: asyncio.Future[_T]) -> _T:
    """Wait for a future that continues if the caller is cancelled; asyncio then does not report its error."""
    done.add_done_callback(lambda future: future.cancelled() or future.exception())
    return await asyncio.shield(done)
