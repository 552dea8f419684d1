"""Transfer of KV blocks between servers: jpaged.v1.PrefixService and PrefillService.

`PrefixServicer` saves, loads and fetches prefixes; `PrefillServicer` computes prompts for servers of the decode role.
`PeerServers` are the servers that this one may fetch prefixes from: only those that its options name. The functions
below convert headers and pieces of prefixes to messages, and back.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import unquote

from google.protobuf.message import Message
from grpc import aio

from jpaged._proto.v1 import inference_pb2, prefill_pb2, prefill_pb2_grpc, prefixes_pb2, prefixes_pb2_grpc
from jpaged.access.tls import FileWatch
from jpaged.client.channel import Tls, open_channel, require_target
from jpaged.client.errors import translated
from jpaged.config import AccessOptions
from jpaged.engine.executor import BlockOffer
from jpaged.errors import DeadlineExceeded, InvalidArgument, PermissionDenied
from jpaged.server.grpc_server import ServicerContext, status_on_error
from jpaged.server.servicer import REQUEST_ID_KEY, call_from, get_tenant, prompt_from
from jpaged.server.servicer import build_response as generate_response_of
from jpaged.service.calls import RemotePrefillRequest, RequestHandle
from jpaged.service.kv_protocol import MAX_PIECES, BlockPiece, ImportResult, TransferHeader
from jpaged.service.kv_transfer import Prefix, PrefixTransferService
from jpaged.service.roles import PrefillRole
from jpaged.service.service import Service

_Part = TypeVar("_Part", prefixes_pb2.SavePrefixResponse, prefixes_pb2.LoadPrefixRequest)


def build_response(part: TransferHeader | Sequence[BlockPiece]) -> prefixes_pb2.SavePrefixResponse:
    """Convert a part to a message."""
    if isinstance(part, TransferHeader):
        return prefixes_pb2.SavePrefixResponse(header=_build_header(part))
    return prefixes_pb2.SavePrefixResponse(pieces=build_pieces(part))


def build_pieces(part: Sequence[BlockPiece]) -> prefixes_pb2.PrefixPieces:
    """Convert pieces to a message."""
    pieces = [
        prefixes_pb2.PrefixPiece(
            index=piece.index,
            kv_group=piece.kv_group,
            offset=piece.offset,
            contents=piece.contents,
            key=piece.key,
            hash=piece.hash,
        )
        for piece in part
    ]
    return prefixes_pb2.PrefixPieces(pieces=pieces)


def build_offer(offer: BlockOffer) -> prefill_pb2.BlockOffer:
    """Convert an offer to a message."""
    return prefill_pb2.BlockOffer(
        uuid=offer.uuid,
        address=offer.address,
        dtype=offer.dtype,
        block_shape=offer.block_shape,
        parts=[prefill_pb2.BlockOfferPart(begin=part.begin, shape=part.shape) for part in offer.parts],
        sizes=offer.sizes,
        num_rows=offer.num_rows,
        indices=[index for index, _ in offer.positions],
        kv_groups=[kv_group for _, kv_group in offer.positions],
        last_key=offer.last_key,
    )


def part_from(message: _Part) -> TransferHeader | Sequence[BlockPiece]:
    """Convert a message to a part.

    Raises:
        InvalidArgument: it has no part, or a part with no or too many pieces.
    """
    match message.WhichOneof("part"):
        case "header":
            return _header_from(message.header)
        case "pieces":
            return _pieces_from(message.pieces)
        case _:
            raise InvalidArgument("part", "is missing: give header or pieces")


def build_arrival(arrival: ImportResult) -> prefixes_pb2.PrefixArrival:
    """Convert the result of an import to a message."""
    return prefixes_pb2.PrefixArrival(
        num_tokens=arrival.num_tokens,
        num_found_tokens=arrival.num_found_tokens,
        num_loaded_blocks=arrival.num_loaded_blocks,
        num_known_blocks=arrival.num_known_blocks,
        is_short_of_room=arrival.is_short_of_room,
    )


def _pieces_from(message: prefixes_pb2.PrefixPieces) -> list[BlockPiece]:
    if not 1 <= len(message.pieces) <= MAX_PIECES:
        raise InvalidArgument("pieces", f"a message has {len(message.pieces)}: must be from 1 to {MAX_PIECES}")
    return [
        BlockPiece(piece.index, piece.kv_group, piece.offset, piece.contents, piece.key, piece.hash)
        for piece in message.pieces
    ]


def _build_header(header: TransferHeader) -> prefixes_pb2.PrefixHeader:
    return prefixes_pb2.PrefixHeader(
        kv_identity=header.kv_identity,
        facts=[prefixes_pb2.KvFact(name=name, value=value) for name, value in header.facts],
        block_size=header.block_size,
        bytes_per_block=header.bytes_per_block,
        num_kv_groups=header.num_kv_groups,
        token_ids=header.token_ids,
        num_found_tokens=header.num_found_tokens,
        num_blocks=header.num_blocks,
        cache_salt=header.cache_salt,
        adapter=header.adapter,
        adapter_digest=header.adapter_digest,
    )


def _header_from(message: prefixes_pb2.PrefixHeader) -> TransferHeader:
    return TransferHeader(
        kv_identity=message.kv_identity,
        facts=tuple((fact.name, fact.value) for fact in message.facts),
        block_size=message.block_size,
        bytes_per_block=message.bytes_per_block,
        num_kv_groups=message.num_kv_groups,
        token_ids=tuple(message.token_ids),
        num_found_tokens=message.num_found_tokens,
        num_blocks=message.num_blocks,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
        adapter_digest=message.adapter_digest,
    )


SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """jpaged.v1.PrefillService."""

    def __init__(self, service: Service, role: PrefillRole) -> None:
        self._service = service
        self._role = role

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: ServicerContext) -> None:
        """Send the first tokens, then the blocks; release the blocks however the call ends."""
        async with status_on_error(context):
            has_same_layout = await self._role.check_identity(
                request.kv_identity, request.model_identity, request.data_protocol
            )
            metadata = context.invocation_metadata() or ()
            call = dataclasses.replace(
                call_from(
                    request.request,
                    metadata,
                    context.time_remaining(),
                    context.peer(),
                    self._service.state.default_sampling,
                ),
                asked=RemotePrefillRequest(
                    request.cache_tenant,
                    request.adapter_digest,
                    request.num_known_blocks,
                    request.data_protocol,
                    request.block_size,
                    has_same_layout,
                    _get_host(context.peer()),
                ),
            )
            async with self._service.generate(call) as generation:
                await context.send_initial_metadata(((REQUEST_ID_KEY, generation.request_id),))
                async for event in generation:
                    told = generate_response_of(event, generation.request_id)
                    await context.write(prefill_pb2.PrefillResponse(told=told))
                await self._send(generation, context)

    async def FinishPull(
        self, request: prefill_pb2.FinishPullRequest, context: ServicerContext
    ) -> prefill_pb2.FinishPullResponse:
        """End an offer."""
        async with status_on_error(context):
            self._role.finish_pull(request.uuid, is_received=request.is_received)
        return prefill_pb2.FinishPullResponse()

    async def _send(self, generation: RequestHandle, context: ServicerContext) -> None:
        model = self._service.state.loaded()
        try:
            async with asyncio.timeout(model.config.roles.prefill_hold):
                async for part in self._role.parts(model, generation):
                    if isinstance(part, BlockOffer):
                        await context.write(prefill_pb2.PrefillResponse(offer=build_offer(part)))
                    else:
                        await context.write(prefill_pb2.PrefillResponse(pieces=build_pieces(part)))
        except TimeoutError:  # the caller computes the blocks that were not sent
            model.role_counts.add(num_holds_expired=1)


def _get_host(peer: str) -> str:
    """Return the numeric address of gRPC's `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`; "" for others."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


