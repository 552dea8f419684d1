"""HTTP requests and responses: bounded JSON bodies, headers, and errors; no large body blocks the event loop.

While a call runs, a client that disconnects is detected. Errors become HTTP statuses with OpenAI's error objects, or
for Anthropic's clients with Anthropic's:

    {"error": {"message": "top_p: 2.0 is ...", "type": "invalid_request_error", "param": "top_p", "code": ...}}
    {"type": "error", "error": {"type": "invalid_request_error", "message": "top_p: 2.0 is ..."}, "request_id": ...}

`code` is the error's name, as in google.rpc.ErrorInfo over gRPC: QUEUE_FULL; `context_length_exceeded` and
`model_not_found` are OpenAI's. `openai/lines.py` defines the format, which batches use too. OpenAI's types:
https://platform.openai.com/docs/guides/error-codes. OpenAI's clients retry automatically after 408, 409, 429 and from
500 on, unless `x-should-retry` is false.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from jpaged import json_text
from jpaged.access.authenticator import key_id, owner
from jpaged.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    JpagedError,
    QueueFull,
    RequestTooLong,
    StorageError,
    TryLater,
    Unauthenticated,
    Unavailable,
    get_reason,
)
from jpaged.openai.lines import error_body, get_status_code
from jpaged.openai.request import LenientBody
from jpaged.service.calls import TRACE_KEYS, Caller, require_name
from jpaged.service.service import Service

REQUEST_ID_HEADER = "x-request-id"
"""Header of the request id; the response repeats the caller's or has a generated one."""
TENANT_HEADER = "x-jpaged-tenant"
"""Header of the request's tenant."""
TIMEOUT_HEADER = "x-request-timeout"
"""Header of the request's timeout in seconds; then it ends with DEADLINE_EXCEEDED."""
IGNORED_FIELDS_HEADER = "x-jpaged-ignored-fields"
"""Header of a response that names the unknown fields of the request, which were ignored."""
WARNING_HEADER = "x-jpaged-warning"
"""Header of a response that names parts of the request, such as tools, which were ignored, with the reason."""
MAX_HEADER_CHARS = 1000
"""Characters of a header that names parts of the request; proxies limit all headers to a few KiB."""
MAX_TIMEOUT_S = 86400.0


def get_tenant(request: Request) -> str:
    """Return the tenant of a request: its key's, else the one in the header; "" if none."""
    named = _header(request, TENANT_HEADER)
    if named is None:
        return owner("")
    require_name(TENANT_HEADER, named)
    return owner(named)


def get_owner(service: Service, request: Request) -> str:
    """Return the tenant that scopes a request's names; "" (shared) if tenants are not isolated."""
    return get_tenant(request) if service.state.config.server.isolate_tenants else ""


def get_request_id(request: Request) -> str:
    """Return the id of a request, the caller's or a generated one; raise InvalidArgument for an invalid one."""
    given = _header(request, REQUEST_ID_HEADER)
    if given is not None:
        require_name(REQUEST_ID_HEADER, given)
    request_id: str = request.scope["state"]["request_id"]
    return request_id


def name_request(request: Request, given: str | None) -> str:
    """Return the id of a request from its header, or else `given` from its body, which the response repeats."""
    if not given or REQUEST_ID_HEADER in request.headers:
        return get_request_id(request)
    require_name("request_id", given)
    get_answer_headers(request)[REQUEST_ID_HEADER] = given
    return given


def get_remaining_s(request: Request) -> float | None:
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


def get_answer_headers(request: Request) -> dict[str, str]:
    """Return the additional headers of the response; code may add to them before the response begins."""
    headers: dict[str, str] = request.scope["state"]["answer_headers"]
    return headers


def _header(request: Request, name: str) -> str | None:
    given = request.headers.getlist(name)
    if len(given) > 1:
        raise InvalidArgument(name, f"is given {len(given)} times: a request may have one")
    return given[0] if given else None


