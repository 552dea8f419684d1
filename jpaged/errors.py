"""Every error that jpaged raises on purpose, and the gRPC status that each becomes.

    JpagedError                                 grpc_status
    ├── InvalidArgument (ValueError)            INVALID_ARGUMENT     the caller is wrong: field, value, limit
    │   └── RequestTooLong                      INVALID_ARGUMENT     it can never fit, whatever the load
    ├── NotFound (LookupError)                  NOT_FOUND            no such request or adapter
    │   └── ModelNotFound                       NOT_FOUND            the server has another model
    ├── Unauthenticated                         UNAUTHENTICATED      the call brings no key that the server knows
    ├── PermissionDenied                        PERMISSION_DENIED    turned off, or not what the key is for
    ├── AlreadyExists                           ALREADY_EXISTS       a request with this id is in flight
    ├── Incompatible                            FAILED_PRECONDITION  what is handed over means something else here
    ├── TryLater                                RESOURCE_EXHAUSTED   the same request can succeed after a while, told
    │   ├── QueueFull                           RESOURCE_EXHAUSTED   the waiting queue is at its bound
    │   └── QuotaExceeded                       RESOURCE_EXHAUSTED   the tenant has used up what it may have for now
    ├── LimitExceeded                           RESOURCE_EXHAUSTED   over a limit of gRPC's own: trying again is no use
    ├── Unavailable                             UNAVAILABLE          starting or draining
    │   ├── EngineHung                          UNAVAILABLE          a step does not end: the server gives up
    │   └── ProcessLost                         UNAVAILABLE          another process of the server is gone, or failed
    ├── DeadlineExceeded                        DEADLINE_EXCEEDED    the request's deadline passed
    ├── Cancelled                               CANCELLED            the caller went away
    ├── Unsupported                             UNIMPLEMENTED        this backend or build cannot, and why
    └── InternalError                           INTERNAL             our bug or a device fault, with its state

The engine and the server translate nothing else: a foreign exception is caught in two places only (the top of the
engine loop, the top of the servicer) and becomes an InternalError.
"""

from __future__ import annotations

import os
import re
from typing import ClassVar


class JpagedError(Exception):
    """Base of every error raised on purpose.

    Attributes:
        grpc_status: the name of the status code that it becomes.
        exit_code: how a server ends that it has ended; docs/health.md has all of them.
    """

    grpc_status: ClassVar[str] = "UNKNOWN"
    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, *, grpc_status: str | None = None, exit_code: int | None = None) -> None:
        super().__init_subclass__()
        if grpc_status is not None:
            cls.grpc_status = grpc_status
        if exit_code is not None:
            cls.exit_code = exit_code


def reason_of(error: JpagedError) -> str:
    """The error's name for machines: RequestTooLong -> REQUEST_TOO_LONG."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).upper()


_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters of terminals and of the order of text, ends of lines, and lone surrogates."""


def printable(text: str) -> str:
    r"""Return a text for a line of a log or a terminal: control characters become `\u001b`, also ends of lines.

    Texts of other processes may hold them, and would otherwise forge lines or steer the reader's terminal.
    """
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def sentence_of(error: BaseException) -> str:
    """What to say of an error in one line: its own words, what the system says with the file, or that it is a bug."""
    if isinstance(error, JpagedError):
        return str(error)
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return f"{where}{error.strerror or str(error) or type(error).__name__}"
    if isinstance(error, MemoryError):
        return "this machine's memory is used up"
    what = f"{type(error).__name__}: {error}".rstrip(": ").partition("\n")[0]
    return f"a bug in jpaged: {what} (JPAGED_TRACEBACK=1 shows where)"


class InvalidArgument(JpagedError, ValueError, grpc_status="INVALID_ARGUMENT"):
    """The caller passed something that can never work: says which field, which value, and the limit.

    `field` is the name as the caller wrote it (`sampling.top_p`, `--block-size`); the server puts it into
    google.rpc.BadRequest.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class RequestTooLong(InvalidArgument):
    """The request cannot fit into the model's length or into the whole pool, even when it runs alone."""


class NotFound(JpagedError, LookupError, grpc_status="NOT_FOUND"):
    """The thing that was named does not exist (any more)."""


class ModelNotFound(NotFound):
    """The request names a model that the server does not have."""


class Unauthenticated(JpagedError, grpc_status="UNAUTHENTICATED"):
    """The call brings no key, or one that this server does not know."""


class PermissionDenied(JpagedError, grpc_status="PERMISSION_DENIED"):
    """The operator has turned it off, or the caller's key is not for it: says what would be."""


class AlreadyExists(JpagedError, grpc_status="ALREADY_EXISTS"):
    """A request with this id is in flight: a retry must wait for it or choose another id."""


class Incompatible(JpagedError, grpc_status="FAILED_PRECONDITION"):
    """What another server hands over means something else on this one: says what differs."""


class TryLater(JpagedError, grpc_status="RESOURCE_EXHAUSTED"):
    """There is no room for the request now; `retry_after_s` is when there is likely to be some."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(TryLater):
    """The waiting queue is at its bound: other requests have to end first."""


class QuotaExceeded(TryLater):
    """The tenant has used up what it may have for now: requests, tokens or streams."""


class StorageError(JpagedError, grpc_status="RESOURCE_EXHAUSTED"):
    """The disk of batches cannot be written, or the room that they or a tenant may have is used up."""


class LimitExceeded(JpagedError, grpc_status="RESOURCE_EXHAUSTED"):
    """A limit of gRPC's own, or of a proxy's, was exceeded, such as the size of a message: not a full queue."""


class Unavailable(JpagedError, grpc_status="UNAVAILABLE"):
    """The server is starting, draining or gone: the same request can succeed elsewhere or later."""


class EngineHung(Unavailable, exit_code=3):
    """A step has not ended for too long, and the server ends: no fault of the request, which may succeed elsewhere."""


class ProcessLost(Unavailable, exit_code=4):
    """Another one of several processes is gone or has failed, and all end: the request may succeed elsewhere."""


class DeadlineExceeded(JpagedError, grpc_status="DEADLINE_EXCEEDED"):
    """The request's deadline passed before it finished; its blocks are free again."""


class Cancelled(JpagedError, grpc_status="CANCELLED"):
    """The caller cancelled, or closed its stream."""


class Unsupported(JpagedError, grpc_status="UNIMPLEMENTED"):
    """This backend, build or model family cannot do what was asked; the message says why and what can."""


class InternalError(JpagedError, grpc_status="INTERNAL"):
    """A bug of ours or a fault of the device: the message carries the state needed to look into it."""
