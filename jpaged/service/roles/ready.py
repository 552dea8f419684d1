"""Requirements that both roles have of a loaded model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from jpaged.errors import Unsupported

if TYPE_CHECKING:
    from jpaged.service.loaded_model import LoadedModel


async def identity_of(model: LoadedModel) -> bytes:
    """Return the KV fingerprint of this server. Reads every weight: about a second per gigabyte.

    Raises:
        Unsupported: the pool has no transferable blocks; states why.
    """
    try:
        return await asyncio.to_thread(model.engine.travels.kv_identity)
    except Unsupported as error:
        raise Unsupported(f"role: {model.config.roles.role} transfers blocks of the prefix cache: {error}") from error
