"""The servers of a client: calls and waiting, on threads for a `Client`, and in asyncio tasks for an `AsyncClient`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

from jpaged.client.channel import NOT_READY, NOT_READY_PAUSE_S, Tls, open_channel, proxy_name
from jpaged.client.convert import UnaryCall
from jpaged.client.errors import translated
from jpaged.client.routing.endpoints import ASK_TIMEOUT_S, SERVING, Endpoint, Endpoints, Question, build_query, get_key
from jpaged.client.routing.multiplexed_call import MultiplexedGenerate
from jpaged.client.routing.retry import RetryState, with_trace
from jpaged.errors import Cancelled, DeadlineExceeded, NotFound, Unavailable

_T = TypeVar("_T")


class Servers:
    """Connections, and calls to them. Thread-safe.

    Args:
        targets: validated targets.
        metadata: metadata of every call.
        timeout_s: timeout of a call, including retries.
        require_open: raises Cancelled once the client is closed.
        tls: None connects without TLS.
        proxy: as in `open_channel`.
    """

    def __init__(
        self,
        targets: Sequence[str],
        metadata: tuple[tuple[str, str], ...],
        timeout_s: float | None,
        require_open: Callable[[], None],
        tls: Tls | None,
        proxy: str | None = None,
    ) -> None:
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._require_open = require_open
        channels = {name: open_channel(grpc, name, tls, proxy=proxy) for name in targets}
        made = [Endpoint(name, channel, proxy=proxy_name(name, proxy)) for name, channel in channels.items()]
        self.endpoints = Endpoints(made, self.ask)

    def run(self, call: UnaryCall[_T]) -> _T:
        """Make a call to one server, to each of them, or to the one that knows its subject."""
        if call.scope == "one" or len(self.endpoints) == 1:
            return self._run_on(self.endpoints, call)
        answers, strangers = list[_T](), list[NotFound]()
        absent: Unavailable | None = None
        for endpoint in self.endpoints.each():
            try:
                answers.append(self._run_on(endpoint, call))
            except NotFound as error:
                strangers.append(error)
                if call.scope == "each":
                    raise
            except Unavailable as error:  # another server may know it
                absent = error
                if call.scope == "each":
                    raise
        if not answers:
            raise absent or strangers[0]
        return answers[0]

    def _run_on(self, endpoints: Endpoints, call: UnaryCall[_T]) -> _T:
        tries, metadata = RetryState(endpoints, get_key(call.request), self._timeout_s), with_trace(self._metadata)
        while True:
            self._require_open()
            method = tries.enter().methods[call.method]
            try:
                answer = method(call.request, timeout=tries.remaining_s, metadata=metadata)
            except grpc.RpcError as error:
                wait_s = tries.wait_s(error)
            except ValueError:  # gRPC's error for a channel that another thread has just closed
                self._require_open()
                raise
            else:
                tries.answered()
                return call.read(answer)
            finally:
                tries.leave()
            time.sleep(wait_s)

    def ask(self, endpoint: Endpoint, question: Question) -> None:
        """Send a query without waiting; `Endpoints` handles the answer."""
        method, request = build_query(endpoint, question)
        try:
            future = method.future(request, timeout=ASK_TIMEOUT_S, metadata=self._metadata)
        except ValueError:  # as above
            self._require_open()
            raise

        def tell(done: Any) -> None:
            failure: Exception | None = Unavailable("the client was closed") if done.cancelled() else done.exception()
            if isinstance(failure, grpc.RpcError):
                failure = translated(failure, endpoint.proxy)
            self.endpoints.handle_answer(endpoint, question, done.result() if failure is None else None, failure)

        future.add_done_callback(tell)

    def wait_until_ready(self, timeout_s: float) -> None:
        """See `Client.wait_until_ready`."""
        until_s = time.monotonic() + timeout_s
        while (remaining_s := until_s - time.monotonic()) > 0:
            for endpoint in self.endpoints:
                self._require_open()
                if self._is_ready(endpoint, remaining_s / len(self.endpoints)):
                    return
            time.sleep(min(NOT_READY_PAUSE_S, max(0.0, until_s - time.monotonic())))
        through = ", ".join(sorted({one.proxy for one in self.endpoints} - {""}))
        through = f" (through the proxy {through})" if through else ""
        raise DeadlineExceeded(f"{self.endpoints.names}{through} was not ready after {timeout_s} s")

    def _is_ready(self, endpoint: Endpoint, timeout_s: float) -> bool:
        """Wait for a server to serve, until it answers that it does not; with several servers, check once."""
        ask = health_pb2.HealthCheckRequest()
        try:
            if len(self.endpoints) > 1:
                return bool(endpoint.health.Check(ask, timeout=min(ASK_TIMEOUT_S, timeout_s)).status == SERVING)
            watch = endpoint.health.Watch(ask, timeout=timeout_s, wait_for_ready=True)
            for answer in watch:
                if answer.status == SERVING:
                    watch.cancel()
                    return True
        except grpc.RpcError as error:
            if error.code() not in NOT_READY:
                raise translated(error, endpoint.proxy) from error
        return False

    def close(self) -> None:
        """Cancel open calls and close the connections."""
        for endpoint in self.endpoints:
            endpoint.channel.close()


class AsyncServers:
    """Connections, and calls to them; see `Servers`.

    Args:
        max_requests_per_call: concurrent requests that share a call; see `MultiplexedGenerate`.
    """

    def __init__(
        self,
        targets: Sequence[str],
        metadata: tuple[tuple[str, str], ...],
        timeout_s: float | None,
        require_open: Callable[[], None],
        tls: Tls | None,
        proxy: str | None = None,
        max_requests_per_call: int = 1,
    ) -> None:
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._require_open = require_open
        self._asking = set[asyncio.Task[None]]()
        channels = {name: open_channel(aio, name, tls, proxy=proxy) for name in targets}
        made = [Endpoint(name, channel, proxy=proxy_name(name, proxy)) for name, channel in channels.items()]
        for endpoint in made:
            generate = MultiplexedGenerate(endpoint, max_requests_per_call)
            endpoint.methods = {**endpoint.methods, "Generate": generate}
        self.endpoints = Endpoints(made, self.ask)

    async def run(self, call: UnaryCall[_T]) -> _T:
        """Make a call to one server, to each of them, or to the one that knows its subject."""
        if call.scope == "one" or len(self.endpoints) == 1:
            return await self._run_on(self.endpoints, call)
        answers, strangers = list[_T](), list[NotFound]()
        absent: Unavailable | None = None
        for endpoint in self.endpoints.each():
            try:
                answers.append(await self._run_on(endpoint, call))
            except NotFound as error:
                strangers.append(error)
                if call.scope == "each":
                    raise
            except Unavailable as error:  # another server may know it
                absent = error
                if call.scope == "each":
                    raise
        if not answers:
            raise absent or strangers[0]
        return answers[0]

    async def _run_on(self, endpoints: Endpoints, call: UnaryCall[_T]) -> _T:
        tries, metadata = RetryState(endpoints, get_key(call.request), self._timeout_s), with_trace(self._metadata)
        answered = await run_tries(tries, call.method, call.request, metadata, self._require_open)
        return call.read(await answered)

    def ask(self, endpoint: Endpoint, question: Question) -> None:
        """Send a query without waiting; `Endpoints` handles the answer."""
        asking = asyncio.get_running_loop().create_task(self._hear(endpoint, question))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    async def _hear(self, endpoint: Endpoint, question: Question) -> None:
        method, request = build_query(endpoint, question)
        answer, failure = None, None
        try:
            answer = await method(request, timeout=ASK_TIMEOUT_S, metadata=self._metadata)
        except aio.AioRpcError as error:
            failure = translated(error, endpoint.proxy)
        self.endpoints.handle_answer(endpoint, question, answer, failure)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """See `Client.wait_until_ready`."""
        until_s = time.monotonic() + timeout_s
        while (remaining_s := until_s - time.monotonic()) > 0:
            for endpoint in self.endpoints:
                self._require_open()
                if await self._is_ready(endpoint, remaining_s / len(self.endpoints)):
                    return
            await asyncio.sleep(min(NOT_READY_PAUSE_S, max(0.0, until_s - time.monotonic())))
        through = ", ".join(sorted({one.proxy for one in self.endpoints} - {""}))
        through = f" (through the proxy {through})" if through else ""
        raise DeadlineExceeded(f"{self.endpoints.names}{through} was not ready after {timeout_s} s")

    async def _is_ready(self, endpoint: Endpoint, timeout_s: float) -> bool:
        """Wait for a server to serve, until it answers that it does not; with several servers, check once."""
        ask = health_pb2.HealthCheckRequest()
        try:
            if len(self.endpoints) > 1:
                answer = await endpoint.health.Check(ask, timeout=min(ASK_TIMEOUT_S, timeout_s))
                return bool(answer.status == SERVING)
            watch = endpoint.health.Watch(ask, timeout=timeout_s, wait_for_ready=True)
            async for answer in watch:
                if answer.status == SERVING:
                    watch.cancel()
                    return True
        except grpc.RpcError as error:
            if error.code() not in NOT_READY:
                raise translated(error, endpoint.proxy) from error
        except asyncio.CancelledError as error:
            refuse_closed(error)
            raise
        return False

    async def close(self) -> None:
        """Cancel open calls and close the connections."""
        for asking in self._asking:
            asking.cancel()
        for endpoint in self.endpoints:
            await endpoint.channel.close()


async def run_tries(
    tries: RetryState,
    method: str,
    request: Any,
    metadata: tuple[tuple[str, str | bytes], ...],
    require_open: Callable[[], None],
) -> Any:
    """Make a unary call with retries; return the call that succeeded, which has ended.

    Args:
        require_open: called before each attempt; its error ends them.

    Raises:
        JpagedError: the error of the last attempt.
    """
    while True:
        require_open()
        try:
            call = tries.enter().methods[method](request, timeout=tries.remaining_s, metadata=metadata)
            await call
        except aio.AioRpcError as error:
            wait_s = tries.wait_s(error)
        except asyncio.CancelledError as error:
            refuse_closed(error)
            raise
        else:
            tries.answered()
            return call
        finally:
            tries.leave()
        await asyncio.sleep(wait_s)


def refuse_closed(error: asyncio.CancelledError) -> None:
    """Raise Cancelled unless this task is cancelled: grpc.aio also raises CancelledError if the channel was closed."""
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        raise Cancelled("the client was closed") from error
