"""Saves, loads and fetches prefixes: the operations between a frontend and the engine.

    save    engine holds ──> bytes copied and hashed on a thread ──> header, pieces
    load    header, pieces ──> checked and written on a thread ──> inserted into the prefix cache
    fetch   load of a prefix that another server saves

Few transfers run concurrently. If a peer disconnects, stalls for _STALL_S or is too slow, all resources are released.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from jpaged.engine.kv_cache.blocks import BlockHash, root_block_hash
from jpaged.engine.kv_cache.offload.transfer import BlockHashChain, PrefixExport, PrefixImport
from jpaged.errors import DeadlineExceeded, InternalError, InvalidArgument, QueueFull, Unavailable, Unsupported
from jpaged.service.calls import require_salt
from jpaged.service.kv_protocol import (
    MAX_MESSAGE_BYTES,
    BlockPiece,
    ImportResult,
    Receiving,
    TransferHeader,
    check_compatible,
    cut,
    get_header,
)
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.service import Service, get_cache_tenant
from jpaged.types import Prompt
from jpaged.version import alias_names

_T = TypeVar("_T")
Parts = AsyncIterator[TransferHeader | Sequence[BlockPiece]]

MAX_TRAVELLING = 8
"""Maximum number of concurrent transfers; each holds host memory."""
_STALL_S = 30.0
_LEAST_BYTES_PER_S = 64 << 10
"""A sender that is slower than this for _STALL_S counts as stalled too."""
_LOOK_S = 0.1
"""Interval at which a caller that waits for the engine checks that the engine is alive."""
_RETRY_S = 1.0
_NUM_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A prefix to save or fetch.

    Attributes:
        tenant: owner of the prefix.
        adapter: name of an adapter; "" for none.
        headers: the caller's credentials, forwarded to the other server.
    """

    prompt: Prompt
    cache_salt: str = ""
    tenant: str = ""
    adapter: str = ""
    headers: tuple[tuple[str, str], ...] = ()


class Peers(Protocol):
    """Other servers."""

    def save(
        self, source: str, prefix: Prefix, num_known_tokens: int
    ) -> AsyncGenerator[TransferHeader | Sequence[BlockPiece]]:
        """Yield the header and pieces of a prefix that another server saves. Its prompt must be token ids.

        Raises:
            PermissionDenied: this server may not connect to the source.
            JpagedError: the source's error.
        """
        ...


