"""A prompt's blocks, which leave for another server behind its last event.

chain, on a thread ──┐
last event ──────────┴──> asked of the engine, before it decides another step ──> held, staged
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from jpaged.engine.kv.tiers.chain import Chain
from jpaged.engine.kv.tiers.leaving import Leaving
from jpaged.engine.kv.tiers.travels import Travels
from jpaged.engine.sequence import Sink
from jpaged.errors import JpagedError
from jpaged.types import OutputEvent


class Departure:
    """The blocks of one prompt. A request of one token has all of them cached when its last event is told.

    Args:
        chain: the prompt's, when it is known.
        num_known: leading blocks that stay.
        put: who is told of the request.
    """

    def __init__(self, travels: Travels, chain: Future[Chain], num_known: int, put: Sink) -> None:
        self._travels = travels
        self._chain = chain
        self._num_known = num_known
        self._put = put
        self._asked: Future[Future[Leaving] | None] = Future()
        self._asked.set_running_or_notify_cancel()

    def pass_on(self, event: OutputEvent) -> None:
        """Take an event of the request, on the engine's thread."""
        if event.is_last:
            if event.error is None:
                self._chain.add_done_callback(self._leave)
            else:
                self._asked.set_result(None)
        self._put(event)

    async def leaving(self) -> Leaving | None:
        """Wait for what is held; None where the prompt was not computed."""
        asked = await asyncio.wrap_future(self._asked)
        if asked is None:
            return None
        leaving: Leaving = await asyncio.wrap_future(asked)
        return leaving

    def close(self) -> None:
        """Let go of what is held, or will be; on a thread: it waits for who reads."""
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
