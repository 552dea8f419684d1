"""Save a prefix, load one, and fetch one from another server: what becomes of them between a face and the engine.

    save    engine holds ──> bytes copied and hashed on a thread ──> header, pieces
    load    header, pieces ──> checked and written on a thread ──> engine makes them known
    fetch   load of what another server saves

A few travel at one time; whoever goes away, or does not go on for _STALL_S or at a crawl, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from jpaged.engine.kv.blocks import Key, root_key
from jpaged.engine.kv.tiers.arriving import Arriving
from jpaged.engine.kv.tiers.chain import Chain
from jpaged.engine.kv.tiers.leaving import Leaving
from jpaged.errors import DeadlineExceeded, InternalError, InvalidArgument, QueueFull, Unavailable, Unsupported
from jpaged.service.loaded_model import LoadedModel
from jpaged.service.names import require_salt
from jpaged.service.prefixes.likeness import header_of, require_alike
from jpaged.service.prefixes.parts import MAX_MESSAGE_BYTES, Arrival, Header, Piece, cut
from jpaged.service.prefixes.receiving import Receiving
from jpaged.service.service import Service, cache_tenant_of
from jpaged.types import Prompt

_T = TypeVar("_T")
Parts = AsyncIterator[Header | Sequence[Piece]]

MAX_TRAVELLING = 8
"""Prefixes that come and go at one time: each holds host memory."""
_STALL_S = 30.0
_LEAST_BYTES_PER_S = 64 << 10
"""What comes slower than that for _STALL_S has stalled, too."""
_LOOK_S = 0.1
"""How often who waits for the engine looks whether there still is one."""
_RETRY_S = 1.0
_NUM_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What is saved or fetched.

    Attributes:
        tenant: whose it is.
        adapter: the name of an adapter; "" is none.
        headers: what its caller was let in with, for a server that is asked in its name.
    """

    prompt: Prompt
    cache_salt: str = ""
    tenant: str = ""
    adapter: str = ""
    headers: tuple[tuple[str, str], ...] = ()


class Peers(Protocol):
    """Other servers."""

    def save(self, source: str, prefix: Prefix, num_known_tokens: int) -> AsyncGenerator[Header | Sequence[Piece]]:
        """What a server saves of a prefix whose prompt is token ids.

        Raises:
            PermissionDenied: it is none that this server may connect to.
            JpagedError: what it answered.
        """
        ...


