"""How many lines may run now, so that nobody who waits for an answer waits longer for them.

Lines have the rows that nobody else has, but for a few that are kept for whoever comes next, and none is begun while a
request waits. Where the server's policy is `priority`, they have the lowest, too.
"""

from __future__ import annotations

import asyncio

from jpaged.service.service import Service
from jpaged.service.state import Stage

PRIORITY = 1 << 20
"""The priority of lines: lower numbers are served first, and callers seldom write such a large one."""
_KEPT_SHARE = 0.25
_POLL_S = 0.02


class Places:
    """The places of lines, of all batches together; those that wait for one get it in turn."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turn = asyncio.Lock()
        self._num_taken = 0

    async def take(self) -> bool:
        """Wait for a place; False, and there is none, where the server takes no more lines."""
        async with self._turn:
            while True:
                if not self._is_serving():
                    return False
                if self._has_room():
                    self._num_taken += 1
                    return True
                await asyncio.sleep(_POLL_S)

    def give_back(self) -> None:
        """Leave a place to others."""
        self._num_taken -= 1

    def _is_serving(self) -> bool:
        return self._service.state.stage is Stage.SERVING

    def _has_room(self) -> bool:
        engine = self._service.state.loaded().engine
        num_rows = engine.geometry.max_num_seqs * max(1, len(engine.replica_loads()))
        load = engine.load()
        free = num_rows - int(num_rows * _KEPT_SHARE)
        num_others = max(0, load.num_running - self._num_taken)
        return load.num_waiting == 0 and self._num_taken < max(1, free - num_others)
