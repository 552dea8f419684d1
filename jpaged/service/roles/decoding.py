"""The decode role: prefill servers compute long prompts, and requests continue here after their first token.

    ask ──> first tokens ──> sent to the client at once
    │                  └──> blocks ──> host memory ──> the engine, which finds them like any cached prefix
    └── concurrently, host memory is reserved
    on any failure      the engine computes what is missing: the same tokens, later

A request has its slot among those in flight from the beginning, so that none is refused after its first token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from jpaged.config import RoleOptions
from jpaged.engine.kv.blocks import root_key
from jpaged.engine.kv.tiers.leaving import Arriving, Travels
from jpaged.errors import DeadlineExceeded, InternalError, JpagedError
from jpaged.service.prefixes.receiving import Receiving
from jpaged.service.roles.answers import PrefillAnswer, PrefillServers
from jpaged.service.roles.first_tokens import Begun, begun
from jpaged.service.roles.ready import identity_of
from jpaged.service.roles.role import AskedPrefill, Generation
from jpaged.service.roles.rule import why_here
from jpaged.service.workers import Workers
from jpaged.types import OutputEvent, Request, RequestTimes

if TYPE_CHECKING:
    from jpaged.engine.sequence import Sink
    from jpaged.service.loaded_model import LoadedModel

_BIG = 1 << 62
"""A work size that always runs on a thread."""


class DecodeRole:
    """Sends prompts to prefill servers.

    Args:
        servers: the prefill servers.
    """

    def __init__(self, options: RoleOptions, servers: PrefillServers) -> None:
        self._options = options
        self._servers = servers
        self._identity = b""
        self._workers = Workers()
        self._arrivings: dict[str, Arriving] = {}
        # By engine id, for requests with a reserved slot that the engine has not received: the rest of the request
        # (None if
        # nothing is left) and its callback.
        self._left: dict[str, tuple[Request | None, Sink]] = {}

    async def prepare(self, model: LoadedModel) -> None:
        """Compute the KV fingerprint of this server."""
        self._identity = await identity_of(model)

    def begin(self, model: LoadedModel, request: Request, generation: Generation, asked: AskedPrefill | None) -> None:
        """Submit a request to the engine, or start its remote prefill in a new task."""
        if asked is not None:
            raise InternalError("a decode server received a remote prefill request")
        reason = why_here(request, self._options.prefill_min_tokens)
        if reason is not None:
            model.role_counts.here(reason)
            model.engine.submit(request, generation.stream.put)
            return
        travels = model.engine.keep_place(request)
        self._left[generation.engine_id] = request, generation.stream.put
        generation.goes_on_by(asyncio.create_task(self._run(model, travels, request, generation)))

    def end(self, model: LoadedModel, generation: Generation) -> None:
        """Stop the request's task and transfer; the service then makes the engine drop it if it has not ended."""
        generation.goes_on_by(None)
        self._let_go(generation)
        self._left.pop(generation.engine_id, None)

    def hurry(self, model: LoadedModel, generation: Generation) -> bool:
        """Submit the rest of a request to the engine now, without waiting for its transfer."""
        if generation.engine_id not in self._left:
            return False
        generation.goes_on_by(None)
        self._hand_over(model, generation.engine_id)
        return True

    def _hand_over(self, model: LoadedModel, engine_id: str) -> None:
        left, sink = self._left.pop(engine_id)
        if left is None:
            model.engine.drop(engine_id)
        else:
            model.engine.submit(left, sink)

    def _let_go(self, generation: Generation) -> None:
        """Stop writing blocks for a request."""
        arriving = self._arrivings.pop(generation.engine_id, None)
        if arriving is not None:
            arriving.close()

    async def _run(self, model: LoadedModel, travels: Travels, request: Request, generation: Generation) -> None:
        try:
            await self._begin_elsewhere(model, travels, request, generation)
            self._hand_over(model, generation.engine_id)
        except JpagedError as error:
            generation.end(error=error)
        except Exception as error:  # the reader must receive the error
            generation.end(error=InternalError(f"{type(error).__name__}: {error}"))
            raise
        finally:
            generation.goes_on_by(None, is_done=True)

    async def _begin_elsewhere(
        self, model: LoadedModel, travels: Travels, request: Request, generation: Generation
    ) -> None:
        """Run the remote prefill of a request as far as it succeeds; `_left` holds the rest of the request."""
        counts, size = model.role_counts, len(request.prompt_token_ids)
        coming = await self._workers.run(lambda: _Coming.of(travels, request), size)
        if size - coming.num_known * travels.block_size < self._options.prefill_min_tokens:
            counts.here("cached")
            return
        began_s, clock = model.engine.clock(), model.engine.clock
        counts.add(num_asked=1)
        arriving = self._arrivings[generation.engine_id] = coming.arriving
        homes = arriving.reserve(coming.num_missing, is_early=True)  # while waiting for the first token
        try:
            answer = await self._ask(request, coming.num_known, began_s)
        except (JpagedError, TimeoutError) as error:
            counts.failed("prefill", error)
            self._let_go(generation)
            return
        try:
            try:
                behind = await self._tell(model, request, answer, generation, began_s)
            except InternalError as error:
                counts.failed("prefill", error)
                self._let_go(generation)
                return
            first_s = clock()
            rest = _Rest(arriving, began_s, first_s, answer.num_cached_tokens, generation.stream.put)
            self._left[generation.engine_id] = behind.request, rest.pass_on
            counts.add(prefill_wait_s=first_s - began_s)
            if behind.request is not None:
                until_s = first_s + self._options.transfer_timeout
                until_s = until_s if request.deadline_s is None else min(until_s, request.deadline_s)
                await self._fetch(model, coming, await _whole(coming, homes), answer, until_s - clock())
                counts.add(transfer_wait_s=clock() - first_s)
        finally:
            answer.close()

    async def _ask(self, request: Request, num_known: int, now_s: float) -> PrefillAnswer:
        options = self._options
        wait_s = options.prefill_timeout
        if request.deadline_s is not None:
            wait_s = min(wait_s, request.deadline_s - now_s)
        if wait_s <= 0:
            raise DeadlineExceeded("no time is left to ask a prefill server")
        whole_s = wait_s + options.transfer_timeout
        return await self._servers.ask(request, num_known, self._identity, wait_s, whole_s)

    async def _tell(
        self, model: LoadedModel, request: Request, answer: PrefillAnswer, generation: Generation, began_s: float
    ) -> Begun:
        """Emit the first tokens. If they cannot be the request's, raise InternalError before emitting any."""
        eos, vocab_size = model.input_processor.eos_token_ids, model.engine.geometry.vocab_size

        def work() -> Begun:
            tokens = answer.tokens
            return begun(request, tokens, answer.num_cached_tokens, model.tokenizer, eos, vocab_size)

        behind = await self._workers.run(work, len(request.prompt_token_ids))
        *others, last = behind.events
        if behind.request is None:  # the engine emits no event for it, so the times are set here
            now_s = model.engine.clock()
            last = dataclasses.replace(last, times=RequestTimes(began_s, began_s, now_s, now_s))
        for event in (*others, last):
            generation.stream.put(event)
        return behind

    async def _fetch(
        self, model: LoadedModel, coming: _Coming, homes: Sequence[int], answer: PrefillAnswer, wait_s: float
    ) -> None:
        """Transfer the blocks that the peer has. Count why blocks are missing; the engine computes them."""
        counts = model.role_counts
        arriving = coming.arriving
        most = len(arriving.chain.keys) * arriving.num_kv_groups  # some blocks that arrive may already be here
        receiving = Receiving(arriving, most, arriving.chain.keys)
        receiving.give(homes)
        if len(homes) < coming.num_missing:
            counts.add(num_blocks_without_room=coming.num_missing - len(homes))
        try:
            async with asyncio.timeout(wait_s):
                async for pieces in answer.pieces():
                    num_before = receiving.num_blocks
                    await self._workers.run(functools.partial(receiving.take, pieces), _BIG)
                    num_bytes = sum(len(piece.contents) for piece in pieces)
                    counts.add(num_blocks_received=receiving.num_blocks - num_before, num_bytes_received=num_bytes)
                    if receiving.is_full:
                        return
            num_written = receiving.num_blocks - receiving.num_known
            if num_written < len(homes):
                counts.add(num_blocks_missing=len(homes) - num_written)
        except (JpagedError, TimeoutError) as error:
            counts.failed("transfer", error)