class Travelling:
    """The verbs of prefixes that travel. Lives on the event loop of its service.

    Args:
        peers: whom `fetch` asks.
    """

    def __init__(self, service: Service, peers: Peers) -> None:
        self._service = service
        self._peers = peers
        self._num_open = 0
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "jpaged-prefixes")

    async def save(self, prefix: Prefix, num_known_tokens: int = 0) -> AsyncGenerator[Header | Sequence[Piece]]:
        """What is cached of a prefix, held while it is read; closing the iterator lets it go.

        Args:
            num_known_tokens: at its beginning, that need not come.

        Raises:
            Unsupported: prefixes cannot travel here.
            QueueFull: too many do.
        """
        model = self._service.controlled("SavePrefix", prefix.cache_salt, self._service.state.serving())
        with self._counted():
            chain, keys = await self._chains(model, prefix)
            travels = model.engine.travels
            identity = await self._run(travels.kv_identity)
            arriving, num_known = travels.arrive(chain), num_known_tokens // travels.block_size
            try:
                num_found = await self._bring_from_disk(model, arriving, num_known)
                leaving = await self._left(model, travels.leave(chain, num_known))
            finally:
                self._threads.submit(arriving.close)
            num_found = max(num_found, leaving.num_found)
            try:
                yield header_of(model, prefix.cache_salt, prefix.adapter, chain, leaving, num_found, identity)
                for part in range(leaving.num_parts):
                    await _told(model, leaving.when_there(part))
                    for pieces in await self._run(functools.partial(cut, leaving, part, keys)):
                        yield pieces
            finally:
                self._threads.submit(leaving.close)

    async def _bring_from_disk(self, model: LoadedModel, arriving: Arriving, num_skipped: int) -> int:
        """Bring to host memory what disk alone has of a prefix, as far as there is room; how many blocks there are."""
        num_found, places = await self._run(lambda: arriving.on_disk(num_skipped))
        while places:
            homes = await _told(model, arriving.reserve(min(len(places), arriving.num_blocks_at_once)))
            some, places = places[: len(homes)], places[len(homes) :]
            if not homes or await self._run(functools.partial(arriving.read, some, homes)) < len(some):
                break
        await _told(model, arriving.num_known())  # the replica that has most of it is looked for next
        return num_found

    async def load(self, parts: Parts, tenant: str = "") -> Arrival:
        """Take a prefix in that somebody brings, for a tenant.

        Raises:
            Unsupported: prefixes cannot travel here, or messages as large as theirs are refused.
            QueueFull: too many do.
            Incompatible: a block means something else here.
            InvalidArgument: a part is not what it has to be; what came before it is kept.
            DeadlineExceeded: nothing came for too long.
        """
        model = self._service.controlled("LoadPrefix", "", self._service.state.serving())
        max_size = model.config.server.max_request_size
        if max_size * 2**20 < MAX_MESSAGE_BYTES:
            why = f"max_request_size is {max_size:g} MiB; messages of prefixes have {MAX_MESSAGE_BYTES / 2**20:g}"
            raise Unsupported(f"prefixes cannot be loaded: {why}")
        with self._counted():
            return await self._take(model, await _header_of(parts), parts, tenant)

    async def fetch(self, source: str, prefix: Prefix) -> Arrival:
        """Have another server save a prefix, and take it in; raises what both may."""
        model = self._service.controlled("FetchPrefix", source, self._service.state.serving())
        return await self.pull(model, source, prefix)

    async def pull(self, model: LoadedModel, source: str, prefix: Prefix) -> Arrival:
        """Fetch a prefix for a call that may have it: nobody's role is asked for here."""
        with self._counted():
            chain, _ = await self._chains(model, prefix)
            travels = model.engine.travels
            size, num_known = travels.block_size, await self._run(lambda: travels.num_findable(chain))
            if num_known == len(chain.keys):
                return Arrival(num_known * size, num_known * size, 0, num_known * travels.num_kv_groups)
            asked = Prefix(
                prompt=Prompt(token_ids=chain.token_ids),
                cache_salt=prefix.cache_salt,
                tenant=prefix.tenant,
                adapter=prefix.adapter,
                headers=prefix.headers,
            )
            async with contextlib.aclosing(self._peers.save(source, asked, num_known * size)) as parts:
                header = await _header_of(parts)
                wanted = chain.token_ids[: len(header.token_ids)], prefix.cache_salt, prefix.adapter
                if (header.token_ids, header.cache_salt, header.adapter) != wanted:
                    raise InternalError(f"{source} answered with another prefix than it was asked for")
                return await self._take(model, header, parts, prefix.tenant)

    async def _take(self, model: LoadedModel, header: Header, parts: Parts, tenant: str) -> Arrival:
        prefix = Prefix(
            prompt=Prompt(token_ids=header.token_ids),
            cache_salt=header.cache_salt,
            tenant=tenant,
            adapter=header.adapter,
        )
        chain, keys = await self._chains(model, prefix)
        identity = await self._run(model.engine.travels.kv_identity)
        require_alike(model, header, chain, identity)
        arriving = model.engine.travels.arrive(chain)
        receiving, pace = Receiving(arriving, header.num_blocks, keys), _Pace()
        try:
            while not receiving.is_full and (pieces := await pace.next(parts)) is not None:
                if isinstance(pieces, Header):
                    raise InvalidArgument("header", "comes again behind the first message")
                await self._make_room(model, arriving, receiving, pieces)
                await self._run(functools.partial(receiving.take, pieces))
            receiving.finish()
        finally:
            closed = self._threads.submit(arriving.close)
        num_blocks = await _told(model, await asyncio.shield(asyncio.wrap_future(closed)))
        num_blocks = max(num_blocks, await self._run(lambda: model.engine.travels.num_findable(chain)))
        return Arrival(
            num_tokens=num_blocks * header.block_size,
            num_found_tokens=header.num_found_tokens,
            num_loaded_blocks=receiving.num_blocks - receiving.num_known,
            num_known_blocks=receiving.num_known,
            is_short_of_room=receiving.is_full,
        )

    async def _make_room(
        self, model: LoadedModel, arriving: Arriving, receiving: Receiving, pieces: Sequence[Piece]
    ) -> None:
        """Reserve host blocks for those that begin in these pieces; some more, as further ones will come."""
        while (num_missing := receiving.num_missing(pieces)) > 0:
            num_blocks = max(num_missing, min(arriving.num_blocks_at_once, receiving.num_to_come))
            homes = await _told(model, arriving.reserve(num_blocks))
            receiving.give(homes)
            if not homes:
                return

    async def _chains(self, model: LoadedModel, prefix: Prefix) -> tuple[Chain, Sequence[Key]]:
        """The blocks of a prefix as they are known here, and their keys on the way."""
        require_salt(prefix.cache_salt)
        adapter = model.adapters.named(prefix.adapter)
        digest = b"" if adapter is None else adapter.matrices.digest
        tenant, travels = cache_tenant_of(model, prefix.tenant), model.engine.travels

        def make() -> tuple[Chain, Sequence[Key]]:
            token_ids = model.input_processor.prefix(prefix.prompt)
            chain = travels.chain(root_key(prefix.cache_salt, tenant, digest), token_ids)
            bare = Chain.of(root_key(prefix.cache_salt, "", digest), chain.token_ids, travels.block_size)
            return chain, bare.keys

        return await self._service.work(make, prefix.prompt.size or 0)

    async def _left(self, model: LoadedModel, future: Future[Leaving]) -> Leaving:
        """Wait for what is held; nobody who goes away meanwhile leaves it so."""
        try:
            return await _told(model, future)
        except BaseException:
            future.add_done_callback(lambda done: None if done.exception() else done.result().close())
            raise

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        if self._num_open >= MAX_TRAVELLING:
            what = f"{self._num_open} prefixes are on their way, the limit is {MAX_TRAVELLING}"
            raise QueueFull(what, retry_after_s=_RETRY_S)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1


