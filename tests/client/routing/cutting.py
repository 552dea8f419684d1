"""A wire between clients and a server that can be cut at any byte, as a server that is killed cuts it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_CHUNK = 512


class Wire:
    """Passes bytes on, both ways, of any number of connections.

    Attributes:
        port: of this side of it.
        num_cuts: connections that were cut.
        num_refused: those that nobody took while it was down.
    """

    def __init__(self, server_port: int, next_cut: Callable[[], int | None]) -> None:
        self.port = 0
        self.num_cuts = self.num_refused = 0
        self._server_port = server_port
        self._next_cut = next_cut
        self._is_down = False
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries one connection until either side ends, or it is cut after so many bytes of the server's."""
        if self._is_down:
            self.num_refused += 1
            writer.transport.abort()
            return
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        mine = {writer, to_server}
        self._writers |= mine
        left = self._next_cut()

        async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, limit: int | None) -> None:
            while data := await source.read(_CHUNK if limit is None else min(_CHUNK, limit)):
                sink.write(data)
                await sink.drain()
                if limit is not None and (limit := limit - len(data)) <= 0:
                    self.num_cuts += 1
                    return

        ways = [
            asyncio.ensure_future(carry(reader, to_server, None)),
            asyncio.ensure_future(carry(from_server, writer, left)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in mine:
                one.transport.abort()
            await asyncio.gather(*ways, return_exceptions=True)
            self._writers -= mine

    def kill(self) -> None:
        """Cuts all that there is, and lets nobody in any more."""
        self._is_down = True
        for writer in set(self._writers):
            writer.transport.abort()

    def restart(self) -> None:
        """Lets connections in again."""
        self._is_down = False


@asynccontextmanager
async def wire(server_port: int, next_cut: Callable[[], int | None] = lambda: None) -> AsyncIterator[Wire]:
    """A wire to a server.

    Args:
        next_cut: bytes of the server's after which the next connection is cut; None is never.
    """
    one = Wire(server_port, next_cut)
    listening = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.port = listening.sockets[0].getsockname()[1]
    try:
        yield one
    finally:
        one.kill()
        listening.close()
