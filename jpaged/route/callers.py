"""Metadata of forwarded calls, and conversion of a server's status to the call's status."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import grpc
from grpc import aio

from jpaged.access.call_context import current
from jpaged.client.failures import is_of_server, translated
from jpaged.client.wire import TENANT_KEY
from jpaged.errors import InternalError, InvalidArgument, JpagedError, Unauthenticated, Unavailable
from jpaged.server.grpc_server import refuse

_LOG = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str | bytes], ...]

_OF_A_HOP = frozenset({"user-agent", "content-type", "te", "host", "connection"})
_KEPT_OF_GRPC = "grpc-trace-bin"
_AUTHORIZATION = "authorization"


VIA_KEY = "x-jpaged-via"
"""Metadata key with the ids of the routers that a call has passed."""
_MAX_HOPS = 8


def require_no_loop(context: Any, router_id: str) -> None:
    """Reject a call that has passed this router before, or too many routers.

    Raises:
        Unavailable: names the loop.
    """
    via = via_of(context)
    if router_id in via:
        raise Unavailable(
            "the call leads back to this router: a target is the router itself, or a router in front of it"
        )
    if len(via) >= _MAX_HOPS:
        raise Unavailable(f"the call has passed through {len(via)} routers, over the limit of {_MAX_HOPS}")


def via_of(context: Any) -> list[str]:
    """Return the ids of the routers that a call has passed."""
    found = [value for key, value in context.invocation_metadata() or () if key == VIA_KEY]
    return [one for value in found if isinstance(value, str) for one in value.split(",")]


def passed_on(context: Any, router_id: str) -> Metadata:
    """Return the metadata to forward to a server: everything except that of the connection.

    If the router checks keys, it forwards the key's tenant, so that servers without keys isolate tenants too. Values
    that are not text, under keys that jpaged servers ignore, are dropped.

    Raises:
        InvalidArgument: the tenant is not text; a server would reject it too.
        Unauthenticated: the key is not text.
    """
    kept: list[tuple[str, str | bytes]] = []
    for key, value in context.invocation_metadata() or ():
        if not _goes_on(key) or key == VIA_KEY:
            continue
        if key.endswith("-bin") or (isinstance(value, str) and value.isascii() and value.isprintable()):
            kept.append((key, value))
        elif key == TENANT_KEY:
            raise InvalidArgument(TENANT_KEY, "is not printable ASCII")
        elif key == _AUTHORIZATION:
            raise Unauthenticated("authorization: is not printable ASCII")
    entry = current()
    if entry is not None and entry.key is not None:
        kept = [pair for pair in kept if pair[0] != TENANT_KEY]
        kept.append((TENANT_KEY, entry.key.tenant))
    kept.append((VIA_KEY, ",".join((*via_of(context), router_id))))
    return tuple(kept)


def owner_of(metadata: Metadata) -> bytes:
    """Return bytes that identify the owner of a call, from its metadata."""
    told = [(key, value if isinstance(value, bytes) else value.encode()) for key, value in metadata if key in _OWNERS]
    return b"\0".join(key.encode() + b"=" + value for key, value in sorted(told))


def tenant_of(metadata: Metadata) -> str:
    """Return the tenant named by a call; "" if none."""
    found = next((value for key, value in metadata if key == TENANT_KEY), "")
    return found if isinstance(found, str) else found.decode(errors="replace")


def has_unread_key(metadata: Metadata) -> bool:
    """Return True if a call has a key that the router did not check, so that only a server can determine its tenant."""
    entry = current()
    return (entry is None or entry.key is None) and any(key == _AUTHORIZATION for key, _ in metadata)


_OWNERS = frozenset({TENANT_KEY, _AUTHORIZATION})


def told_by_servers(metadata: Any) -> Metadata:
    """Return the metadata of a server's response to forward to the caller."""
    return tuple((key, value) for key, value in metadata or () if _goes_on(key) or key == "grpc-retry-pushback-ms")


def caused(error: aio.AioRpcError, proxy: str) -> JpagedError:
    """Return the error of a server, with its status as the cause; see `translated`."""
    failure = translated(error, proxy)
    failure.__cause__ = error
    return failure


async def refuse_as_told(context: Any, error: Exception) -> NoReturn:
    """End a call with the server's status including details if there is one, otherwise with the error's status."""
    cause = error.__cause__
    if isinstance(cause, aio.AioRpcError):
        if is_of_server(cause):
            trailers = tuple(cause.trailing_metadata() or ())
            await context.abort(cause.code(), cause.details() or "", trailers)
        if cause.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            _LOG.debug("a call was lost: %s", cause.details())
            await refuse(context, Unavailable("the server of this call is gone, and no other server has resumed it"))
    await refuse(
        context, error if isinstance(error, JpagedError) else InternalError(f"{type(error).__name__}: {error}")
    )


def _goes_on(key: str) -> bool:
    return key not in _OF_A_HOP and (not key.startswith(("grpc-", ":")) or key == _KEPT_OF_GRPC)