def get_caller(request: Request) -> Caller:
    """Return the caller of a request."""
    client = request.client
    peer = "" if client is None else f"{client.host}:{client.port}"
    trace = {key: request.headers[key] for key in TRACE_KEYS if key in request.headers}
    return Caller("http", peer, key_id(), trace)


async def read_content(request: Request, max_bytes: int) -> bytes:
    """Return the bytes of a body; raise RequestTooLong for more than `max_bytes` without reading all."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise RequestTooLong("body", f"{declared} bytes are above the limit of {max_bytes}")
    parts, size = [], 0
    async for part in iter_content(request):
        size += len(part)
        if size > max_bytes:
            raise RequestTooLong("body", f"is over the limit of {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


async def iter_content(request: Request) -> AsyncIterator[bytes]:
    """Yield the parts of a body; raise Cancelled if the client disconnects."""
    try:
        async for part in request.stream():
            yield part
    except ClientDisconnect as error:
        raise Cancelled("the client has disconnected") from error


_T = TypeVar("_T")
_GRACE_S = 0.25
"""Grace period for the engine to end an overdue request between steps, before it is ended here."""
CHARS_OF_NUMBER = 8
"""Approximate characters of a number in JSON."""


async def body_in(service: Service, request: Request) -> tuple[dict[str, Any], int]:
    """Read the JSON object of a request; return it with its size in bytes.

    Whoever reads its fields calls `note_ignored_fields` then.

    Raises:
        RequestTooLong: it exceeds max_request_size.
        InvalidArgument: it is not a JSON object, or has values that a message cannot hold.
    """
    content = await _read_content(service, request)
    return await service.run_blocking(lambda: _build_fields(service, content), len(content)), len(content)


async def read_body(service: Service, request: Request, read: Callable[[Mapping[str, Any]], _T]) -> _T:
    """Return the result of `read` for a request's JSON object; raise as `body_in`, and as `read`."""
    content = await _read_content(service, request)

    def read_fields() -> tuple[dict[str, Any], _T]:
        fields = _build_fields(service, content)
        return fields, read(fields)

    fields, result = await service.run_blocking(read_fields, len(content))
    note_ignored_fields(service, request, fields)
    return result


def note_ignored_fields(service: Service, request: Request, body: Mapping[str, Any]) -> None:
    """Count the unknown fields of a body that were ignored, and name them in a header of the response."""
    if isinstance(body, LenientBody) and body.ignored:
        service.state.loaded().ignored_fields.add(body.ignored)
        names = ", ".join(ascii(name)[1:-1] for name in body.ignored)
        get_answer_headers(request)[IGNORED_FIELDS_HEADER] = names[:MAX_HEADER_CHARS]


