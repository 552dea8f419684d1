"""The servers that this one fetches prefixes from: those that its options name, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from grpc import aio

from jpaged._proto.v1 import inference_pb2, prefixes_pb2, prefixes_pb2_grpc
from jpaged.access.watching import FileWatch
from jpaged.client.channel import require_target
from jpaged.client.failures import translated
from jpaged.client.tls import Tls, open_channel
from jpaged.config import AccessOptions
from jpaged.errors import PermissionDenied
from jpaged.server.travel.wire import part_from
from jpaged.service.prefixes.parts import Header, Piece
from jpaged.service.prefixes.travelling import Prefix

_GRACE_S: Final = 600.0
"""What is on its way over a connection that is replaced has so long."""


class PeerServers:
    """Implements `jpaged.service.prefixes.travelling.Peers` over gRPC; a connection each, made when it is first used.

    Certificates that have changed are shown and believed from the next call on; those before it go on as they began.

    Raises:
        InvalidArgument: a name of a server is none.
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
        self._channels: dict[str, aio.Channel] = {}
        self._ending = set[asyncio.Task[None]]()

    async def save(
        self, source: str, prefix: Prefix, num_known_tokens: int
    ) -> AsyncGenerator[Header | Sequence[Piece]]:
        """What a peer saves; closing the iterator ends the call."""
        request = prefixes_pb2.SavePrefixRequest(
            token_ids=inference_pb2.TokenIds(ids=prefix.prompt.token_ids or ()),
            cache_salt=prefix.cache_salt,
            adapter=prefix.adapter,
            num_known_tokens=num_known_tokens,
        )
        stub = prefixes_pb2_grpc.PrefixServiceStub(self._channel(source))
        call = stub.SavePrefix(request, metadata=prefix.headers)
        try:
            async for message in call:
                yield part_from(message)
        except aio.AioRpcError as error:
            raise translated(error) from error
        finally:
            call.cancel()

    def _channel(self, source: str) -> aio.Channel:
        if source not in self._options.prefix_peers:
            raise PermissionDenied(f"source: {source[:128]!r} is not one of this server's prefix_peers")
        if self._files.has_changed():
            for channel in self._channels.values():
                ending = asyncio.get_running_loop().create_task(channel.close(_GRACE_S))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
            self._channels.clear()
        if source not in self._channels:
            self._channels[source] = open_channel(aio, source, self._tls)
        return self._channels[source]

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            await channel.close()
        for ending in self._ending:
            ending.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