class PrefixTransferService:
    """Operations of prefix transfer. Bound to the service's event loop.

    Args:
        peers: the servers that `fetch` may call.
    """

    def __init__(self, service: Service, peers: Peers) -> None:
        self._service = service
        self._peers = peers
        self._num_open = 0
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "jpaged-prefixes")

    async def save(
        self, prefix: Prefix, num_known_tokens: int = 0
    ) -> AsyncGenerator[TransferHeader | Sequence[BlockPiece]]:
        """Yield the cached part of a prefix. Its blocks stay referenced until the iterator is closed.

        Args:
            num_known_tokens: leading tokens whose blocks need not be sent.

        Raises:
            Unsupported: this server cannot transfer prefixes.
            QueueFull: too many transfers run.
        """
        model = self._service.controlled("SavePrefix", prefix.cache_salt, self._service.state.serving())
        with self._counted():
            chain, keys = await self._chains(model, prefix)
            transfer = model.engine.kv_transfer
            identity = await self._run(transfer.kv_identity)
            arriving, num_known = transfer.arrive(chain), num_known_tokens // transfer.block_size
            try:
                num_found = await self._load_from_connectors(model, arriving, num_known)
                leaving = await self._left(model, transfer.leave(chain, num_known))
            finally:
                self._threads.submit(arriving.close)
            num_found = max(num_found, leaving.num_found)
            try:
                yield get_header(model, prefix.cache_salt, prefix.adapter, chain, leaving, num_found, identity)
                for part in range(leaving.num_parts):
                    await _wait_for_engine(model, leaving.when_there(part))
                    for pieces in await self._run(functools.partial(cut, leaving, part, keys)):
                        yield pieces
            finally:
                self._threads.submit(leaving.close)

    async def _load_from_connectors(self, model: LoadedModel, arriving: PrefixImport, num_skipped: int) -> int:
        """Load blocks that only connectors have to host memory, if there is room; return the number of blocks found."""
        num_found, places = await self._run(lambda: arriving.lookup(num_skipped))
        while places:
            homes = await _wait_for_engine(model, arriving.reserve(min(len(places), arriving.num_blocks_at_once)))
            some, places = places[: len(homes)], places[len(homes) :]
            if not homes or await self._run(functools.partial(arriving.read, some, homes)) < len(some):
                break
        await _wait_for_engine(model, arriving.num_known())  # find the replica that has most of the prefix next
        return num_found

    async def load(self, parts: Parts, tenant: str = "") -> ImportResult:
        """Import a prefix for a tenant.

        Raises:
            Unsupported: this server cannot transfer prefixes, or refuses messages of their size.
            QueueFull: too many transfers run.
            Incompatible: the blocks are incompatible with this server's.
            InvalidArgument: a part is invalid; blocks received before it are kept.
            DeadlineExceeded: the sender stalled.
        """
        model = self._service.controlled("LoadPrefix", "", self._service.state.serving())
        max_size = model.config.server.max_request_size
        if max_size * 2**20 < MAX_MESSAGE_BYTES:
            why = f"max_request_size is {max_size:g} MiB; prefix messages have up to {MAX_MESSAGE_BYTES / 2**20:g}"
            raise Unsupported(f"prefixes cannot be loaded: {why}")
        with self._counted():
            return await self._take(model, await _get_header(parts), parts, tenant)

    async def fetch(self, source: str, prefix: Prefix) -> ImportResult:
        """Fetch a prefix from another server, which saves it, and import it; raise what both may raise."""
        model = self._service.controlled("FetchPrefix", source, self._service.state.serving())
        return await self.pull(model, source, prefix)

    async def pull(self, model: LoadedModel, source: str, prefix: Prefix) -> ImportResult:
        """Fetch a prefix for a call that is already authorized; no role is checked here."""
        with self._counted():
            chain, _ = await self._chains(model, prefix)
            transfer = model.engine.kv_transfer
            size, num_known = transfer.block_size, await self._run(lambda: transfer.num_findable(chain))
            if num_known == len(chain.keys):
                return ImportResult(num_known * size, num_known * size, 0, num_known * transfer.num_kv_groups)
            asked = Prefix(
                prompt=Prompt(token_ids=chain.token_ids),
                cache_salt=prefix.cache_salt,
                tenant=prefix.tenant,
                adapter=prefix.adapter,
                headers=prefix.headers,
            )
            async with contextlib.aclosing(self._peers.save(source, asked, num_known * size)) as parts:
                header = await _get_header(parts)
                wanted = chain.token_ids[: len(header.token_ids)], prefix.cache_salt, prefix.adapter
                if (header.token_ids, header.cache_salt, header.adapter) != wanted:
                    raise InternalError(f"{source} returned a different prefix than requested")
                return await self._take(model, header, parts, prefix.tenant)

    async def _take(self, model: LoadedModel, header: TransferHeader, parts: Parts, tenant: str) -> ImportResult:
        prefix = Prefix(
            prompt=Prompt(token_ids=header.token_ids),
            cache_salt=header.cache_salt,
            tenant=tenant,
            adapter=header.adapter,
        )
        chain, keys = await self._chains(model, prefix)
        identity = await self._run(model.engine.kv_transfer.kv_identity)
        check_compatible(model, header, chain, identity)
        arriving = model.engine.kv_transfer.arrive(chain)
        receiving, pace = Receiving(arriving, header.num_blocks, keys), _Pace()
        try:
            while not receiving.is_full and (pieces := await pace.next(parts)) is not None:
                if isinstance(pieces, TransferHeader):
                    raise InvalidArgument("header", "may only be in the first message")
                await self._make_room(model, arriving, receiving, pieces)
                await self._run(functools.partial(receiving.take, pieces))
            receiving.finish()
        finally:
            closed = self._threads.submit(arriving.close)
        num_blocks = await _wait_for_engine(model, await asyncio.shield(asyncio.wrap_future(closed)))
        num_blocks = max(num_blocks, await self._run(lambda: model.engine.kv_transfer.num_findable(chain)))
        return ImportResult(
            num_tokens=num_blocks * header.block_size,
            num_found_tokens=header.num_found_tokens,
            num_loaded_blocks=receiving.num_blocks - receiving.num_known,
            num_known_blocks=receiving.num_known,
            is_short_of_room=receiving.is_full,
        )

    async def _make_room(
        self, model: LoadedModel, arriving: PrefixImport, receiving: Receiving, pieces: Sequence[BlockPiece]
    ) -> None:
        """Reserve host blocks for the blocks that begin in these pieces, and some more for later ones."""
        while (num_missing := receiving.num_missing(pieces)) > 0:
            num_blocks = max(num_missing, min(arriving.num_blocks_at_once, receiving.num_to_come))
            homes = await _wait_for_engine(model, arriving.reserve(num_blocks))
            receiving.give(homes)
            if not homes:
                return

    async def _chains(self, model: LoadedModel, prefix: Prefix) -> tuple[BlockHashChain, Sequence[BlockHash]]:
        """Return the blocks of a prefix by this server's keys, and their keys as sent in messages."""
        require_salt(prefix.cache_salt)
        adapter = model.adapters.named(prefix.adapter)
        digest = b"" if adapter is None else adapter.digest
        tenant, transfer = get_cache_tenant(model, prefix.tenant), model.engine.kv_transfer

        def make() -> tuple[BlockHashChain, Sequence[BlockHash]]:
            token_ids = model.input_processor.prefix(prefix.prompt)
            root = root_block_hash(prefix.cache_salt, tenant, digest, transfer.weights)
            chain = transfer.chain(root, token_ids)
            bare = BlockHashChain.of(
                root_block_hash(prefix.cache_salt, "", digest), chain.token_ids, transfer.block_size
            )
            return chain, bare.keys

        return await self._service.run_blocking(make, prefix.prompt.size or 0)

    async def _left(self, model: LoadedModel, future: Future[PrefixExport]) -> PrefixExport:
        """Wait for the held blocks; if the caller is cancelled, release them when they arrive."""
        try:
            return await _wait_for_engine(model, future)
        except BaseException:
            future.add_done_callback(lambda done: None if done.exception() else done.result().close())
            raise

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        if self._num_open >= MAX_TRAVELLING:
            what = f"{self._num_open} prefix transfers are in progress, the limit is {MAX_TRAVELLING}"
            raise QueueFull(what, retry_after_s=_RETRY_S)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1


