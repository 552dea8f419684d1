"""Errors -> HTTP statuses, with OpenAI's error objects.

    {"error": {"message": "top_p: 2.0 is ...", "type": "invalid_request_error", "param": "top_p", "code": ...}}

`code` is the error's name, as in google.rpc.ErrorInfo over gRPC: QUEUE_FULL; `context_length_exceeded` and
`model_not_found` are OpenAI's. `openai/lines.py` defines the format, which batches use too. OpenAI's types:
https://platform.openai.com/docs/guides/error-codes. OpenAI's clients retry automatically after 408, 409, 429 and from
500 on, unless `x-should-retry` is false.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from starlette.responses import JSONResponse, Response

from jpaged import json_text
from jpaged.errors import (
    InternalError,
    JpagedError,
    StorageError,
    TryLater,
    Unauthenticated,
    Unavailable,
)
from jpaged.openai.lines import error_body, status_code_of

_LOG = logging.getLogger(__name__)

_FINAL = {"INTERNAL", "UNKNOWN", "UNIMPLEMENTED", "DEADLINE_EXCEEDED"}
"""Statuses that a retry would meet again, or has no time for."""


class JSON(JSONResponse):
    """A JSON response encoded by `json_text`."""

    def render(self, content: Any) -> bytes:
        return json_text.encode(content)


def error_for(error: Exception) -> JpagedError:
    """Return a JpagedError unchanged; log any other error and return an InternalError."""
    if isinstance(error, JpagedError):
        return error
    _LOG.error("a request failed", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")


def response_of(error: JpagedError) -> Response:
    """Return the response of an error; for transient errors with the retry delay."""
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
    return JSON(error_body(error), status_code=status_code_of(error), headers=headers)
