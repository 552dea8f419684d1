"""The RPC methods: how a router forwards them, and how it registers them.

Messages that the router need not read are forwarded as bytes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NoReturn

import grpc
from grpc import aio

from jpaged._proto.v1 import control_pb2, inference_pb2, prefixes_pb2
from jpaged.errors import Unsupported
from jpaged.server.grpc_server import refuse

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
        await refuse(context, Unsupported(f"{name}: {_ASK_A_SERVER}"))

    return grpc.stream_unary_rpc_method_handler(answer)
