"""The RPC methods: how a router forwards them, and how it registers them.

Messages that the router need not read are forwarded as bytes. The metadata of a call is forwarded too, and a server's
status becomes the call's status.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NoReturn

import grpc
from grpc import aio

from jpaged._proto.v1 import control_pb2, inference_pb2, prefixes_pb2
from jpaged.access.authenticator import current
from jpaged.client.convert import TENANT_KEY
from jpaged.client.errors import is_of_server, translated
from jpaged.errors import InternalError, InvalidArgument, JpagedError, Unauthenticated, Unavailable, Unsupported
from jpaged.server.grpc_server import abort

Way = Literal["stream", "prompt", "one", "all", "knowing", "fleet"]
"""How a method is answered:

stream   by the server of its prompt; resumed on another one on failure
prompt   by the server of its prompt
one      by any server
all      by every server, or by none
knowing  by the server that knows its subject
fleet    by the router, from its state or from all servers' answers
"""

WAYS: Mapping[str, Way] = {
    "Generate": "stream",
    "Score": "prompt",
    "Embed": "one",
    "Tokenize": "one",
    "Detokenize": "one",
    "GetModelInfo": "one",
    "GetServerInfo": "fleet",
    "GetLoad": "fleet",
    "ListAdapters": "fleet",
    "Abort": "knowing",
    "PinPrefix": "all",
    "UnpinPrefix": "all",
    "LoadAdapter": "all",
    "UnloadAdapter": "all",
}
"""Other methods are answered with UNIMPLEMENTED: they concern a single server."""
_PREFIXES = prefixes_pb2.DESCRIPTOR.services_by_name["PrefixService"]
_ASK_A_SERVER = "a router does not transfer prefixes: call one of its servers directly"

SERVICES: tuple[Any, ...] = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    control_pb2.DESCRIPTOR.services_by_name["ControlService"],
)
Handler = Callable[[Any, Any], Awaitable[Any]]
"""Handles a request (bytes if any server may answer it) and its context; returns the response as bytes."""
_MESSAGES: Mapping[str, Any] = vars(inference_pb2) | vars(control_pb2)


def channel_methods(channel: Any) -> dict[str, Any]:
    """Return the methods of a server by name: bytes in and out, except requests of streams.

    The router's own queries use messages: `model`, `info` and `load`.
    """
    made: dict[str, Any] = {}
    for service in SERVICES:
        for method in service.methods:
            if method.client_streaming:
                continue
            path = f"/{service.full_name}/{method.name}"
            if method.server_streaming:
                write = _MESSAGES[method.input_type.name].SerializeToString
                made[method.name] = channel.unary_stream(path, request_serializer=write)
            else:
                made[method.name] = channel.unary_unary(path)
    for name, method_name in (("model", "GetModelInfo"), ("info", "GetServerInfo"), ("load", "GetLoad")):
        made[name] = channel.unary_unary(
            f"/{control_pb2.DESCRIPTOR.package}.ControlService/{method_name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=_MESSAGES[f"{method_name}Response"].FromString,
        )
    return made


def register(server: aio.Server, handler_of: Callable[[str], Handler]) -> None:
    """Register all forwarded methods on a server, and refusing handlers for PrefixService."""
    refusing = {method.name: _refusing(method.name) for method in _PREFIXES.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_PREFIXES.full_name, refusing),))
    server.add_registered_method_handlers(_PREFIXES.full_name, refusing)
    for service in SERVICES:
        handlers: dict[str, Any] = {}
        for method in service.methods:
            if method.name not in WAYS:
                continue
            is_read = WAYS[method.name] != "one"  # otherwise the server reads it
            read = _MESSAGES[method.input_type.name].FromString if is_read else bytes
            make = (
                grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
            )
            handlers[method.name] = make(handler_of(method.name), request_deserializer=read)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        server.add_registered_method_handlers(service.full_name, handlers)


def _refusing(name: str) -> grpc.RpcMethodHandler:
    async def answer(requests: object, context: Any) -> NoReturn:
        await abort(context, Unsupported(f"{name}: {_ASK_A_SERVER}"))

    return grpc.stream_unary_rpc_method_handler(answer)


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
    via = get_via(context)
    if router_id in via:
        raise Unavailable(
            "the call leads back to this router: a target is the router itself, or a router in front of it"
        )
    if len(via) >= _MAX_HOPS:
        raise Unavailable(f"the call has passed through {len(via)} routers, over the limit of {_MAX_HOPS}")


def get_via(context: Any) -> list[str]:
    """Return the ids of the routers that a call has passed."""
    found = [value for key, value in context.invocation_metadata() or () if key == VIA_KEY]
    return [one for value in found if isinstance(value, str) for one in value.split(",")]


def forwarded_metadata(context: Any, router_id: str) -> Metadata:
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
    kept.append((VIA_KEY, ",".join((*get_via(context), router_id))))
    return tuple(kept)


def get_owner(metadata: Metadata) -> bytes:
    """Return bytes that identify the owner of a call, from its metadata."""
    told = [(key, value if isinstance(value, bytes) else value.encode()) for key, value in metadata if key in _OWNERS]
    return b"\0".join(key.encode() + b"=" + value for key, value in sorted(told))


def get_tenant(metadata: Metadata) -> str:
    """Return the tenant named by a call; "" if none."""
    found = next((value for key, value in metadata if key == TENANT_KEY), "")
    return found if isinstance(found, str) else found.decode(errors="replace")


def has_unread_key(metadata: Metadata) -> bool:
    """Return True if a call has a key that the router did not check, so that only a server can determine its tenant."""
    entry = current()
    return (entry is None or entry.key is None) and any(key == _AUTHORIZATION for key, _ in metadata)


_OWNERS = frozenset({TENANT_KEY, _AUTHORIZATION})


def get_response_metadata(metadata: Any) -> Metadata:
    """Return the metadata of a server's response to forward to the caller."""
    return tuple((key, value) for key, value in metadata or () if _goes_on(key) or key == "grpc-retry-pushback-ms")


def caused(error: aio.AioRpcError, proxy: str) -> JpagedError:
    """Return the error of a server, with its status as the cause; see `translated`."""
    failure = translated(error, proxy)
    failure.__cause__ = error
    return failure


async def abort_with_error(context: Any, error: Exception) -> NoReturn:
    """End a call with the server's status including details if there is one, otherwise with the error's status."""
    cause = error.__cause__
    if isinstance(cause, aio.AioRpcError):
        if is_of_server(cause):
            trailers = tuple(cause.trailing_metadata() or ())
            await context.abort(cause.code(), cause.details() or "", trailers)
        if cause.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            _LOG.debug("a call was lost: %s", cause.details())
            await abort(context, Unavailable("the server of this call is gone, and no other server has resumed it"))
    await abort(context, error if isinstance(error, JpagedError) else InternalError(f"{type(error).__name__}: {error}"))


def _goes_on(key: str) -> bool:
    return key not in _OF_A_HOP and (not key.startswith(("grpc-", ":")) or key == _KEPT_OF_GRPC)
