"""Who calls a router, what of a call's metadata goes on, and how a server's answer becomes the call's."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import grpc
from grpc import aio

from jpaged.access.entry import current
from jpaged.client.failures import is_of_server
from jpaged.client.wire import TENANT_KEY
from jpaged.errors import JpagedError, Unavailable
from jpaged.server.status import refuse

_LOG = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str | bytes], ...]

_OF_A_HOP = frozenset({"user-agent", "content-type", "te", "host", "connection"})
_KEPT_OF_GRPC = "grpc-trace-bin"
_AUTHORIZATION = "authorization"


def passed_on(context: Any) -> Metadata:
    """Return the metadata that goes on to a server: all but what belongs to the connection.

    Where the router checks keys the tenant is the key's, so that servers without keys keep tenants apart, too.
    """
    kept = [(key, value) for key, value in context.invocation_metadata() or () if _goes_on(key)]
    entry = current()
    if entry is not None and entry.key is not None:
        kept = [pair for pair in kept if pair[0] != TENANT_KEY]
        kept.append((TENANT_KEY, entry.key.tenant))
    return tuple(kept)


def owner_of(metadata: Metadata) -> bytes:
    """Return whose call it is, as far as its metadata tell: nobody else's has the same."""
    told = [(key, value if isinstance(value, bytes) else value.encode()) for key, value in metadata if key in _OWNERS]
    return b"\0".join(key.encode() + b"=" + value for key, value in sorted(told))


_OWNERS = frozenset({TENANT_KEY, _AUTHORIZATION})


def told_by_servers(metadata: Any) -> Metadata:
    """Return what of a server's metadata goes on to the caller."""
    return tuple((key, value) for key, value in metadata or () if _goes_on(key) or key == "grpc-retry-pushback-ms")


async def refuse_as_told(context: Any, error: JpagedError) -> NoReturn:
    """End a call with the status that a server ended it with, details and all, else with what the error becomes."""
    cause = error.__cause__
    if isinstance(cause, aio.AioRpcError):
        if is_of_server(cause):
            trailers = tuple(cause.trailing_metadata() or ())
            await context.abort(cause.code(), cause.details() or "", trailers)
        if cause.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            _LOG.debug("a call was lost: %s", cause.details())
            error = Unavailable("the server of this call is gone, and no other has taken it")
    await refuse(context, error)


def _goes_on(key: str) -> bool:
    return key not in _OF_A_HOP and (not key.startswith(("grpc-", ":")) or key == _KEPT_OF_GRPC)
