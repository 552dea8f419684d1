"""Export of a prompt's blocks to another server after the request's last event.

chain, on a thread ──┐
last event ──────────┴──> requested from the engine before it schedules another step ──> held, staged
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from jpaged.engine.kv.tiers.leaving import Chain, Leaving, Travels
from jpaged.engine.sequence import Sink
from jpaged.errors import JpagedError
from jpaged.types import OutputEvent


class Departure:
    """Export of the blocks of one prompt. All of them are cached when a one-token request emits its last event.

    Args:
        chain: future of the prompt's block hashes.
        num_known: leading blocks that are not sent.
        put: callback for the request's events.
    """

    def __init__(self, travels: Travels, chain: Future[Chain], num_known: int, put: Sink) -> None:
        self._travels = travels
        self._chain = chain
        self._num_known = num_known
        self._put = put
        self._asked: Future[Future[Leaving] | None] = Future()
        self._asked.set_running_or_notify_cancel()

    def pass_on(self, event: OutputEvent) -> None:
        """Handle an event of the request, on the engine's thread."""
        if event.is_last:
            if event.error is None:
                self._chain.add_done_callback(self._leave)
            else:
                self._asked.set_result(None)
        self._put(event)

    async def leaving(self) -> Leaving | None:
        """Wait for the held blocks; return None if the prompt was not computed."""
        asked = await asyncio.wrap_future(self._asked)
        if asked is None:
            return None
        leaving: Leaving = await asyncio.wrap_future(asked)
        return leaving

    def close(self) -> None:
        """Release the held blocks, or cancel the pending hold. Call on a thread: it waits for readers."""
        self._asked.add_done_callback(_close_asked)

    def _leave(self, chain: Future[Chain]) -> None:
        try:
            self._asked.set_result(self._travels.leave(chain.result(), self._num_known, is_hurried=True))
        except JpagedError as error:
            self._asked.set_exception(error)


def _close_asked(asked: Future[Future[Leaving] | None]) -> None:
    leaving = None if asked.exception() is not None else asked.result()
    if leaving is not None:
        leaving.add_done_callback(lambda done: None if done.exception() is not None else done.result().close())
