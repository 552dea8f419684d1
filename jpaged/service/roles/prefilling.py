"""The role prefill: prompts for other servers, whose blocks are held and sent behind their first token.

stage ──> has landed? ──> bytes on a thread ──> sent        the next are staged while these are sent
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from jpaged.access import entry as access
from jpaged.access.keys import Role
from jpaged.engine.executor import HostBlocks
from jpaged.engine.kv.tiers.travelling import Portion
from jpaged.errors import InvalidArgument
from jpaged.service.roles.answers import Block
from jpaged.service.roles.landing import digest_of
from jpaged.service.roles.ready import handover_of, identity_of
from jpaged.service.roles.role import AskedPrefill, Generation
from jpaged.service.roles.rule import why_here
from jpaged.service.workers import Workers
from jpaged.types import Request

if TYPE_CHECKING:
    from jpaged.service.loaded_model import LoadedModel

_MESSAGE_BYTES = 256 << 10
"""Blocks of a message: the event loop copies it twice, in 0.1 ms."""
_STAGED_BYTES, _STAGED_BLOCKS = 16 << 20, 256
"""Blocks that are copied to the host beside one step."""
_BIG = 1 << 62
"""The size of work that always belongs on a thread."""


class PrefillRole:
    """Computes prompts. Ordinary requests are those of one token."""

    def __init__(self) -> None:
        self._identity = b""
        self._held: dict[str, asyncio.Future[Portion]] = {}
        self._workers = Workers()

    async def prepare(self, model: LoadedModel) -> None:
        """Find out what blocks of this server mean."""
        self._identity = await identity_of(model)

    def check_identity(self, kv_identity: bytes) -> None:
        """Refuse servers whose blocks mean something else, and callers that may not speak for all tenants."""
        access.require(Role.CONTROL, "Prefill")
        if kv_identity != self._identity:
            mine, other = self._identity.hex()[:16], kv_identity.hex()[:16]
            problem = f"{other}... is not {mine}...: model, weights, dtype, layout or block size differ"
            raise InvalidArgument("kv_identity", problem)

    def begin(self, model: LoadedModel, request: Request, generation: Generation, asked: AskedPrefill | None) -> None:
        """Take a request; one that another server asked for holds its blocks from its first token on."""
        max_tokens, put = request.sampling.max_tokens, generation.stream.put
        if max_tokens > 1:
            problem = f"{max_tokens} is over the limit of 1: this server computes prompts alone (role prefill)"
            raise InvalidArgument("sampling.max_tokens", f"{problem}; servers of the role decode generate")
        if asked is None:
            model.engine.submit(request, put)
            return
        if (reason := why_here(request, 1)) is not None:
            raise InvalidArgument("request", f"{reason}: such a prompt is computed where its request runs")
        if request.adapter_digest != asked.adapter_digest:
            raise InvalidArgument("adapter_digest", "the adapter of this name has other contents here")
        held = handover_of(model).submit_held(request, put, asked.num_known, _num_staged(model))
        self._held[generation.engine_id] = asyncio.wrap_future(held)
        model.role_counts.add(num_prefills_for_others=1)

    def end(self, model: LoadedModel, generation: Generation) -> None:
        """Let the blocks of a request go."""
        if self._held.pop(generation.engine_id, None) is not None:
            handover_of(model).let_go(generation.engine_id)

    async def blocks(self, model: LoadedModel, generation: Generation) -> AsyncIterator[Sequence[Block]]:
        """The blocks of a request that has told its first tokens, some at a time, as far as they can be had."""
        handover, name = handover_of(model), generation.engine_id
        at_once = max(1, _MESSAGE_BYTES // handover.host_blocks.bytes_per_block)
        portion = await self._held[name]
        while portion.blocks:
            staged = asyncio.wrap_future(handover.stage(name, _num_staged(model)))
            for start in range(0, len(portion.blocks), at_once):
                part = portion.blocks[start : start + at_once]
                read = functools.partial(_read, handover.host_blocks, part)
                sent = await self._workers.run(read, _BIG)
                yield sent
                num_bytes = sum(len(block.contents) for block in sent)
                model.role_counts.add(num_blocks_sent=len(sent), num_bytes_sent=num_bytes)
            handover.sent(name, portion)
            portion = await staged


def _num_staged(model: LoadedModel) -> int:
    return max(1, min(_STAGED_BLOCKS, _STAGED_BYTES // handover_of(model).host_blocks.bytes_per_block))


def _read(blocks: HostBlocks, part: Sequence[tuple[bytes, int]]) -> list[Block]:
    read = []
    for key, home in part:
        contents = bytes(blocks.view(home))
        read.append(Block(key, contents, digest_of(key, contents)))
    return read
