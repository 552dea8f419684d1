"""Threads for what grows with a request, so that the event loop, and with it every stream, never waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")

SMALL = 2000
"""Characters, or token ids, that are worked on at once: that takes about a millisecond."""
_NUM_THREADS = 4


class Workers:
    """Texts and token ids have threads of their own, and conversations others: a chat template may take its time."""

    def __init__(self) -> None:
        self._plain = ThreadPoolExecutor(_NUM_THREADS, "jpaged-text")
        self._chat = ThreadPoolExecutor(_NUM_THREADS, "jpaged-chat")

    async def run(self, work: Callable[[], _T], size: int | None) -> _T:
        """Runs work on so many characters or ids: here when they are few, on a thread otherwise.

        None is a conversation, whose size says little. A call that goes away while its work waits for a thread takes
        the work with it.
        """
        if size is not None and size < SMALL:
            return work()
        pool = self._chat if size is None else self._plain
        return await asyncio.get_running_loop().run_in_executor(pool, work)
