"""The servers that this one may fetch prefixes from: only those that its options name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from grpc import aio

from jpaged._proto.v1 import inference_pb2, prefixes_pb2, prefixes_pb2_grpc
from jpaged.access.watching import FileWatch
from jpaged.client.channel import require_target
from jpaged.client.failures import translated
from jpaged.client.tls import Tls, open_channel
from jpaged.config import AccessOptions
from jpaged.errors import PermissionDenied
from jpaged.server.travel.wire import part_from
from jpaged.service.kv_protocol import Header, Piece
from jpaged.service.kv_transfer import Prefix


@dataclass(slots=True)
class _Connection:
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
        self._connections: dict[str, _Connection] = {}

    async def save(
        self, source: str, prefix: Prefix, num_known_tokens: int
    ) -> AsyncGenerator[Header | Sequence[Piece]]:
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

    async def _connection(self, source: str) -> _Connection:
        if source not in self._options.prefix_peers:
            raise PermissionDenied(f"source: {source[:128]!r} is not one of this server's prefix_peers")
        if self._files.has_changed():
            replaced, self._connections = self._connections, {}
            for connection in replaced.values():
                connection.is_replaced = True
                if not connection.num_calls:
                    await connection.channel.close()
        if source not in self._connections:
            self._connections[source] = _Connection(open_channel(aio, source, self._tls))
        return self._connections[source]

    async def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            await connection.channel.close()