@dataclass(slots=True)
class _PeerConnection:
    """A connection to one peer.

    Attributes:
        is_replaced: its certificates are outdated; the last call closes it.
    """

    channel: aio.Channel
    num_calls: int = 0
    is_replaced: bool = False


class PeerServers:
    """Implementation of `jpaged.service.kv_transfer.Peers` over gRPC, with one lazy connection per peer.

    Changed certificates apply from the next call on; running calls keep theirs.

    Raises:
        InvalidArgument: a server's name is invalid.
    """

    def __init__(self, options: AccessOptions) -> None:
        for target in options.prefix_peers:
            require_target("prefix_peers", target)
        self._options = options
        self._tls: Tls | None = None
        if options.prefix_peer_ca is not None:
            self._tls = Tls(options.prefix_peer_ca, options.tls_cert, options.tls_key)
        files = () if self._tls is None else (self._tls.ca, self._tls.cert, self._tls.key)
        self._files = FileWatch([path for path in files if path is not None])
        self._connections: dict[str, _PeerConnection] = {}

    async def save(
        self, source: str, prefix: Prefix, num_known_tokens: int
    ) -> AsyncGenerator[TransferHeader | Sequence[BlockPiece]]:
        """Yield the parts that a peer saves; closing the iterator ends the call."""
        request = prefixes_pb2.SavePrefixRequest(
            token_ids=inference_pb2.TokenIds(ids=prefix.prompt.token_ids or ()),
            cache_salt=prefix.cache_salt,
            adapter=prefix.adapter,
            num_known_tokens=num_known_tokens,
        )
        connection = await self._connection(source)
        stub = prefixes_pb2_grpc.PrefixServiceStub(connection.channel)
        connection.num_calls += 1
        call = stub.SavePrefix(request, metadata=prefix.headers)
        try:
            async for message in call:
                yield part_from(message)
        except aio.AioRpcError as error:
            raise translated(error) from error
        finally:
            call.cancel()
            connection.num_calls -= 1
            if connection.is_replaced and not connection.num_calls:
                await connection.channel.close()

    async def _connection(self, source: str) -> _PeerConnection:
        if source not in self._options.prefix_peers:
            raise PermissionDenied(f"source: {source[:128]!r} is not one of this server's prefix_peers")
        if self._files.has_changed():
            replaced, self._connections = self._connections, {}
            for connection in replaced.values():
                connection.is_replaced = True
                if not connection.num_calls:
                    await connection.channel.close()
        if source not in self._connections:
            self._connections[source] = _PeerConnection(open_channel(aio, source, self._tls))
        return self._connections[source]

    async def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            await connection.channel.close()


