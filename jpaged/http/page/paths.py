"""The paths of the dashboard.

GET  /              the page
GET  /page/<file>   its script and its style sheet
GET  /page/about    the model, and the permissions of the page
GET  /page/frame    the current state of the pools, once
GET  /page/events   the same ten times a second, as server-sent events
POST /page/limit    {"blocks": 64} limits the pools; null removes the limit

All except the last are read-only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jpaged.errors import Unavailable
from jpaged.http.errors import JSON
from jpaged.http.exchange import body_in
from jpaged.http.page.hub import Hub, Watcher
from jpaged.http.page.limits import Limits, is_local, require_local
from jpaged.service.service import Service
from jpaged.version import __version__

_STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def page_routes(service: Service) -> list[Route]:
    """Return the routes of the dashboard."""
    hub, limits = Hub(service), Limits(service)

    async def about(request: Request) -> Response:
        model = service.state.loaded()
        has_keys = model.config.access.api_keys is not None  # the page sends the key that the user enters later
        return JSON(
            {
                "model": model.model.name,
                "version": __version__,
                "max_model_len": model.model.max_model_len,
                "has_chat": model.model.has_chat_template,
                "can_limit": not model.config.server.disable_control and (has_keys or is_local(request)),
            }
        )

    async def frame(request: Request) -> Response:
        with hub.watching() as watcher:
            while not watcher.is_over:
                if (newest := await watcher.next()) is not None:
                    return Response(newest.data, media_type="application/json", headers=_STREAM_HEADERS)
        raise Unavailable("the server is shutting down")

    async def events(request: Request) -> Response:
        return _Events(hub)

    async def limit(request: Request) -> Response:
        # The body must be JSON: a browser sends that from another site's page only if this server allows it (CORS).
        require_local(request)
        body, _ = await body_in(service, request)
        return JSON(await limits.limit(body))

    files = [Route("/", _file("index.html"), methods=["GET"])]
    files += [Route(f"/page/{path.name}", _file(path.name), methods=["GET"]) for path in sorted(_STATIC.glob("*.*s"))]
    return [
        *files,
        Route("/page/about", about, methods=["GET"]),
        Route("/page/frame", frame, methods=["GET"]),
        Route("/page/events", events, methods=["GET"]),
        Route("/page/limit", limit, methods=["POST"]),
    ]


class _Events(StreamingResponse):
    """Frames as server-sent events, while the client is connected."""

    def __init__(self, hub: Hub) -> None:
        super().__init__((), media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._hub = hub

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._hub.watching() as watcher:
            self.body_iterator = _told(watcher)
            await super().__call__(scope, receive, send)


async def _told(watcher: Watcher) -> AsyncIterator[bytes]:
    yield b"retry: 1000\n\n"
    while not watcher.is_over:
        frame = await watcher.next()
        if frame is None:
            yield b": nothing new\n\n"
        else:
            yield b"id: %d\nevent: pool\ndata: %b\n\n" % (frame.number, frame.data)


def _file(name: str) -> Any:
    path = _STATIC / name
    content = path.read_bytes()

    async def file(request: Request) -> Response:
        return Response(content, media_type=_TYPES[path.suffix], headers=_HEADERS)

    return file
