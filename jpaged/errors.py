"""Every error that jpaged raises on purpose, and its gRPC status.

    JpagedError                                 grpc_status
    ├── InvalidArgument (ValueError)            INVALID_ARGUMENT     the caller's fault: field, value, limit
    │   └── RequestTooLong                      INVALID_ARGUMENT     it can never fit, whatever the load
    ├── NotFound (LookupError)                  NOT_FOUND            no such request or adapter
    │   └── ModelNotFound                       NOT_FOUND            the server has another model
    ├── Unauthenticated                         UNAUTHENTICATED      no API key, or an unknown one
    ├── PermissionDenied                        PERMISSION_DENIED    turned off, or the key lacks the role
    ├── AlreadyExists                           ALREADY_EXISTS       a request with this id is in flight
    ├── Incompatible                            FAILED_PRECONDITION  another server's blocks differ from this one's
    ├── TryLater                                RESOURCE_EXHAUSTED   may succeed after the given time
    │   ├── QueueFull                           RESOURCE_EXHAUSTED   the waiting queue is full
    │   └── QuotaExceeded                       RESOURCE_EXHAUSTED   the tenant's quota is used up for now
    ├── LimitExceeded                           RESOURCE_EXHAUSTED   over a limit of gRPC: a retry cannot succeed
    ├── Unavailable                             UNAVAILABLE          starting or draining
    │   ├── EngineHung                          UNAVAILABLE          a step does not end: the server stops
    │   └── ProcessLost                         UNAVAILABLE          another process of the server is gone, or failed
    ├── DeadlineExceeded                        DEADLINE_EXCEEDED    the request's deadline passed
    ├── Cancelled                               CANCELLED            the caller disconnected or cancelled
    ├── Unsupported                             UNIMPLEMENTED        not supported by this backend or build, and why
    └── InternalError                           INTERNAL             a bug in jpaged or a device fault, with its state

The engine and the server convert no other errors: foreign exceptions are caught in two places only (the top of the
engine loop, the top of the servicer) and become an InternalError.
"""

from __future__ import annotations

import os
import re
from typing import ClassVar


class JpagedError(Exception):
    """Base class of every error raised on purpose.

    Attributes:
        grpc_status: name of the status code.
        exit_code: exit code of a server that ends with it; docs/health.md lists all of them.
    """

    grpc_status: ClassVar[str] = "UNKNOWN"
    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, *, grpc_status: str | None = None, exit_code: int | None = None) -> None:
        super().__init_subclass__()
        if grpc_status is not None:
            cls.grpc_status = grpc_status
        if exit_code is not None:
            cls.exit_code = exit_code


def get_reason(error: JpagedError) -> str:
    """Return the machine-readable name of an error: RequestTooLong -> REQUEST_TOO_LONG."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).upper()


_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters of terminals, bidirectional controls, line ends, and lone surrogates."""


def printable(text: str) -> str:
    r"""Return a text that is safe in a log line or a terminal: control characters become `\u001b`.

    Line ends count as control characters. Texts of other processes may contain them, and could otherwise forge lines or
    control the reader's terminal.
    """
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def describe_error(error: BaseException) -> str:
    """Return a one-line description of an error: the message, the system's message with the file, or a bug notice."""
    if isinstance(error, JpagedError):
        return str(error)
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return f"{where}{error.strerror or str(error) or type(error).__name__}"
    if isinstance(error, MemoryError):
        return "this machine is out of memory"
    what = f"{type(error).__name__}: {error}".rstrip(": ").partition("\n")[0]
    return f"a bug in jpaged: {what} (JPAGED_TRACEBACK=1 shows where)"


class InvalidArgument(JpagedError, ValueError, grpc_status="INVALID_ARGUMENT"):
    """The caller passed an invalid value: names the field, the value and the limit.

    `field` is the name as the caller wrote it (`sampling.top_p`, `--block-size`); the server puts it into
    google.rpc.BadRequest.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class RequestTooLong(InvalidArgument):
    """The request cannot fit into the model's length or into the whole pool, even if it runs alone."""


class NotFound(JpagedError, LookupError, grpc_status="NOT_FOUND"):
    """The named object does not exist (any more)."""


class ModelNotFound(NotFound):
    """The request names a model that the server does not have."""


class Unauthenticated(JpagedError, grpc_status="UNAUTHENTICATED"):
    """The call has no API key, or an unknown one."""


class PermissionDenied(JpagedError, grpc_status="PERMISSION_DENIED"):
    """The operation is turned off, or the caller's key lacks the role; names the required one."""


class AlreadyExists(JpagedError, grpc_status="ALREADY_EXISTS"):
    """A request with this id is in flight: a retry must wait for it or choose another id."""


class Incompatible(JpagedError, grpc_status="FAILED_PRECONDITION"):
    """Data from another server is incompatible with this one; names the differences."""


class TryLater(JpagedError, grpc_status="RESOURCE_EXHAUSTED"):
    """There is no capacity for the request now; retry after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(TryLater):
    """The waiting queue is full: other requests have to end first."""


class QuotaExceeded(TryLater):
    """The tenant's quota of requests, tokens or streams is used up for now."""


class StorageError(JpagedError, grpc_status="RESOURCE_EXHAUSTED"):
    """The disk of batches cannot be written, or its space limit, in total or per tenant, is reached."""


class LimitExceeded(JpagedError, grpc_status="RESOURCE_EXHAUSTED"):
    """A limit of gRPC or of a proxy was exceeded, such as the size of a message; not a full queue."""


class Unavailable(JpagedError, grpc_status="UNAVAILABLE"):
    """The server is starting, draining or gone: the same request can succeed elsewhere or later."""


class EngineHung(Unavailable, exit_code=3):
    """A step has not ended for too long, and the server stops. The request may succeed elsewhere."""


class ProcessLost(Unavailable, exit_code=4):
    """Another process of the server is gone or has failed, and all stop. The request may succeed elsewhere."""


class DeadlineExceeded(JpagedError, grpc_status="DEADLINE_EXCEEDED"):
    """The request's deadline passed before it finished; its blocks are free again."""


class Cancelled(JpagedError, grpc_status="CANCELLED"):
    """The caller cancelled, or closed its stream."""


class Unsupported(JpagedError, grpc_status="UNIMPLEMENTED"):
    """This backend, build or model family does not support it; the message states why and what is supported."""


class InternalError(JpagedError, grpc_status="INTERNAL"):
    """A bug in jpaged or a fault of the device; the message has the state for debugging."""
