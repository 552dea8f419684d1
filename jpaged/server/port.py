"""The gRPC server of a port: `grpc.aio`'s, hardened so that no input from peers ends in a traceback in the log.

    input                         plain gRPC                                      this server
    bytes that are no message     answers UNKNOWN and logs a traceback            INVALID_ARGUMENT, with the error
    a call without a message      stays open until its connection ends            INVALID_ARGUMENT
    an unknown method             fails unless its name is UTF-8                  a key, then UNIMPLEMENTED
    a disconnected peer           a traceback for each open call                  a debug log line
    idle connections              are kept without limit                          closed after a time, and few
    concurrent large messages     are kept in memory without limit                RESOURCE_EXHAUSTED, as a full queue

This holds for every service on the port, including third-party ones (health, reflection).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import logging
import resource
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from jpaged.config import ServerOptions
from jpaged.errors import InvalidArgument, QueueFull
from jpaged.server.door import Door
from jpaged.server.status import refuse

LARGE_BYTES = 128 << 10
"""Size from which a message triggers a memory trim."""
_DELAY_S = 1.0
"""Delay of the trim, so that concurrent requests share one, and most have ended by then."""


class FreedMemory:
    """Returns free memory to the system, on a separate thread, a while after a large message.

    A message of 1 MiB can take 100 MiB when decoded, in pieces of 32 KiB between live objects. The C library would keep
    the pieces after they are freed.
    """

    def __init__(self) -> None:
        self._is_due = False

    def note(self, num_bytes: int) -> None:
        """Schedule a trim if a message of this size is large."""
        if num_bytes >= LARGE_BYTES and not self._is_due:
            self._is_due = True
            timer = threading.Timer(_DELAY_S, self._trim)
            timer.daemon = True  # does not block the server's exit
            timer.start()

    def _trim(self) -> None:
        self._is_due = False
        _trim()


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; runs without the GIL
    if trim is not None:
        trim(0)


_LOG = logging.getLogger(__name__)
_CORE_NAME = "grpc._cython.cygrpc"
_core: Any = importlib.import_module(_CORE_NAME)  # it has no stubs
_AioServer: Any = _core.AioServer

HANDSHAKE_TIMEOUT_S = 10.0
"""Timeout for a new connection to complete the HTTP/2 handshake."""
_MAX_CALLS_OF_CONNECTION = 8192
"""More than run and queue by default, so that calls get an error for a full queue; further ones wait in the client."""
_MAX_LARGEST_IN_HAND = 256
"""Limit of message bytes in process, in messages of maximum size."""
_SMALL_BYTES = 4096
"""Messages below this size are not counted, so that health probes always pass."""
_RETRY_S = 1.0


def make_server(options: ServerOptions, max_message_bytes: int, door: Door) -> aio.Server:
    """Create a server without services and port, with the limits of these options; `door` authorizes calls."""
    logging.getLogger(_CORE_NAME).addFilter(_is_ours)
    core, _core.AioServer = _core.AioServer, _Core
    try:
        decoding = _Decoding(max_message_bytes, door)
        server = aio.server(options=_arguments(options, max_message_bytes), interceptors=(decoding,))
        server._server.unknown = door.unknown()  # type: ignore[attr-defined]  # a `_Core`
        return server
    finally:
        _core.AioServer = core


def _arguments(options: ServerOptions, max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    """Return the channel arguments of gRPC core."""
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a coin toss for each connection
        # A stream is silent during prefill: clients may ping every 10 s. By default, gRPC answers pings more often than
        # every
        # 5 minutes with GOAWAY.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 9_000),
        # The server pings clients too: streams of an unreachable machine would otherwise never end.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.max_allowed_incoming_connections", _max_connections(options.max_connections)),
        ("grpc.max_concurrent_streams", _MAX_CALLS_OF_CONNECTION),
        ("grpc.max_connection_idle_ms", int(options.connection_idle_timeout * 1000)),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_S * 1000)),
    )


def _max_connections(asked: int) -> int:
    """Return the limit of connections: `asked`, but at most half of the files that this process may open."""
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_files == resource.RLIM_INFINITY or asked <= num_files // 2:
        return asked
    most = max(1, num_files // 2)
    _LOG.warning("max_connections is %d, not %d: the process may open %d files (ulimit -n)", most, asked, num_files)
    return most


class _Decoding(aio.ServerInterceptor):
    """Interceptor that authorizes calls and decodes their requests: gRPC passes bytes."""

    def __init__(self, max_message_bytes: int, door: Door) -> None:
        self._door = door
        self._freed = FreedMemory()
        self._in_hand = MessagesInHand(max_message_bytes)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return the method's handler, with messages in place of bytes."""
        reading = _reading(await continuation(handler_call_details), self._freed, self._in_hand)
        return self._door.guarded(handler_call_details.method, reading)


