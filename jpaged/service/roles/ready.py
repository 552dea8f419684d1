"""What both roles need of a loaded model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from jpaged.engine.handover.handover import Handover
from jpaged.errors import Unsupported

if TYPE_CHECKING:
    from jpaged.service.loaded_model import LoadedModel


def handover_of(model: LoadedModel) -> Handover:
    """Return what hands prompts over.

    Raises:
        Unsupported: the pool has no blocks that could be.
    """
    handover = model.engine.handover
    if handover is None:
        role, space = model.config.roles.role, model.config.cache.swap_space
        raise Unsupported(f"role: {role} needs blocks in the host's memory, and swap_space ({space:g} GiB) holds none")
    return handover


async def identity_of(model: LoadedModel) -> bytes:
    """Return what blocks of this server mean: every weight is read for it, about a second a gigabyte."""
    return await asyncio.to_thread(handover_of(model).host_blocks.kv_identity)
