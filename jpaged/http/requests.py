"""Common parts of HTTP requests: bounded body, id, tenant, timeout."""

from __future__ import annotations

import math

from starlette.requests import ClientDisconnect, Request

from jpaged.access.call_context import key_id, owner
from jpaged.errors import Cancelled, InvalidArgument, RequestTooLong
from jpaged.service.records import TRACE_KEYS, Caller, require_name
from jpaged.service.service import Service

REQUEST_ID_HEADER = "x-request-id"
"""Header of the request id; the response repeats the caller's or has a generated one."""
TENANT_HEADER = "x-jpaged-tenant"
"""Header of the request's tenant."""
TIMEOUT_HEADER = "x-request-timeout"
"""Header of the request's timeout in seconds; then it ends with DEADLINE_EXCEEDED."""
MAX_TIMEOUT_S = 86400.0


def tenant_of(request: Request) -> str:
    """Return the tenant of a request: its key's, else the one in the header; "" if none."""
    named = _header(request, TENANT_HEADER)
    if named is None:
        return owner("")
    require_name(TENANT_HEADER, named)
    return owner(named)


def owner_of(service: Service, request: Request) -> str:
    """Return the tenant that scopes a request's names; "" (shared) if tenants are not isolated."""
    return tenant_of(request) if service.state.config.server.isolate_tenants else ""


def request_id_of(request: Request) -> str:
    """Return the id of a request, the caller's or a generated one; raise InvalidArgument for an invalid one."""
    given = _header(request, REQUEST_ID_HEADER)
    if given is not None:
        require_name(REQUEST_ID_HEADER, given)
    request_id: str = request.scope["state"]["request_id"]
    return request_id


def remaining_s_of(request: Request) -> float | None:
    """Return the timeout of a request in seconds; None for no limit."""
    given = _header(request, TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidArgument(TIMEOUT_HEADER, f"{given[:40]!r} is not a number of seconds up to {MAX_TIMEOUT_S:g}")
    return seconds


def answer_headers_of(request: Request) -> dict[str, str]:
    """Return the additional headers of the response; code may add to them before the response begins."""
    headers: dict[str, str] = request.scope["state"]["answer_headers"]
    return headers


def _header(request: Request, name: str) -> str | None:
    given = request.headers.getlist(name)
    if len(given) > 1:
        raise InvalidArgument(name, f"is given {len(given)} times: a request may have one")
    return given[0] if given else None


def caller_of(request: Request) -> Caller:
    """Return the caller of a request."""
    client = request.client
    peer = "" if client is None else f"{client.host}:{client.port}"
    trace = {key: request.headers[key] for key in TRACE_KEYS if key in request.headers}
    return Caller("http", peer, key_id(), trace)


async def content_of(request: Request, max_bytes: int) -> bytes:
    """Return the bytes of a body; raise RequestTooLong for more than `max_bytes` without reading all."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise RequestTooLong("body", f"{declared} bytes are above the limit of {max_bytes}")
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise RequestTooLong("body", f"is over the limit of {max_bytes} bytes")
            parts.append(part)
    except ClientDisconnect as error:
        raise Cancelled("the client has disconnected") from error
    return b"".join(parts)
