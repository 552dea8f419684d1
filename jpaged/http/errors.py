"""Errors -> HTTP statuses, in OpenAI's form.

    {"error": {"message": "top_p: 2.0 is ...", "type": "invalid_request_error", "param": "top_p", "code": ...}}

`code` is the error's name, as google.rpc.ErrorInfo has it over gRPC: QUEUE_FULL. OpenAI's types:
https://platform.openai.com/docs/guides/error-codes. Clients of OpenAI's try again on their own after 408, 409, 429 and
all from 500 on, unless `x-should-retry` says otherwise.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from starlette.responses import JSONResponse, Response

from jpaged import json_text
from jpaged.errors import (
    InternalError,
    InvalidArgument,
    JpagedError,
    RequestTooLong,
    TryLater,
    Unauthenticated,
    Unavailable,
    reason_of,
)

_LOG = logging.getLogger(__name__)

_STATUSES = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "not_found_error"),
    "ALREADY_EXISTS": (409, "conflict_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "cancelled_error"),
    "INTERNAL": (500, "server_error"),
    "UNKNOWN": (500, "server_error"),
    "UNIMPLEMENTED": (501, "unsupported_error"),
    "UNAVAILABLE": (503, "server_error"),
    "DEADLINE_EXCEEDED": (504, "timeout_error"),
}
"""By the gRPC status that the error becomes elsewhere. 499 is nginx's word for a client that has gone."""

_FINAL = {"INTERNAL", "UNKNOWN", "UNIMPLEMENTED", "DEADLINE_EXCEEDED"}
"""What the same request would meet again, or has no time for."""


class StorageError(JpagedError, grpc_status="RESOURCE_EXHAUSTED"):
    """The disk of batches cannot be written, or the room that they or a tenant may have is used up."""


class JSON(JSONResponse):
    """A JSON body by the project's own writer."""

    def render(self, content: Any) -> bytes:
        return json_text.encode(content)


def error_for(error: Exception) -> JpagedError:
    """The error that a request ends with: the same, or InternalError for one that nobody foresaw, which is logged."""
    if isinstance(error, JpagedError):
        return error
    _LOG.error("a request failed", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")


def body_of(error: JpagedError) -> dict[str, Any]:
    """An error in OpenAI's form."""
    param, message = None, str(error)
    if isinstance(error, InvalidArgument):
        param = _name_in_body(error.field)
        message = f"{param}: {error.problem}"
    kind = _STATUSES[error.grpc_status][1]
    return {"error": {"message": message, "type": kind, "param": param, "code": reason_of(error)}}


def response_of(error: JpagedError) -> Response:
    """The response that an error becomes; one that passes says when."""
    headers = {}
    if isinstance(error, TryLater):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["Retry-After-Ms"] = str(math.ceil(error.retry_after_s * 1000))
    elif isinstance(error, Unavailable):
        headers["Retry-After"] = "1"
    elif error.grpc_status in _FINAL or isinstance(error, StorageError):
        headers["X-Should-Retry"] = "false"
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    is_body = isinstance(error, RequestTooLong) and error.field == "body"
    is_storage = isinstance(error, StorageError)
    status = 413 if is_body else 507 if is_storage else _STATUSES[error.grpc_status][0]
    return JSON(body_of(error), status_code=status, headers=headers)


def _name_in_body(field: str) -> str:
    """A field of a request by its name in a body."""
    for prefix in ("sampling.", "chat."):
        field = field.removeprefix(prefix)
    return "prompt" if field == "prompt.token_ids" else field
