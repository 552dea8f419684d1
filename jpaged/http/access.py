"""Authorizes requests at the HTTP port by the table of permissions; unknown paths require a key too."""

from __future__ import annotations

import math
from collections.abc import Iterator

from starlette.routing import Route
from starlette.types import ASGIApp as App
from starlette.types import Message, Receive, Scope, Send

from jpaged.access.authenticator import Gate
from jpaged.access.call_context import Entry, current, enter, permission_of_route
from jpaged.config import AccessOptions
from jpaged.errors import JpagedError, PermissionDenied
from jpaged.http.errors import response_of


class Guarded:
    """Middleware that authenticates requests; their tasks have the call in their context."""

    def __init__(self, app: App, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["method"], scope["path"], self._gate.options):
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        entry = Entry(
            face="http",
            method=f"{scope['method']} {scope['path'][:200]}",
            peer="" if client is None else f"{client[0]}:{client[1]}",
            takes_control=self._gate.options.control_port is None,
        )
        status, is_in = 499, False  # nginx's status for a client that disconnected before the response

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if is_in:
                    message["headers"] = [*message.get("headers", ()), *self._left(entry.tenant)]
            await send(message)

        try:
            try:
                self._gate.open(entry, _values(scope, b"authorization"), _values(scope, b"x-jpaged-tenant"))
            except JpagedError as error:
                await response_of(error)(scope, receive, told)
                return
            enter(entry)
            is_in = True
            await self._app(scope, receive, told)
        finally:
            self._gate.close(entry, status)

    def _left(self, tenant: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield the remaining quotas of a tenant as OpenAI's rate-limit headers."""
        for name, left in self._gate.quotas.left(tenant).items():
            yield f"x-ratelimit-limit-{name}".encode(), str(left.limit).encode()
            yield f"x-ratelimit-remaining-{name}".encode(), str(left.remaining).encode()
            yield f"x-ratelimit-reset-{name}".encode(), duration(left.reset_s).encode()


def duration(seconds: float) -> str:
    """Format a time as in OpenAI's headers: 6m0s, 1.5s, 20ms."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text


def is_open(method: str, path: str, options: AccessOptions) -> bool:
    """Return True if a request never needs a key."""
    return permission_of_route(method, path).is_public(options)


def with_permission(route: Route) -> Route:
    """Wrap a route so that it rejects requests without permission before reading them."""
    inner = route.app

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        method: str = scope["method"]
        try:
            permission_of_route(method, route.path).check(current(), f"{method} {route.path}")
        except PermissionDenied as error:
            await response_of(error)(scope, receive, send)
            return
        await inner(scope, receive, send)

    route.app = guarded
    return route


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for header, value in scope["headers"] if header == name]