class MessagesInHand:
    """Counts the bytes of messages in process: a call keeps its message while it waits for a thread."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_bytes = _MAX_LARGEST_IN_HAND * max_message_bytes
        self._num_bytes = 0

    @contextlib.contextmanager
    def counted(self, num_bytes: int) -> Iterator[QueueFull | None]:
        """Count a message while its call is answered; yield the error to answer with if the limit is exceeded."""
        counted = num_bytes if num_bytes >= _SMALL_BYTES else 0
        if counted and self._num_bytes + counted > self._max_bytes:
            used = f"{num_bytes} bytes and {self._num_bytes} bytes of requests in progress"
            yield QueueFull(f"{used} are over the limit of {self._max_bytes}", retry_after_s=_RETRY_S)
            return
        self._num_bytes += counted
        try:
            yield None
        finally:
            self._num_bytes -= counted


def _reading(handler: Any, freed: FreedMemory, in_hand: MessagesInHand) -> grpc.RpcMethodHandler:
    """Wrap `handler` so that it reads and decodes its requests from the call itself."""

    async def decoded(context: Any, content: bytes) -> Any:
        freed.note(len(content))
        try:
            return handler.request_deserializer(content)
        except DecodeError as error:
            await refuse(context, InvalidArgument("request", f"{len(content)} bytes are not a valid message: {error}"))

    async def answer(_: object, context: Any) -> Any:
        content = request = None
        try:
            if (content := await context.read()) is aio.EOF:
                await refuse(context, InvalidArgument("request", "is missing: the call ended without a message"))
            with in_hand.counted(len(content)) as too_much:
                if too_much is not None:
                    await refuse(context, too_much)
                request, content = await decoded(context, content), None
                return await (handler.unary_stream or handler.unary_unary)(request, context)
        except aio.InternalError as error:
            raise _gone(error) from None
        except aio.AbortError as error:
            error.__context__ = None
            raise error.with_traceback(None) from None  # gRPC keeps the error, and with it this frame
        finally:
            del content, request

    async def requests(context: Any) -> AsyncIterator[Any]:
        while (content := await context.read()) is not aio.EOF:
            yield await decoded(context, content)

    async def answer_all(_: object, context: Any) -> Any:
        try:
            return await handler.stream_unary(requests(context), context)
        except aio.InternalError as error:
            raise _gone(error) from None
        except aio.AbortError as error:
            error.__context__ = None
            raise error.with_traceback(None) from None

    async def answer_each(_: object, context: Any) -> None:
        try:
            # Write here instead of yielding to gRPC, so that a call that ends while a write blocks also ends the
            # handler.
            async with contextlib.aclosing(handler.stream_stream(requests(context), context)) as responses:
                async for response in responses:
                    await context.write(response)
        except aio.InternalError as error:
            raise _gone(error) from None
        except aio.AbortError as error:
            error.__context__ = None
            raise error.with_traceback(None) from None

    if handler.stream_unary:
        return grpc.stream_unary_rpc_method_handler(answer_all, response_serializer=handler.response_serializer)
    if handler.stream_stream:
        return grpc.stream_stream_rpc_method_handler(answer_each, response_serializer=handler.response_serializer)
    make = grpc.stream_stream_rpc_method_handler if handler.unary_stream else grpc.stream_unary_rpc_method_handler
    return make(answer, response_serializer=handler.response_serializer)


def _gone(error: Exception) -> asyncio.CancelledError:
    """Return the error to raise when the peer has disconnected: the same as for a cancelled call."""
    _LOG.debug("the peer has disconnected: %s", error)
    return asyncio.CancelledError()


def _is_ours(record: logging.LogRecord) -> bool:
    """Filter gRPC's log: keep its faults, and log errors caused by peers at debug level."""
    error = record.exc_info[1] if record.exc_info else None
    is_of_peer = isinstance(error, aio.InternalError | UnicodeDecodeError)
    if is_of_peer:
        _LOG.debug("%s: %s", record.getMessage(), error)
    return not is_of_peer


class _Core(_AioServer):
    """gRPC's server, except for unknown methods.

    gRPC core dispatches registered methods. For others, grpc.aio decodes the name as UTF-8 in its accept loop, and a
    failure ends the loop: a single call would end the server. This class never reads the name.

    Attributes:
        unknown: the handler of those methods.
    """

    unknown: Any = None

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        if method is not None:
            future: asyncio.Future[Any] = super()._make_request_call_future(method)
            return future
        return asyncio.ensure_future(self._refuse_others())

    async def _refuse_others(self) -> None:
        """Answer unknown methods with `unknown` until the server stops."""
        methods = SimpleNamespace(resolve_handler=lambda details: self.unknown)
        loop, name, refusals = asyncio.get_running_loop(), "unknown", set[asyncio.Task[None]]()
        while True:
            call = await self._request_call()
            refusal = _core._handle_rpc(name, methods, (), call, loop, False)
            task = loop.create_task(_core._schedule_rpc_coro(refusal, call, loop, name))
            refusals.add(task)  # the loop keeps no reference to its tasks
            task.add_done_callback(refusals.discard)
