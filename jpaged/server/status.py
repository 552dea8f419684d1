"""Errors -> gRPC status codes with google.rpc details. The codes are defined by the classes in errors.py."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn, Protocol

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from jpaged._proto.v1 import inference_pb2
from jpaged.errors import InternalError, InvalidArgument, JpagedError, TryLater, reason_of

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


class CallContext(Protocol):
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


def status_of(error: JpagedError) -> status_pb2.Status:
    """Return the status of an error: code, message and details.

    Every status carries ErrorInfo, whose reason is the error's class name in capitals (QUEUE_FULL); InvalidArgument
    adds BadRequest with the field, TryLater adds RetryInfo.
    """
    if isinstance(error, InvalidArgument) and (name := name_on_wire(error.field)) != error.field:
        error = type(error)(name, error.problem)
    code = grpc.StatusCode[error.grpc_status].value[0]
    status = status_pb2.Status(code=code, message=_shortened(str(error)))
    _attach(status, error_details_pb2.ErrorInfo(reason=reason_of(error), domain=ERROR_DOMAIN))
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


def trailers_of(error: JpagedError) -> Trailers:
    """Return the trailing metadata of an error's status."""
    details = _DETAILS_KEY, status_of(error).SerializeToString()
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


async def refuse(context: CallContext, error: JpagedError) -> NoReturn:
    """End the call with the status of `error`."""
    await context.abort(grpc.StatusCode[error.grpc_status], status_of(error).message, trailers_of(error))


@asynccontextmanager
async def answering(context: CallContext) -> AsyncIterator[None]:
    """Convert an exception of the body to the call's status. A cancelled call gets none."""
    try:
        yield
    except (aio.InternalError, aio.AbortError):  # the peer has disconnected, or has its status already
        raise
    except Exception as error:
        await refuse(context, error_for(error))


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
