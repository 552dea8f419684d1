"""Limits the pools at run time, so that sharing and preemption become visible.

A limit affects all clients of the server. It requires a key of the role control, or a loopback address on a server
without keys. It is logged and exported as a metric, and it expires when its page stops renewing it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from typing import Any

from starlette.requests import Request

from jpaged.access.call_context import current, require_control
from jpaged.errors import InvalidArgument, PermissionDenied
from jpaged.service.service import Service

_LOG = logging.getLogger(__name__)

LEASE_S = 15.0
"""A limit expires after this time unless its page renews it; the page of a closed tab does not."""
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
_PATIENCE_S = 5.0
"""Maximum wait for blocks in use."""
_INTERVAL_S = 0.05


class Limits:
    """Sets the limit; of two concurrent calls the later one wins."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._num_asked = 0
        self._lease: asyncio.TimerHandle | None = None

    async def limit(self, body: dict[str, Any]) -> dict[str, Any]:
        """Limit each pool to `blocks` blocks; null removes the limit.

        Returns:
            the limit, and the number of blocks still in use that it has to free later.

        Raises:
            InvalidArgument: it is not a number of blocks, or requests in flight and pins may need more.
            PermissionDenied: control operations are turned off, or not allowed with this key.
        """
        require_control("changing the limit of the pool")
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
            if mine == self._num_asked:
                self._note(blocks)
            if left == 0 or mine != self._num_asked or loop.time() > until_s:
                return {"blocks": blocks, "blocks_in_use": left}
            await asyncio.sleep(_INTERVAL_S)

    def _renew(self, blocks: int | None) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = None if blocks is None else asyncio.get_running_loop().call_later(LEASE_S, self._expire)

    def _expire(self) -> None:
        self._lease = None
        self._num_asked += 1  # makes a waiting call give up
        if self._service.state.failure is None:
            self._service.state.loaded().engine.eyes.limit(None)
            self._note(None)

    def _note(self, blocks: int | None) -> None:
        eyes = self._service.state.loaded().engine.eyes
        self._renew(blocks)
        if eyes.limited_to == blocks:
            return
        eyes.note_limit(blocks)
        entry = current()
        by = "a page that has been closed" if entry is None or entry.is_closed else entry.peer
        limit = (
            "all blocks of the pool are usable again" if blocks is None else f"{blocks} blocks of each pool are usable"
        )
        _LOG.warning("live page: %s, by %s", limit, by)


def require_local(request: Request) -> None:
    """Raise PermissionDenied for a caller without a key that is not on this machine."""
    if not is_local(request):
        raise PermissionDenied("changing the limit of the pool needs a key of the role control, or a loopback address")


def is_local(request: Request) -> bool:
    """Return True if a caller has a key, or is on this machine without a proxy."""
    entry = current()
    if entry is not None and entry.key is not None:
        return True
    if request.client is None or any(name in request.headers for name in _FORWARDED):
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


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
