"""Number of lines that may run now without delaying interactive requests.

Lines use rows that no other request has, except a few reserved for newcomers, and no line starts while a request waits.
With the policy `priority`, they also have the lowest priority.
"""

from __future__ import annotations

import asyncio

from jpaged.service.loaded_model import Stage
from jpaged.service.service import Service

PRIORITY = 1 << 20
"""Priority of lines: lower numbers are served first, and clients rarely use such a large one."""
_KEPT_SHARE = 0.25
_POLL_S = 0.02


class Places:
    """Slots for lines of all batches together, granted in order of arrival."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turn = asyncio.Lock()
        self._num_taken = 0

    async def take(self) -> bool:
        """Wait for a slot; return False, without a slot, if the server accepts no more lines."""
        async with self._turn:
            while True:
                if not self._is_serving():
                    return False
                if self._has_room():
                    self._num_taken += 1
                    return True
                await asyncio.sleep(_POLL_S)

    def give_back(self) -> None:
        """Release a slot."""
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
