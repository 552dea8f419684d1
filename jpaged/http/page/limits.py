"""Makes the pools smaller while they are in use, and larger again: in a small one sharing and preemption are seen."""

from __future__ import annotations

import asyncio
from typing import Any

from jpaged.access.entry import require_control
from jpaged.errors import InvalidArgument, PermissionDenied
from jpaged.service.service import Service

_PATIENCE_S = 5.0
"""How long blocks are waited for that are in use."""
_INTERVAL_S = 0.05


class Limits:
    """Sets the limit; of two at once the later one holds."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._num_asked = 0

    async def limit(self, body: dict[str, Any]) -> dict[str, Any]:
        """Leave requests so many blocks of each pool, `blocks`; null is all of them.

        Returns:
            the limit, and how many blocks have yet to come free for it, which nobody waits for any longer.

        Raises:
            InvalidArgument: it is no number of blocks, or requests in flight and pins may need more.
            PermissionDenied: the server is not controlled by its callers, or not with this key.
        """
        require_control("the limit of the pool")
        model = self._service.state.serving()
        if model.config.server.disable_control:
            raise PermissionDenied("the pool's limit is fixed on this server (disable_control)")
        blocks = _blocks_of(body)
        self._num_asked += 1
        mine, loop = self._num_asked, asyncio.get_running_loop()
        until_s = loop.time() + _PATIENCE_S
        while True:
            asked = model.engine.eyes.limit(blocks)
            left = sum(await asyncio.gather(*map(asyncio.wrap_future, asked)))
            if left == 0 or mine != self._num_asked or loop.time() > until_s:
                return {"blocks": blocks, "blocks_in_use": left}
            await asyncio.sleep(_INTERVAL_S)


def _blocks_of(body: dict[str, Any]) -> int | None:
    unknown = sorted(body.keys() - {"blocks"})
    if unknown:
        raise InvalidArgument(f"body.{unknown[0]}", "unknown field; the field is blocks")
    if "blocks" not in body:
        raise InvalidArgument("body.blocks", "is missing")
    blocks = body["blocks"]
    if blocks is None or (isinstance(blocks, int) and not isinstance(blocks, bool)):
        return blocks
    raise InvalidArgument("body.blocks", f"{str(blocks)[:80]!r} is neither a whole number nor null")