async def _whole(coming: _Coming, homes: Future[list[int]]) -> list[int]:
    """Wait for host blocks, and reserve the remainder if the early reservation got only some."""
    early: list[int] = await asyncio.wrap_future(homes)
    if len(early) == coming.num_missing:
        return early
    rest: list[int] = await asyncio.wrap_future(coming.arriving.reserve(coming.num_missing - len(early)))
    return early + rest


@dataclasses.dataclass(frozen=True, slots=True)
class _Coming:
    """The blocks of a prompt that are to be transferred.

    Attributes:
        num_known: leading blocks that are here, or on disk if loading is faster than computing.
        num_missing: missing blocks after those, of all KV groups.
    """

    arriving: Arriving
    num_known: int
    num_missing: int

    @classmethod
    def of(cls, travels: Travels, request: Request) -> _Coming:
        """Look up the blocks of a prompt. Run on a thread if it is long: a block takes 3 us."""
        root = root_key(request.sampling.cache_salt, request.cache_tenant, request.adapter_digest)
        chain = travels.chain(root, request.prompt_token_ids)
        arriving, num_known = travels.arrive(chain), travels.num_findable(chain)
        return cls(arriving, num_known, len(arriving.missing(num_known)))


@dataclasses.dataclass(slots=True)
class _Rest:
    """Rewrites the events after the first tokens as if the engine had run the whole request.

    The first event implies that the engine has the blocks that it needs of the transfer, so the transfer is closed.
    """

    arriving: Arriving
    began_s: float
    first_s: float
    num_cached_tokens: int
    put: Sink
    has_begun: bool = False

    def pass_on(self, event: OutputEvent) -> None:
        """Handle an event, on the engine's thread."""
        if not self.has_begun:
            self.has_begun = True
            self.arriving.close()
        if event.usage.cached_tokens != self.num_cached_tokens:
            usage = dataclasses.replace(event.usage, cached_tokens=self.num_cached_tokens)
            event = dataclasses.replace(event, usage=usage)
        if event.times is not None:
            times = dataclasses.replace(
                event.times, arrival_s=self.began_s, first_scheduled_s=self.began_s, first_token_s=self.first_s
            )
            event = dataclasses.replace(event, times=times)
        self.put(event)
