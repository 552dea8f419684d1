"""gRPC errors -> the classes of jpaged.errors: the reverse of the server's table, details included."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from jpaged import errors
from jpaged.errors import (
    InvalidArgument,
    JpagedError,
    LimitExceeded,
    QueueFull,
    QuotaExceeded,
    RequestTooLong,
    TryLater,
)

_ACCEPTED_KEY = "x-jpaged-request-id"
_DETAILS_KEY = "grpc-status-details-bin"
_DEFAULT_RETRY_S = 1.0
_LATER: dict[str, type[TryLater]] = {"QUEUE_FULL": QueueFull, "QUOTA_EXCEEDED": QuotaExceeded}
_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")
_FROM_OUR_SIDE = "Internal error from Core"
_STATUS_TIMEOUT_S = 5.0
_OF_TRANSPORT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

_BY_CODE: dict[grpc.StatusCode, type[JpagedError]] = {
    grpc.StatusCode[kind.grpc_status]: kind
    for kind in (
        errors.NotFound,
        errors.Unauthenticated,
        errors.PermissionDenied,
        errors.AlreadyExists,
        errors.Incompatible,
        errors.Unavailable,
        errors.DeadlineExceeded,
        errors.Cancelled,
        errors.Unsupported,
        errors.InternalError,
    )
}


def build_error(
    code: grpc.StatusCode | None, message: str | None, trailers: Iterable[tuple[str, str | bytes]] | None
) -> JpagedError:
    """Return the error that a server raised, from its status; a plain JpagedError for unknown codes."""
    status = _status_in(trailers or ())
    text = message or (code.name if code is not None else "unknown error")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return _invalid_argument(text, status)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        kind = _LATER.get(_reason(status))
        if kind is None:
            return LimitExceeded(text)
        retry = _detail(status, error_details_pb2.RetryInfo)
        retry_after_s = _DEFAULT_RETRY_S if retry is None else retry.retry_delay.ToNanoseconds() / 1e9
        return kind(text, retry_after_s=retry_after_s)
    if code is not None and code in _BY_CODE:
        return _BY_CODE[code](text)
    return JpagedError(f"{code.name if code is not None else 'UNKNOWN'}: {text}")


class ServerStatus:
    """The status with which a server ends a call that sends it messages.

    grpc.aio replaces it with INTERNAL, "Internal error from Core", where a message is written while the call ends:
    https://github.com/grpc/grpc/issues/36066, observed with grpcio 1.85.

    Args:
        call: of grpc.aio, just started.
    """

    def __init__(self, call: Any) -> None:
        self._received: asyncio.Future[aio.AioRpcError] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._receive)  # runs once for each status, in either order

    async def restored(self, error: aio.AioRpcError) -> aio.AioRpcError:
        """Return the server's status if `error` replaced it, else `error`."""
        if error.details() != _FROM_OUR_SIDE:
            return error
        await asyncio.wait([self._received], timeout=_STATUS_TIMEOUT_S)
        return self._received.result() if self._received.done() else error

    def _receive(self, call: Any) -> None:
        details = _get_value(call.details())
        if details != _FROM_OUR_SIDE and not self._received.done():
            code, initial = _get_value(call.code()), _get_value(call.initial_metadata())
            self._received.set_result(aio.AioRpcError(code, initial, _get_value(call.trailing_metadata()), details))


def _get_value(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Return what a coroutine returns that has nothing to wait for, as those of a call that has ended."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: _T = end.value
        return value
    coroutine.close()
    raise RuntimeError("the call has not ended")


def is_of_server(error: grpc.RpcError) -> bool:
    """Return True if a jpaged server sent this status; a transport or a proxy sends statuses without its details."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return False
    return bool(_reason(_status_in(error.trailing_metadata() or ())))


def was_accepted(error: grpc.RpcError) -> bool:
    """Return True if a server had accepted the request before its call failed."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return False
    return any(key == _ACCEPTED_KEY for key, _ in error.initial_metadata() or ())


def translated(error: grpc.RpcError, proxy: str = "") -> JpagedError:
    """Convert the error of a failed call, on a channel of either kind.

    Args:
        proxy: the HTTP proxy of the connection, which the error names unless a jpaged server raised it.
    """
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return JpagedError(str(error))
    return build_error(error.code(), error_details(error, proxy), error.trailing_metadata())


def error_details(error: Any, proxy: str = "") -> str | None:
    """Return the text of a call's status, with the proxy as in `translated`."""
    code: grpc.StatusCode | None = error.code()
    text: str | None = error.details()
    if proxy and code is not None and code in _OF_TRANSPORT and not is_of_server(error):
        return f"{text or code.name} (through the proxy {proxy})"
    return text


def _invalid_argument(text: str, status: status_pb2.Status | None) -> InvalidArgument:
    kind = RequestTooLong if _reason(status) == "REQUEST_TOO_LONG" else InvalidArgument
    request = _detail(status, error_details_pb2.BadRequest)
    if request is None or not request.field_violations:
        return kind("request", text)
    violation = request.field_violations[0]
    return kind(violation.field, violation.description)


def _reason(status: status_pb2.Status | None) -> str:
    """Return the class name of the server's error, which is more specific than the code."""
    info = _detail(status, error_details_pb2.ErrorInfo)
    return "" if info is None else str(info.reason)


def _status_in(trailers: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status | None:
    for key, value in trailers:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:  # possibly a proxy's status; the code and the message are still usable
                return None
    return None


def _detail(status: status_pb2.Status | None, kind: type[_M]) -> _M | None:
    for packed in () if status is None else status.details:
        detail = kind()
        if packed.Is(kind.DESCRIPTOR) and packed.Unpack(detail):
            return detail
    return None
