"""What every HTTP request has: a body of bounded size, an id, a tenant."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from jpaged.access.entry import key_id, owner
from jpaged.errors import InvalidArgument, RequestTooLong
from jpaged.service.names import require_name
from jpaged.service.records import TRACE_KEYS, Caller

REQUEST_ID_HEADER = "x-request-id"
"""The caller's id of a request; the answer carries it back, or the one that was made up."""
TENANT_HEADER = "x-jpaged-tenant"
"""Whose request it is."""


def tenant_of(request: Request) -> str:
    """Return the tenant whose request it is: its key's, else the one it names; "" when it does not say."""
    named = request.headers.getlist(TENANT_HEADER)
    if not named:
        return owner("")
    if len(named) > 1:
        raise InvalidArgument(TENANT_HEADER, f"is there {len(named)} times: a request has one tenant")
    require_name(TENANT_HEADER, named[0])
    return owner(named[0])


def caller_of(request: Request) -> Caller:
    """Who asks."""
    client = request.client
    peer = "" if client is None else f"{client.host}:{client.port}"
    trace = {key: request.headers[key] for key in TRACE_KEYS if key in request.headers}
    return Caller("http", peer, key_id(), trace)


async def content_of(request: Request, max_bytes: int) -> bytes:
    """Return the bytes of a body; raises RequestTooLong for more than so many, before all are read."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise RequestTooLong("body", f"{declared} bytes are above the limit of {max_bytes}")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise RequestTooLong("body", f"more than {max_bytes} bytes, the limit")
        parts.append(part)
    return b"".join(parts)


def json_of(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    Raises:
        InvalidArgument: it is none.
    """
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise InvalidArgument("body", "is nested too deep") from error
    except ValueError as error:  # JSONDecodeError, bytes that are no UTF-8, and integers of thousands of digits
        raise InvalidArgument("body", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument("body", "is not a JSON object")
    return value
