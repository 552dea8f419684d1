"""The gRPC server of a port: `grpc.aio`'s, hardened so that no input from peers ends in a traceback in the log.

    input                         plain gRPC                                      this server
    bytes that are no message     answers UNKNOWN and logs a traceback            INVALID_ARGUMENT, with the error
    a call without a message      stays open until its connection ends            INVALID_ARGUMENT
    an unknown method             fails unless its name is UTF-8                  a key, then UNIMPLEMENTED
    a disconnected peer           a traceback for each open call                  a debug log line
    idle connections              are kept without limit                          closed after a time, and few
    concurrent large messages     are kept in memory without limit                RESOURCE_EXHAUSTED, as a full queue

This holds for every service on the port, including third-party ones (health, reflection).

`AuthInterceptor` is the interceptor of a port: it authorizes calls by the table of permissions, including calls of
unknown methods. `status_on_error` turns errors into gRPC status codes with google.rpc details; the classes in errors.py
define the codes. `bind` opens the address: a host and a port of this machine, with TLS if there are certificates.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import logging
import math
import resource
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from jpaged._proto.v1 import inference_pb2
from jpaged.access.authenticator import CONTROL, GRPC, Authenticator, CallContext, enter
from jpaged.access.tls import CertificateFiles, Certificates
from jpaged.config import ServerOptions
from jpaged.errors import InternalError, InvalidArgument, JpagedError, QueueFull, TryLater, get_reason

_LOG = logging.getLogger(__name__)

ERROR_DOMAIN = "jpaged"
_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_OF_CHATS = frozenset(spec.name for spec in inference_pb2.ChatPrompt.DESCRIPTOR.fields)
_MAX_MESSAGE_BYTES = 1024
"""Messages are sent in trailers, which clients limit to 8 KiB by default; a byte may take three, and they are sent
twice.
"""


Trailers = tuple[tuple[str, str | bytes], ...]


class ServicerContext(Protocol):
    """The part of gRPC's call context that servicers use."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...

    def peer(self) -> str:
        """Return the address of the client."""

    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Send the initial metadata, before the first message."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller's deadline; None if there is none."""

    async def write(self, message: Message) -> None:
        """Send one message; wait for a slow reader."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Trailers = ()) -> NoReturn:
        """End the call with a status, by raising."""


def get_status(error: JpagedError) -> status_pb2.Status:
    """Return the status of an error: code, message and details.

    Every status carries ErrorInfo, whose reason is the error's class name in capitals (QUEUE_FULL); InvalidArgument
    adds BadRequest with the field, TryLater adds RetryInfo.
    """
    if isinstance(error, InvalidArgument) and (name := name_on_wire(error.field)) != error.field:
        error = type(error)(name, error.problem)
    code = grpc.StatusCode[error.grpc_status].value[0]
    status = status_pb2.Status(code=code, message=_shortened(str(error)))
    _attach(status, error_details_pb2.ErrorInfo(reason=get_reason(error), domain=ERROR_DOMAIN))
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=_shortened(error.problem)
        )
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, TryLater):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(math.ceil(error.retry_after_s * 1e9))
        _attach(status, retry)
    return status


def get_trailers(error: JpagedError) -> Trailers:
    """Return the trailing metadata of an error's status."""
    details = _DETAILS_KEY, get_status(error).SerializeToString()
    if isinstance(error, TryLater):
        return details, (_PUSHBACK_KEY, str(math.ceil(error.retry_after_s * 1000)))
    return (details,)