async def _wait_for_engine(model: LoadedModel, future: Future[_T]) -> _T:
    """Wait for the engine's result; raise Unavailable if the engine has failed or stalls."""
    clock = asyncio.get_running_loop().time
    until_s, told = clock() + _STALL_S, asyncio.wrap_future(future)
    try:
        while not (await asyncio.wait([told], timeout=_LOOK_S))[0]:
            if model.engine.failure is not None:
                raise Unavailable("the engine has failed")
            if clock() >= until_s:
                raise Unavailable(f"the engine did not respond within {_STALL_S:g} s")
        return told.result()
    finally:
        told.cancel()


class _Pace:
    """Timeout of a sender: enforces a minimum rate."""

    def __init__(self) -> None:
        self._left_s = _STALL_S

    async def next(self, parts: Parts) -> TransferHeader | Sequence[BlockPiece] | None:
        """Wait for the next part; return None at the end."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            part = await asyncio.wait_for(anext(parts, None), self._left_s)
        except TimeoutError:
            least = f"less than {_LEAST_BYTES_PER_S >> 10} KiB per second"
            raise DeadlineExceeded(f"no part of the prefix arrived for {_STALL_S:g} s, or {least}") from None
        num_bytes = (
            0 if part is None or isinstance(part, TransferHeader) else sum(len(piece.contents) for piece in part)
        )
        left_s = self._left_s - (clock() - began_s) + num_bytes / _LEAST_BYTES_PER_S
        self._left_s = min(_STALL_S, left_s)
        return part


async def _get_header(parts: Parts) -> TransferHeader:
    header = await _Pace().next(parts)
    if not isinstance(header, TransferHeader):
        raise InvalidArgument("header", "is missing from the first message")
    return header


_FORMER_NAMES = {
    "Travelling": "PrefixTransferService",
}
"""Public names of the previous release. They go with the next one."""

if not TYPE_CHECKING:
    __getattr__ = alias_names(__name__, _FORMER_NAMES)
