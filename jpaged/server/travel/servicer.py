"""jpaged.v1.PrefixService: one method for each RPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from google.protobuf.message import Message

from jpaged._proto.v1 import prefixes_pb2, prefixes_pb2_grpc
from jpaged.errors import DeadlineExceeded
from jpaged.server.servicer import prompt_from, tenant_of
from jpaged.server.status import CallContext, answering
from jpaged.server.travel.wire import arrival_of, part_from, response_of
from jpaged.service.kv_protocol import Header, Piece
from jpaged.service.kv_transfer import Prefix, Travelling

_STALL_S = 30.0
"""Timeout of a write; a reader that takes longer counts as disconnected."""
_HANDED_ON = ("authorization", "x-jpaged-tenant")
"""Credentials of a call that are forwarded to another server."""


class PrefixServicer(prefixes_pb2_grpc.PrefixServiceServicer):
    """jpaged.v1.PrefixService."""

    def __init__(self, travelling: Travelling) -> None:
        self._travelling = travelling

    async def SavePrefix(self, request: prefixes_pb2.SavePrefixRequest, context: CallContext) -> None:
        """Stream a prefix; its blocks are released however the call ends."""
        async with answering(context):
            prefix = _prefix_from(request, context)
            async with aclosing(self._travelling.save(prefix, request.num_known_tokens)) as parts:
                async for part in parts:
                    await _write(context, response_of(part))

    async def LoadPrefix(
        self, requests: AsyncIterator[prefixes_pb2.LoadPrefixRequest], context: CallContext
    ) -> prefixes_pb2.LoadPrefixResponse:
        """Import a prefix, message by message."""
        async with answering(context), aclosing(_parts(requests)) as parts:
            arrival = await self._travelling.load(parts, tenant_of(context))
            return prefixes_pb2.LoadPrefixResponse(arrival=arrival_of(arrival))

    async def FetchPrefix(
        self, request: prefixes_pb2.FetchPrefixRequest, context: CallContext
    ) -> prefixes_pb2.FetchPrefixResponse:
        """Import a prefix that another server saves, using the caller's credentials."""
        async with answering(context):
            arrival = await self._travelling.fetch(request.source, _prefix_from(request, context))
            return prefixes_pb2.FetchPrefixResponse(arrival=arrival_of(arrival))


def _prefix_from(
    request: prefixes_pb2.SavePrefixRequest | prefixes_pb2.FetchPrefixRequest, context: CallContext
) -> Prefix:
    headers = tuple(
        (name, value)
        for name, value in context.invocation_metadata() or ()
        if name in _HANDED_ON and isinstance(value, str)
    )
    return Prefix(
        prompt=prompt_from(request),
        cache_salt=request.cache_salt,
        tenant=tenant_of(context),
        adapter=request.adapter,
        headers=headers,
    )


async def _parts(requests: AsyncIterator[prefixes_pb2.LoadPrefixRequest]) -> AsyncGenerator[Header | Sequence[Piece]]:
    async for request in requests:
        yield part_from(request)


async def _write(context: CallContext, message: Message) -> None:
    try:
        await asyncio.wait_for(context.write(message), _STALL_S)
    except TimeoutError:
        raise DeadlineExceeded(f"the receiver has read nothing of the prefix for {_STALL_S:g} s") from None
