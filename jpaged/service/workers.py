"""Threads for what grows with a request, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")

SMALL = 2000
"""Characters, or token ids, that are worked on at once: that takes about a millisecond."""
_NUM_THREADS = 4


class Workers:
    """Threads for what grows with a request, so that the event loop, and with it every stream, never waits for it.

    Texts and token ids have threads of their own, and conversations others: a chat template may take its time.
    """

    def __init__(self) -> None:
        self._plain = ThreadPoolExecutor(_NUM_THREADS, "jpaged-text")
        self._chat = ThreadPoolExecutor(_NUM_THREADS, "jpaged-chat")
        self._files = ThreadPoolExecutor(1, "jpaged-files")

    async def run(self, work: Callable[[], _T], size: int | None) -> _T:
        """Runs work on so many characters or ids: here when they are few, on a thread otherwise.

        None is a conversation, whose size says little. A call that goes away while its work waits for a thread takes
        the work with it.
        """
        if size is not None and size < SMALL:
            return work()
        pool = self._chat if size is None else self._plain
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def start(self, work: Callable[[], _T]) -> Future[_T]:
        """Begins work on a thread, for whoever asks for it later."""
        return self._plain.submit(work)

    async def read(self, work: Callable[[], _T]) -> _T:
        """Runs work that reads files, behind what others read; it is done although the caller goes away."""
        return await detached(asyncio.get_running_loop().run_in_executor(self._files, work))


async def detached(done: asyncio.Future[_T]) -> _T:
    """Wait for what goes on when its caller goes away; nobody hears of its error then, and asyncio reports none."""
    done.add_done_callback(lambda future: future.cancelled() or future.exception())
    return await asyncio.shield(done)
