"""The application: routes, and common handling of every request.

X-Request-Id    the caller's id, or a generated one, in the response
an error        one status and OpenAI's error object, in one place
"""

from __future__ import annotations

import uuid

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp as App
from starlette.types import Message, Receive, Scope, Send

from jpaged.access.authenticator import Gate
from jpaged.errors import JpagedError, NotFound, Unsupported
from jpaged.http.access import Guarded, with_permission
from jpaged.http.batching.batches import batch_routes
from jpaged.http.batching.runner import Runner
from jpaged.http.errors import error_for, response_of
from jpaged.http.generate.paths import completion_routes
from jpaged.http.models import model_routes
from jpaged.http.operator import operator_routes
from jpaged.http.page.paths import page_routes
from jpaged.http.requests import REQUEST_ID_HEADER
from jpaged.http.responses import response_routes
from jpaged.http.scoring import scoring_routes
from jpaged.http.tokens import token_routes
from jpaged.service.records import is_name
from jpaged.service.service import Service

_ROUTES = (
    *(operator_routes, model_routes, completion_routes, response_routes),
    *(scoring_routes, token_routes, page_routes),
)
"""Functions that return the routes of a service, except those of batches."""


def make_app(service: Service, gate: Gate, batches: Runner | None = None) -> App:
    """Return the ASGI application for a service, with authentication by the gate."""
    app = Starlette(
        routes=[
            *(with_permission(route) for make in _ROUTES for route in make(service)),
            *map(with_permission, batch_routes(service, batches)),
        ],
        exception_handlers={JpagedError: _refuse, HTTPException: _refuse_path, Exception: _refuse},
    )
    guarded: App = Guarded(app, gate)
    if origins := service.state.config.http.http_cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER, "retry-after", "retry-after-ms"),
        )
    return _Named(guarded)


async def _refuse(request: Request, error: Exception) -> Response:
    return response_of(error_for(error))


async def _refuse_path(request: Request, error: Exception) -> Response:
    """Answer requests with an unknown path or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = f"{request.method} {request.url.path[:200]}"
    told: JpagedError = (
        NotFound(f"path: there is no {path}") if status == 404 else Unsupported(f"path: {path}: {error}")
    )
    response = response_of(told)
    response.status_code = status
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


class _Named:
    """Middleware that gives each request an id, and returns it in the response."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key = REQUEST_ID_HEADER.encode()
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == key), "")
        request_id = given if is_name(given) else uuid.uuid4().hex
        headers: dict[str, str] = {REQUEST_ID_HEADER: request_id}
        scope.setdefault("state", {}).update(request_id=request_id, answer_headers=headers)

        has_begun = False

        async def named(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                added = [(name.encode(), value.encode()) for name, value in headers.items()]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as error:  # starlette raises it again after responding
            if not has_begun:
                await response_of(error_for(error))(scope, receive, named)