_STALL_S = 30.0
"""Timeout of a write; a reader that takes longer counts as disconnected."""
_HANDED_ON = ("authorization", "x-jpaged-tenant")
"""Credentials of a call that are forwarded to another server."""


class PrefixServicer(prefixes_pb2_grpc.PrefixServiceServicer):
    """jpaged.v1.PrefixService."""

    def __init__(self, travelling: PrefixTransferService) -> None:
        self._travelling = travelling

    async def SavePrefix(self, request: prefixes_pb2.SavePrefixRequest, context: ServicerContext) -> None:
        """Stream a prefix; its blocks are released however the call ends."""
        async with status_on_error(context):
            prefix = _prefix_from(request, context)
            async with aclosing(self._travelling.save(prefix, request.num_known_tokens)) as parts:
                async for part in parts:
                    await _write(context, build_response(part))

    async def LoadPrefix(
        self, requests: AsyncIterator[prefixes_pb2.LoadPrefixRequest], context: ServicerContext
    ) -> prefixes_pb2.LoadPrefixResponse:
        """Import a prefix, message by message."""
        async with status_on_error(context), aclosing(_parts(requests)) as parts:
            arrival = await self._travelling.load(parts, get_tenant(context))
            return prefixes_pb2.LoadPrefixResponse(arrival=build_arrival(arrival))

    async def FetchPrefix(
        self, request: prefixes_pb2.FetchPrefixRequest, context: ServicerContext
    ) -> prefixes_pb2.FetchPrefixResponse:
        """Import a prefix that another server saves, using the caller's credentials."""
        async with status_on_error(context):
            arrival = await self._travelling.fetch(request.source, _prefix_from(request, context))
            return prefixes_pb2.FetchPrefixResponse(arrival=build_arrival(arrival))


def _prefix_from(
    request: prefixes_pb2.SavePrefixRequest | prefixes_pb2.FetchPrefixRequest, context: ServicerContext
) -> Prefix:
    headers = tuple(
        (name, value)
        for name, value in context.invocation_metadata() or ()
        if name in _HANDED_ON and isinstance(value, str)
    )
    return Prefix(
        prompt=prompt_from(request),
        cache_salt=request.cache_salt,
        tenant=get_tenant(context),
        adapter=request.adapter,
        headers=headers,
    )


async def _parts(
    requests: AsyncIterator[prefixes_pb2.LoadPrefixRequest],
) -> AsyncGenerator[TransferHeader | Sequence[BlockPiece]]:
    async for request in requests:
        yield part_from(request)


async def _write(context: ServicerContext, message: Message) -> None:
    try:
        await asyncio.wait_for(context.write(message), _STALL_S)
    except TimeoutError:
        raise DeadlineExceeded(f"the receiver has read nothing of the prefix for {_STALL_S:g} s") from None
