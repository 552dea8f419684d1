"""Concurrent requests on one call: each is answered as soon as possible, by responses that carry its id.

    requests ──read──> a task each ──responses──> one queue ──> the call

The number of open requests is limited; more are not read. A slow reader blocks the tasks, and the events of their
requests are merged in the meantime.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from jpaged._proto.open_inference import inference_pb2

MAX_OPEN = 1024
"""Maximum open requests of one call; more wait in the client."""
_MAX_QUEUED = 16

Answer = Callable[[inference_pb2.ModelInferRequest], AsyncGenerator[inference_pb2.ModelStreamInferResponse, None]]


class InferStream:
    """One call of ModelStreamInfer. Bound to one event loop.

    Args:
        requests: incoming requests; open ones continue after the last.
        answer: yields the responses to one request; an error of it ends the call.
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
        """Yield responses until all requests are answered; closing it aborts open requests.

        Raises:
            Exception: the error of a request, of reading them, or the one passed to `end`.
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
        """Stop reading requests; the call ends with the error after the responses of open requests."""
        self._ending = error
        self._reading.cancel()

    async def _read(self) -> None:
        async for request in self._requests:
            await self._free.acquire()
            self._start(request)

    async def _finish(self) -> None:
        """Queue the end of the call, once no request is read any more and the open ones are answered."""
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