async def _read_content(service: Service, request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json") and not _may_have_any_type(request):
        raise InvalidArgument("content-type", f"{kind[:80]!r} is not application/json")
    return await read_content(request, int(service.state.config.server.max_request_size * 2**20))


def _may_have_any_type(request: Request) -> bool:
    """Return True for Ollama's API, except in browsers, which send JSON to another site only after they ask it."""
    return is_ollama(request.scope) and "origin" not in request.headers


def _build_fields(service: Service, content: bytes) -> dict[str, Any]:
    fields = json_text.load_object("body", content)
    json_text.check_values("body", fields)
    return LenientBody(fields) if service.state.config.http.unknown_fields == "ignore" else fields


async def build_answer(
    service: Service, body: Callable[[], Any], size: int, parts: list[Any] | None = None
) -> Response:
    """Return the response with a body of about `size` characters, streamed in pieces if it is long.

    Args:
        parts: large values in the body; after a long response they are removed from the list and freed one at a time.
    """
    pieces: Iterator[bytes] = iter(())

    def begin() -> tuple[bytes, bytes]:
        nonlocal pieces
        pieces = json_text.pieces(body())
        return next(pieces, b""), next(pieces, b"")

    first, second = await service.run_blocking(begin, size)
    if not second:
        return Response(first, media_type="application/json")
    return _Pieces(service, itertools.chain((first, second), pieces), [] if parts is None else parts)


class _Pieces(Response):
    """A JSON body in pieces, each encoded on a thread after the client has received the previous ones.

    Freeing a million values at once would hold the interpreter's lock for 0.5 s: `parts` are freed one at a time.
    """

    media_type = "application/json"

    def __init__(self, service: Service, pieces: Iterator[bytes], parts: list[Any]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._service = service
        self._pieces = pieces
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(Cancelled):  # the client disconnected during the response
            await while_connected(receive, self._send(send))
        self._pieces = iter(())
        await self._service.run_blocking(self._free, json_text.PIECE_BYTES)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while piece := await self._service.run_blocking(lambda: next(self._pieces, b""), json_text.PIECE_BYTES):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _free(self) -> None:
        while self._parts:
            self._parts.pop()


async def while_there(request: Request, work: Coroutine[Any, Any, _T], remaining_s: float | None = None) -> _T:
    """Run work for a request whose body has been read; see `while_connected`."""
    return await while_connected(request.receive, work, remaining_s)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T], remaining_s: float | None = None) -> _T:
    """Run work for a request whose body has been read; cancel it if the client disconnects.

    Args:
        remaining_s: timeout from the client; None for no limit.

    Raises:
        Cancelled: the client disconnected; the work was cancelled, and has ended.
        DeadlineExceeded: the timeout passed; likewise.
    """
    until_s = None if remaining_s is None else remaining_s + _GRACE_S
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED, timeout=until_s)
        if working.done():
            return working.result()
        if leaving.done():
            raise Cancelled("the client has disconnected")
        raise DeadlineExceeded(f"the request took longer than its timeout of {remaining_s:g} s")
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
            if not working.cancelled():
                working.exception()  # mark the exception as retrieved


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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


ANTHROPIC_VERSION_HEADER = "anthropic-version"
"""Header that every request of Anthropic's clients has."""
_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/")
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OVERLOADED = 529
"""Anthropic's status of a server that can queue no more requests."""


def is_anthropic(scope: Scope) -> bool:
    """Return True if the path of a request, or a header, belongs to Anthropic's API, and so do errors."""
    path: str = scope["path"]
    if path == _ANTHROPIC_PATHS[0] or path.startswith(_ANTHROPIC_PATHS[1]):
        return True
    key = ANTHROPIC_VERSION_HEADER.encode()
    return any(name == key for name, _ in scope["headers"])


_OLLAMA_PATHS = "/api/"


def is_ollama(scope: Scope) -> bool:
    """Return True if the path of a request belongs to Ollama's API, and so do errors."""
    path: str = scope["path"]
    return path.startswith(_OLLAMA_PATHS)


def error_text(error: JpagedError) -> str:
    """Return the text of an error, which is all that Ollama's clients read of one."""
    text: str = error_body(error)["error"]["message"]
    return text


def _anthropic_status(error: JpagedError) -> int:
    return _OVERLOADED if isinstance(error, QueueFull) else get_status_code(error)


def anthropic_error(error: JpagedError, request_id: str, status: int | None = None) -> dict[str, Any]:
    """Return an error as Anthropic's error object.

    Args:
        status: status of the response, if it differs from that of the error.
    """
    status = status or _anthropic_status(error)
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = str(error)
    if isinstance(error, InvalidArgument):
        message = f"{error.field.removeprefix('sampling.').removeprefix('chat.')}: {error.problem}"
    elif kind == "api_error":
        message = f"{get_reason(error)}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def build_response(error: JpagedError, scope: Scope, status: int | None = None) -> Response:
    """Return the response of an error; for transient errors with the retry delay.

    Args:
        scope: the request's.
        status: status of the response, if it differs from that of the error.
    """
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
    if is_anthropic(scope):
        body = anthropic_error(error, scope["state"]["answer_headers"][REQUEST_ID_HEADER], status)
        return JSON(body, status_code=status or _anthropic_status(error), headers=headers)
    if is_ollama(scope):
        return JSON({"error": error_text(error)}, status_code=status or get_status_code(error), headers=headers)
    return JSON(error_body(error), status_code=status or get_status_code(error), headers=headers)