async def _told(model: LoadedModel, future: Future[_T]) -> _T:
    """Wait for the engine, unless it has failed."""
    clock = asyncio.get_running_loop().time
    until_s, told = clock() + _STALL_S, asyncio.wrap_future(future)
    try:
        while not (await asyncio.wait([told], timeout=_LOOK_S))[0]:
            if model.engine.failure is not None:
                raise Unavailable("the engine has failed")
            if clock() >= until_s:
                raise Unavailable(f"the engine did not come to it in {_STALL_S:g} s")
        return told.result()
    finally:
        told.cancel()


class _Pace:
    """How long a sender is waited for: no longer than for one that sends the least that is borne."""

    def __init__(self) -> None:
        self._left_s = _STALL_S

    async def next(self, parts: Parts) -> Header | Sequence[Piece] | None:
        """Wait for what comes next; None is the end."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            part = await asyncio.wait_for(anext(parts, None), self._left_s)
        except TimeoutError:
            least = f"less than {_LEAST_BYTES_PER_S >> 10} KiB a second"
            raise DeadlineExceeded(f"nothing of the prefix came for {_STALL_S:g} s, or {least}") from None
        num_bytes = 0 if part is None or isinstance(part, Header) else sum(len(piece.contents) for piece in part)
        left_s = self._left_s - (clock() - began_s) + num_bytes / _LEAST_BYTES_PER_S
        self._left_s = min(_STALL_S, left_s)
        return part


async def _header_of(parts: Parts) -> Header:
    header = await _Pace().next(parts)
    if not isinstance(header, Header):
        raise InvalidArgument("header", "is missing from the first message")
    return header