def error_for(error: Exception) -> JpagedError:
    """Return a JpagedError unchanged; log any other error and return an InternalError."""
    if isinstance(error, JpagedError):
        return error
    _LOG.error("a call failed", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")


def name_on_wire(field: str) -> str:
    """Return the path of a field in protos: chat options are in `chat`, and tools and calls have no `function`."""
    first, _, rest = field.partition(".")
    if first.partition("[")[0] in _OF_CHATS:
        first = f"chat.{first}"
    return f"{first}.{rest}".removesuffix(".").replace(".function.", ".")


async def abort(context: ServicerContext, error: JpagedError) -> NoReturn:
    """End the call with the status of `error`."""
    await context.abort(grpc.StatusCode[error.grpc_status], get_status(error).message, get_trailers(error))


@asynccontextmanager
async def status_on_error(context: ServicerContext) -> AsyncIterator[None]:
    """Convert an exception of the body to the call's status. A cancelled call gets none."""
    try:
        yield
    except (aio.InternalError, aio.AbortError):  # the peer has disconnected, or has its status already
        raise
    except Exception as error:
        await abort(context, error_for(error))


def _attach(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _shortened(message: str) -> str:
    """Shorten a message in the middle: the head names the field, and the tail the limit."""
    encoded = message.encode()
    if len(encoded) <= _MAX_MESSAGE_BYTES:
        return message
    half = _MAX_MESSAGE_BYTES // 2
    return f"{encoded[:half].decode(errors='ignore')} ... {encoded[-half:].decode(errors='ignore')}"


_CODES: dict[Any, str] = {code.value[0]: code.name for code in grpc.StatusCode} | {
    code: code.name for code in grpc.StatusCode
}
_FACES = {"/inference.": "oip", "/vllm.": "vllm"}
"""Prefixes of third-party services, and their names in the audit."""


class AuthInterceptor:
    """Interceptor of one port.

    Args:
        takes_control: the port accepts control operations.
    """

    def __init__(self, gate: Authenticator, *, takes_control: bool) -> None:
        self._gate = gate
        self._takes_control = takes_control
        self._public = {method for method, one in GRPC.items() if one.is_public(gate.options)}

    def guarded(self, method: str, handler: Any) -> Any:
        """Wrap a method's handler with authentication and audit; its task has the call in its context.

        Args:
            handler: reads its requests from the call itself: a coroutine function with one response or a stream.
        """
        if method in self._public:
            return handler
        permission = GRPC.get(method, CONTROL)
        inner = handler.stream_stream or handler.stream_unary
        face = next((face for begin, face in _FACES.items() if method.startswith(begin)), "grpc")
        name = method.rpartition("/")[2]

        async def answer(requests: object, context: Any) -> Any:
            entry, status = self._entry(face, method, context), "OK"
            try:
                try:
                    self._gate.open(entry, *_headers(context))
                    entry.require(permission.role, name, on_control_port=permission.on_control_port)
                except JpagedError as error:
                    if permission.on_control_port and entry.tenant:
                        entry.record_operation(name)
                    await abort(context, error)
                enter(entry)
                return await inner(requests, context)
            except BaseException as error:
                status = _get_status(error, context)
                raise
            finally:
                self._gate.close(entry, status)

        many = handler.stream_stream is not None
        make = grpc.stream_stream_rpc_method_handler if many else grpc.stream_unary_rpc_method_handler
        return make(answer, response_serializer=handler.response_serializer)

    def unknown(self) -> Any:
        """Return the handler of all unknown methods: it requires a key, and answers UNIMPLEMENTED."""

        async def answer(requests: object, context: Any) -> None:
            entry, status = self._entry("grpc", "unknown", context), "UNIMPLEMENTED"
            try:
                try:
                    self._gate.open(entry, *_headers(context))
                except JpagedError as error:
                    await abort(context, error)
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")  # gRPC's standard message
            except BaseException as error:
                status = _get_status(error, context)
                raise
            finally:
                self._gate.close(entry, status)

        return grpc.stream_stream_rpc_method_handler(answer)

    def _entry(self, face: str, method: str, context: Any) -> CallContext:
        return CallContext(face=face, method=method, peer=context.peer(), takes_control=self._takes_control)


def _get_status(error: BaseException, context: Any) -> str:
    """Return the status of a call whose handler raised: the aborted status, or gRPC's default."""
    if isinstance(error, asyncio.CancelledError):
        return "CANCELLED"
    return _CODES.get(context.code(), "UNKNOWN") if isinstance(error, aio.AbortError) else "UNKNOWN"


def _headers(context: Any) -> tuple[list[str], list[str]]:
    """Return the values of `authorization` and `x-jpaged-tenant` of a call."""
    keys, tenants = list[str](), list[str]()
    for name, value in context.invocation_metadata() or ():
        if name in ("authorization", "x-jpaged-tenant"):
            text = value.decode(errors="replace") if isinstance(value, bytes) else value
            (keys if name == "authorization" else tenants).append(text)
    return keys, tenants


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


def make_server(options: ServerOptions, max_message_bytes: int, door: AuthInterceptor) -> aio.Server:
    """Create a server without services and port, with the limits of these options; `door` authorizes calls."""
    logging.getLogger(_CORE_NAME).addFilter(_is_ours)
    core, _core.AioServer = _core.AioServer, _Core
    try:
        server = aio.server(options=_arguments(options, max_message_bytes))
        server._server.decoding = _Decoding(max_message_bytes, door)  # type: ignore[attr-defined]  # a `_Core`
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


class _Decoding:
    """Makes handlers that authorize calls and decode their requests: gRPC passes bytes."""

    def __init__(self, max_message_bytes: int, door: AuthInterceptor) -> None:
        self._door = door
        self._freed = FreedMemory()
        self._in_hand = MessagesInHand(max_message_bytes)

    def handler(self, method: str, handler: Any) -> Any:
        """Return the handler of a method, with messages in place of bytes."""
        return self._door.guarded(method, _reading(handler, self._freed, self._in_hand))

    def unknown(self) -> Any:
        """Return the handler of all unknown methods."""
        return self._door.unknown()


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
            await abort(context, InvalidArgument("request", f"{len(content)} bytes are not a valid message: {error}"))

    async def answer(_: object, context: Any) -> Any:
        content = request = None
        try:
            if (content := await context.read()) is aio.EOF:
                await abort(context, InvalidArgument("request", "is missing: the call ended without a message"))
            with in_hand.counted(len(content)) as too_much:
                if too_much is not None:
                    await abort(context, too_much)
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
    """gRPC's server, with its own loops that accept calls.

    grpc.aio accepts all calls in one loop, which waits for the next call of any method: for each call it registers and
    removes a callback for every method. Here each method has its own loop and one handler.

    gRPC core dispatches registered methods. For others, grpc.aio decodes the name as UTF-8 in its accept loop, and a
    failure ends the loop: a single call would end the server. This class never reads the name.

    Attributes:
        decoding: makes the handlers.
    """

    decoding: _Decoding
    _handlers: Mapping[str, Any] = MappingProxyType({})

    def add_registered_method_handlers(self, method_handlers: Mapping[str, Any]) -> None:
        """Register methods, by their full names."""
        super().add_registered_method_handlers(method_handlers)
        self._handlers = {**self._handlers, **method_handlers}

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """Start to accept calls of a method, or of unknown ones; the future ends with the server."""
        if method is None:
            return asyncio.ensure_future(self._accept("unknown", self._request_call, self.decoding.unknown()))
        name = method.decode()
        handler = self.decoding.handler(name, self._handlers[name])
        return asyncio.ensure_future(self._accept(name, partial(self._request_registered_call, method), handler))

    async def _accept(self, name: str, request: Callable[[], Awaitable[Any]], handler: Any) -> None:
        methods = SimpleNamespace(resolve_handler=lambda details: handler)
        loop, answers = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        while True:
            call = await request()
            answer = _core._handle_rpc(name, methods, (), call, loop, False)
            task = loop.create_task(_core._schedule_rpc_coro(answer, call, loop, name))
            answers.add(task)  # the loop keeps no reference to its tasks
            task.add_done_callback(answers.discard)


def bind(server: aio.Server, field: str, host: str, port: int, certificates: CertificateFiles | None) -> int:
    """Bind a server to an address; return the port, which for 0 is a free one.

    Args:
        field: the option that names the port.

    Raises:
        InvalidArgument: the host or the port cannot be bound; names it.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    _require_host(field, host)
    if problem := _problem_of_port(host, port):  # check first: gRPC core only logs the reason
        raise InvalidArgument(field, f"{address} cannot be bound: {problem}")
    try:
        if certificates is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, get_credentials(certificates))
    except (RuntimeError, UnicodeError) as error:
        raise InvalidArgument(field, f"{address} cannot be bound: {error}") from error
    if bound == 0:
        raise InvalidArgument(field, f"{address} cannot be bound")
    return bound


def get_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """Return a port's TLS credentials; each handshake checks if the certificate files have changed."""
    told = files.now

    def newest() -> Any:  # None if unchanged: gRPC accepts it, but its stubs do not
        nonlocal told
        if files.now is told:
            return None
        told = files.now
        return _configuration(told)

    wants_clients = told.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(_configuration(told), newest, wants_clients)


def _configuration(now: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(now.key, now.chain)], now.client_ca)


def _problem_of_port(host: str, port: int) -> str:
    """Return the operating system's reason why a port cannot be bound, or "" if it can."""
    try:
        _bind_once(host, port)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _bind_once(host: str, port: int) -> None:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in found[:1]:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC: ignore ended connections
            probe.bind(address)


def _require_host(field: str, host: str) -> None:
    """Raise InvalidArgument if the host is not an address of this machine."""
    try:
        _bind_once(host, 0)
    except (OSError, ValueError) as error:  # ValueError: an invalid name
        name = field.removesuffix("port") + "host"
        raise InvalidArgument(name, f"{host!r} is not an address of this machine: {error}") from error
