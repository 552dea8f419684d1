"""What both roles need of a loaded model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from jpaged.errors import Unsupported

if TYPE_CHECKING:
    from jpaged.service.loaded_model import LoadedModel


async def identity_of(model: LoadedModel) -> bytes:
    """Return what blocks of this server mean: every weight is read for it, about a second a gigabyte.

    Raises:
        Unsupported: the pool has no blocks that could be handed on, and why.
    """
    try:
        return await asyncio.to_thread(model.engine.travels.kv_identity)
    except Unsupported as error:
        raise Unsupported(f"role: {model.config.roles.role} hands on blocks of the prefix cache: {error}") from error
