"""gRPC errors -> the classes of jpaged.errors: the reverse of the server's table, details included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

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
