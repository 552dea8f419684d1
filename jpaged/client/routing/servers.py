"""The servers of a client: calls and waiting, on threads for a `Client`, and in asyncio tasks for an `AsyncClient`.

    request ── no other is open ──> Generate, a separate call
            ── others are open ───> GenerateMultiplexed ── up to `max_requests` ──> a new call

A call costs 0.6 ms of processor time in gRPC, client and server together, and a message 0.05 ms. What is ready of all
requests of a shared call comes in one message.

`MultiplexedStream` has the interface of a call of Generate and fails with the same errors, so that retries and resumed
streams do not depend on the kind of the call. A server that does not know the method gets single calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc import aio
from grpc_health.v1 import health_pb2

from jpaged._proto.v1 import inference_pb2
from jpaged.client.channel import NOT_READY, NOT_READY_PAUSE_S, Tls, open_channel, proxy_name
from jpaged.client.convert import UnaryCall
from jpaged.client.errors import ServerStatus, is_of_server, translated
from jpaged.client.routing.endpoints import ASK_TIMEOUT_S, SERVING, Endpoint, Endpoints, Question, build_query, get_key
from jpaged.client.routing.retry import Metadata, RetryState, with_trace
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


_TRACE_KEYS = frozenset({"traceparent", "tracestate"})
_DETAILS_KEY = "grpc-status-details-bin"
_MAX_STARTS = 256
"""Maximum requests that a message may start."""
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_NO_METADATA = aio.Metadata()


class MultiplexedStream:
    """One request of a shared call: an async iterator over its messages, as a call of Generate is.

    Attributes:
        request, timeout, metadata: arguments of the call.
    """

    def __init__(self, owner: SharedCall, request: Any, timeout: float | None, metadata: Metadata, number: int) -> None:
        self.request, self.timeout, self.metadata = request, timeout, metadata
        self.number = number
        self._owner = owner
        self._messages: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._has_ended = False
        self._single: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._accepted = _NO_METADATA
        if timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, timeout), self._expire)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while not self._messages:
            if self._single is not None:
                return await anext(aiter(self._single))
            if self._error is not None:
                raise self._error
            if self._has_ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._messages.popleft()

    def cancel(self) -> None:
        """Cancel the request unless it has ended; a reader gets CancelledError."""
        if self._single is not None:
            self._single.cancel()
        elif not self._has_ended:
            self._owner.cancel(self)
            self.fail(asyncio.CancelledError())

    def add(self, content: inference_pb2.MultiplexedResponse) -> None:
        """Add what the server sent."""
        if self._has_ended:
            return
        kind = content.WhichOneof("content")
        if kind == "accepted":
            self._accepted = aio.Metadata(*content.accepted.metadata.items())
        elif kind == "response":
            self._messages.append(content.response)
            if content.response.is_last:
                self._end()
            self._wake()
        elif kind == "status":
            self.fail(_build_error(content.status, self._accepted))

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, after the messages so far."""
        if not self._has_ended:
            self._error = error
            self._end()
            self._wake()

    def fail_with_call(self, error: BaseException) -> None:
        """End the stream with the error of the call, as a separate call would raise it."""
        if isinstance(error, aio.AioRpcError):
            self.fail(aio.AioRpcError(error.code(), self._accepted, error.trailing_metadata(), error.details()))
        else:
            self.fail(asyncio.CancelledError())

    def continue_on(self, single: Any) -> None:
        """Read the messages of a call of Generate from now on."""
        if not self._has_ended:
            self._single = single
            self._end()
            self._wake()

    def _end(self) -> None:
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._owner.remove(self)

    def _expire(self) -> None:
        self._owner.cancel(self)
        self.fail(aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, self._accepted, _NO_METADATA, "Deadline Exceeded"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _build_error(content: bytes, accepted: aio.Metadata) -> aio.AioRpcError:
    """Return the error of a failed request, as its own call would raise it."""
    try:
        status = status_pb2.Status.FromString(content)
    except DecodeError:
        return aio.AioRpcError(grpc.StatusCode.INTERNAL, accepted, _NO_METADATA, "the server sent an invalid status")
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return aio.AioRpcError(code, accepted, aio.Metadata((_DETAILS_KEY, content)), status.message)


class SharedCall:
    """One call of GenerateMultiplexed. The client closes its side when no request is open.

    Args:
        method: the method of the channel.
        metadata: metadata of the call, without the traces of the requests.
        on_unsupported: called if the server does not know the method, with the streams that need separate calls.
    """

    def __init__(
        self,
        method: Any,
        metadata: Metadata,
        max_requests: int,
        on_unsupported: Callable[[list[MultiplexedStream]], None],
    ) -> None:
        self.metadata = metadata
        self._max_requests = max_requests
        self._on_unsupported = on_unsupported
        self._streams: dict[int, MultiplexedStream] = {}
        self._num_started = 0
        self._starts: list[inference_pb2.MultiplexedStart] = []
        self._cancels: list[int] = []
        self._has_changed = asyncio.Event()
        self._has_closed = False
        self._call = method(metadata=metadata)
        self._status = ServerStatus(self._call)
        self._tasks = asyncio.create_task(self._write()), asyncio.create_task(self._read())

    @property
    def accepts_requests(self) -> bool:
        """True if another request may start on this call."""
        return not self._has_closed and self._num_started < self._max_requests

    def start(self, request: Any, timeout: float | None, metadata: Metadata) -> MultiplexedStream:
        """Start a request; `metadata` has the trace of the request as well."""
        number = self._num_started
        self._num_started += 1
        stream = self._streams[number] = MultiplexedStream(self, request, timeout, metadata, number)
        trace = {key: value for key, value in metadata if key in _TRACE_KEYS and isinstance(value, str)}
        self._starts.append(
            inference_pb2.MultiplexedStart(number=number, request=request, timeout_s=timeout, trace=trace)
        )
        self._has_changed.set()
        return stream

    def cancel(self, stream: MultiplexedStream) -> None:
        """Cancel a request on the server."""
        if stream.number in self._streams:
            self._cancels.append(stream.number)
            self._has_changed.set()

    def remove(self, stream: MultiplexedStream) -> None:
        """Forget a request that has ended."""
        if self._streams.pop(stream.number, None) is not None and not self._streams:
            self._has_changed.set()

    async def _write(self) -> None:
        """Send starts and cancellations, and close the call's side at the end."""
        try:
            while self._streams or self._starts:
                await self._has_changed.wait()
                self._has_changed.clear()
                while self._starts or self._cancels:
                    starts, self._starts = self._starts[:_MAX_STARTS], self._starts[_MAX_STARTS:]
                    cancels, self._cancels = self._cancels, []
                    await self._call.write(inference_pb2.GenerateMultiplexedRequest(starts=starts, cancels=cancels))
            self._has_closed = True
            await self._call.done_writing()
        except (aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            self._has_closed = True  # the call has ended; its reader has the reason

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not aio.EOF:
                for one in message.responses:
                    if (stream := self._streams.get(one.number)) is not None:
                        stream.add(one)
            self._has_closed = True
            if self._streams:
                self._fail_with(await self._end_error())
        except aio.AioRpcError as error:
            self._fail_with(await self._status.restored(error))
        except asyncio.CancelledError as error:  # the channel was closed
            self._fail_with(error)
        finally:
            self._has_closed = True
            self._tasks[0].cancel()

    async def _end_error(self) -> aio.AioRpcError:
        call = self._call
        code, initial, trailing = await call.code(), await call.initial_metadata(), await call.trailing_metadata()
        error = await self._status.restored(aio.AioRpcError(code, initial, trailing, await call.details()))
        if error.code() is not grpc.StatusCode.OK:
            return error
        return aio.AioRpcError(
            grpc.StatusCode.INTERNAL, initial, trailing, "the server ended the call before its requests"
        )

    def _fail_with(self, error: BaseException) -> None:
        self._has_closed = True
        streams = list(self._streams.values())
        is_unknown = isinstance(error, aio.AioRpcError) and error.code() is grpc.StatusCode.UNIMPLEMENTED
        if is_unknown and isinstance(error, aio.AioRpcError) and not is_of_server(error):
            self._on_unsupported(streams)
            return
        for stream in streams:
            stream.fail_with_call(error)


class MultiplexedGenerate:
    """The method Generate of one server, for asyncio: shares calls among concurrent requests.

    Args:
        endpoint: the server; `num_open` counts the open requests of this client, with the one that is being started.
        max_requests: requests that one call starts; 1 makes a call for each request.
    """

    def __init__(self, endpoint: Endpoint, max_requests: int) -> None:
        self._endpoint = endpoint
        self._max_requests = max_requests
        self._single = endpoint.methods["Generate"]
        self._shared = endpoint.methods["GenerateMultiplexed"]
        self._call: SharedCall | None = None
        self._is_supported = max_requests > 1

    def __call__(self, request: Any, *, timeout: float | None = None, metadata: Metadata = ()) -> Any:
        """Start a request; return its call."""
        if not self._is_supported or self._endpoint.num_open <= 1:
            return self._single(request, timeout=timeout, metadata=metadata)
        of_call = tuple((key, value) for key, value in metadata if key not in _TRACE_KEYS)
        call = self._call
        if call is None or not call.accepts_requests or call.metadata != of_call:
            call = self._call = SharedCall(self._shared, of_call, self._max_requests, self._use_single_calls)
        return call.start(request, timeout, metadata)

    def _use_single_calls(self, streams: list[MultiplexedStream]) -> None:
        """Start the requests again on separate calls: the server does not know the method and has run none."""
        self._is_supported = False
        for stream in streams:
            stream.continue_on(self._single(stream.request, timeout=stream.timeout, metadata=stream.metadata))


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
