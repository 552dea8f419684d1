"""Errors -> HTTP statuses, in OpenAI's form.

    {"error": {"message": "body.top_p: 2.0 is ...", "type": "invalid_request_error", "param": "top_p", "code": ...}}

`code` is the error's name, as google.rpc.ErrorInfo has it over gRPC: QUEUE_FULL. OpenAI's types:
https://platform.openai.com/docs/guides/error-codes.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from starlette.responses import JSONResponse, Response

from jpaged import json_text
from jpaged.errors import InternalError, InvalidArgument, JpagedError, TryLater, Unauthenticated, reason_of

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


class JSON(JSONResponse):
    """A JSON body by the project's own writer."""

    def render(self, content: Any) -> bytes:
        return json_text.dumps(content, ensure_ascii=False).encode("utf-8", "replace")


def error_for(error: Exception) -> JpagedError:
    """The error that a request ends with: the same, or InternalError for one that nobody foresaw, which is logged."""
    if isinstance(error, JpagedError):
        return error
    _LOG.error("a request failed", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")


def body_of(error: JpagedError) -> dict[str, Any]:
    """An error in OpenAI's form."""
    field = error.field.removeprefix("body.") if isinstance(error, InvalidArgument) else None
    kind = _STATUSES[error.grpc_status][1]
    return {"error": {"message": str(error), "type": kind, "param": field, "code": reason_of(error)}}


def response_of(error: JpagedError) -> Response:
    """The response that an error becomes; one that passes says when, in whole seconds."""
    headers = {}
    if isinstance(error, TryLater):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return JSON(body_of(error), status_code=_STATUSES[error.grpc_status][0], headers=headers)
