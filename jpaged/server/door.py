"""Interceptor of a gRPC port: authorizes calls by the table of permissions, including calls of unknown methods."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc import aio

from jpaged.access.entry import Entry, enter
from jpaged.access.gate import Gate
from jpaged.access.permissions import CONTROL, GRPC
from jpaged.errors import JpagedError
from jpaged.server.status import refuse

_CODES: dict[Any, str] = {code.value[0]: code.name for code in grpc.StatusCode} | {
    code: code.name for code in grpc.StatusCode
}
_FACES = {"/inference.": "oip", "/vllm.": "vllm"}
"""Prefixes of third-party services, and their names in the audit."""


class Door:
    """Interceptor of one port.

    Args:
        takes_control: the port accepts control operations.
    """

    def __init__(self, gate: Gate, *, takes_control: bool) -> None:
        self._gate = gate
        self._takes_control = takes_control
        self._public = {method for method, one in GRPC.items() if one.is_public(gate.options)}

    def guarded(self, method: str, handler: Any) -> Any:
        """Wrap a method's handler with authentication and audit; its task has the call in its context.

        Args:
            handler: reads its requests from the call itself: a coroutine function with one response or a stream.
        """
        if method in self._public:
            return handler
        permission = GRPC.get(method, CONTROL)
        inner = handler.stream_stream or handler.stream_unary
        face = next((face for begin, face in _FACES.items() if method.startswith(begin)), "grpc")
        name = method.rpartition("/")[2]

        async def answer(requests: object, context: Any) -> Any:
            entry, status = self._entry(face, method, context), "OK"
            try:
                try:
                    self._gate.open(entry, *_headers(context))
                    entry.require(permission.role, name, on_control_port=permission.on_control_port)
                except JpagedError as error:
                    if permission.on_control_port and entry.tenant:
                        entry.note_act(name)
                    await refuse(context, error)
                enter(entry)
                return await inner(requests, context)
            except BaseException as error:
                status = _status_of(error, context)
                raise
            finally:
                self._gate.close(entry, status)

        many = handler.stream_stream is not None
        make = grpc.stream_stream_rpc_method_handler if many else grpc.stream_unary_rpc_method_handler
        return make(answer, response_serializer=handler.response_serializer)

    def unknown(self) -> Any:
        """Return the handler of all unknown methods: it requires a key, and answers UNIMPLEMENTED."""

        async def answer(requests: object, context: Any) -> None:
            entry, status = self._entry("grpc", "unknown", context), "UNIMPLEMENTED"
            try:
                try:
                    self._gate.open(entry, *_headers(context))
                except JpagedError as error:
                    await refuse(context, error)
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")  # gRPC's standard message
            except BaseException as error:
                status = _status_of(error, context)
                raise
            finally:
                self._gate.close(entry, status)

        return grpc.stream_stream_rpc_method_handler(answer)

    def _entry(self, face: str, method: str, context: Any) -> Entry:
        return Entry(face=face, method=method, peer=context.peer(), takes_control=self._takes_control)


def _status_of(error: BaseException, context: Any) -> str:
    """Return the status of a call whose handler raised: the aborted status, or gRPC's default."""
    if isinstance(error, asyncio.CancelledError):
        return "CANCELLED"
    return _CODES.get(context.code(), "UNKNOWN") if isinstance(error, aio.AbortError) else "UNKNOWN"


def _headers(context: Any) -> tuple[list[str], list[str]]:
    """Return the values of `authorization` and `x-jpaged-tenant` of a call."""
    keys, tenants = list[str](), list[str]()
    for name, value in context.invocation_metadata() or ():
        if name in ("authorization", "x-jpaged-tenant"):
            text = value.decode(errors="replace") if isinstance(value, bytes) else value
            (keys if name == "authorization" else tenants).append(text)
    return keys, tenants
