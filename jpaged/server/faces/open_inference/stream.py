"""Many requests on one call: each is answered by itself, as soon as it can be, by responses that carry its id.

    requests ──read──> a task each ──responses──> one queue ──> the call

As many are read as may be open at one time. A reader that is slow holds up the tasks, and what comes meanwhile of their
requests is merged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from jpaged._proto.open_inference import inference_pb2

MAX_OPEN = 1024
"""Requests of one call that are being answered; more wait in the client."""
_MAX_QUEUED = 16

Answer = Callable[[inference_pb2.ModelInferRequest], AsyncGenerator[inference_pb2.ModelStreamInferResponse, None]]


class InferStream:
    """One call of ModelStreamInfer. Lives on one event loop.

    Args:
        requests: as they come; its end lets those that are open go on.
        answer: the responses to one request; an error of it ends the call.
    """

    def __init__(self, requests: AsyncIterator[inference_pb2.ModelInferRequest], answer: Answer) -> None:
        self._requests = requests
        self._answer = answer
        self._queue: asyncio.Queue[inference_pb2.ModelStreamInferResponse | Exception | None] = asyncio.Queue(
            _MAX_QUEUED
        )
        self._free = asyncio.Semaphore(MAX_OPEN)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reading = asyncio.create_task(self._read())
        self._finishing = asyncio.create_task(self._finish())
        self._ending: Exception | None = None

    async def responses(self) -> AsyncGenerator[inference_pb2.ModelStreamInferResponse, None]:
        """Yield responses until all requests are answered; closing it ends those that are not.

        Raises:
            Exception: what a request, or reading them, has failed with, or what `end` was given.
        """
        try:
            while (one := await self._queue.get()) is not None:
                if isinstance(one, Exception):
                    raise one
                yield one
        finally:
            tasks = [self._reading, self._finishing, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self, error: Exception) -> None:
        """Read no further requests; where there may be more, the call ends with an error behind the responses."""
        self._ending = error
        self._reading.cancel()

    async def _read(self) -> None:
        async for request in self._requests:
            await self._free.acquire()
            self._start(request)

    async def _finish(self) -> None:
        """Says how the call ends, once no request is read any more and those that were are answered."""
        await asyncio.wait((self._reading,))
        is_cut = self._reading.cancelled()
        failure = None if is_cut else self._reading.exception()
        while self._tasks and failure is None:
            await asyncio.wait(self._tasks)
        if failure is None or isinstance(failure, Exception):
            await self._queue.put(self._ending if is_cut else failure)

    def _start(self, request: inference_pb2.ModelInferRequest) -> None:
        task = asyncio.create_task(self._run(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, request: inference_pb2.ModelInferRequest) -> None:
        try:
            async with aclosing(self._answer(request)) as responses:
                async for response in responses:
                    await self._queue.put(response)
        except Exception as error:
            await self._queue.put(error)
        finally:
            self._free.release()
