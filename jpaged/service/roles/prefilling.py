"""The prefill role: computes prompts for other servers; keeps the blocks and sends them after the first token.

a part is ready ──> bytes copied on a thread ──> sent        the next parts are staged while these are sent
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from jpaged.access import entry as access
from jpaged.access.keys import Role
from jpaged.engine.kv.blocks import root_key
from jpaged.errors import InvalidArgument
from jpaged.service.prefixes.parts import Piece, cut
from jpaged.service.roles.departure import Departure
from jpaged.service.roles.ready import identity_of
from jpaged.service.roles.role import AskedPrefill, Generation
from jpaged.service.roles.rule import why_here
from jpaged.service.workers import Workers
from jpaged.types import Request

if TYPE_CHECKING:
    from jpaged.service.loaded_model import LoadedModel

_BIG = 1 << 62
"""A work size that always runs on a thread."""


class PrefillRole:
    """Computes prompts. Accepts ordinary requests only if they generate one token."""

    def __init__(self) -> None:
        self._identity = b""
        self._departures: dict[str, Departure] = {}
        self._workers = Workers()

    async def prepare(self, model: LoadedModel) -> None:
        """Compute the KV fingerprint of this server."""
        self._identity = await identity_of(model)

    def check_identity(self, kv_identity: bytes) -> None:
        """Reject servers with incompatible blocks, and callers that may not act for all tenants."""
        access.require(Role.CONTROL, "Prefill")
        if kv_identity != self._identity:
            mine, other = self._identity.hex()[:16], kv_identity.hex()[:16]
            problem = f"{other}... is not {mine}...: model, weights, dtype, layout or block size differ"
            raise InvalidArgument("kv_identity", problem)

    def begin(self, model: LoadedModel, request: Request, generation: Generation, asked: AskedPrefill | None) -> None:
        """Submit a request; one from another server holds its blocks from its first token on."""
        max_tokens, put = request.sampling.max_tokens, generation.stream.put
        if max_tokens > 1:
            problem = f"{max_tokens} is over the limit of 1: this server only computes prompts (role prefill)"
            raise InvalidArgument("sampling.max_tokens", f"{problem}; servers of the role decode generate")
        if asked is None:
            model.engine.submit(request, put)
            return
        if (reason := why_here(request, 1)) is not None:
            raise InvalidArgument("request", f"{reason}: the decode server must compute such a prompt itself")
        if request.adapter_digest != asked.adapter_digest:
            raise InvalidArgument("adapter_digest", "the adapter of this name has different contents on this server")
        travels, sampling = model.engine.travels, request.sampling
        root = root_key(sampling.cache_salt, request.cache_tenant, request.adapter_digest)
        chain = self._workers.start(lambda: travels.chain(root, request.prompt_token_ids))
        departure = Departure(travels, chain, asked.num_known, put)
        model.engine.submit(request, departure.pass_on)
        self._departures[generation.engine_id] = departure
        model.role_counts.add(num_prefills_for_others=1)

    def hurry(self, model: LoadedModel, generation: Generation) -> bool:
        """Return False: every request is submitted to the engine at once."""
        return False

    def end(self, model: LoadedModel, generation: Generation) -> None:
        """Release the blocks of a request."""
        departure = self._departures.pop(generation.engine_id, None)
        if departure is not None:
            self._workers.start(departure.close)

    async def pieces(self, model: LoadedModel, generation: Generation) -> AsyncIterator[Sequence[Piece]]:
        """Yield the blocks of a request that has emitted its first tokens, some at a time, as far as available."""
        leaving = await self._departures[generation.engine_id].leaving()
        for part in range(0 if leaving is None else leaving.num_parts):
            assert leaving is not None
            await asyncio.wrap_future(leaving.when_there(part))
            for pieces in await self._workers.run(functools.partial(cut, leaving, part, leaving.chain.keys), _BIG):
                yield pieces
                model.role_counts.add(num_bytes_sent=sum(len(piece.contents) for piece in pieces))
            model.role_counts.add(num_blocks_sent=len(leaving.places_of(part)))
