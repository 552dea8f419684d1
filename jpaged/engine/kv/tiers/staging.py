"""Host memory buffers for transfers to and from disk.

    ready     no pending copy to or from it: any thread may use it
    out       in use by a transfer
    cooling   released, but a copy that was decided before may still read it

They are reserved permanently, so that transfers never evict prefixes from host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from jpaged.engine.kv.tiers.host import HostTier
from jpaged.errors import InternalError


class Staging:
    """Pool of reserved host blocks; only the engine thread calls it.

    Attributes:
        num_blocks: number of reserved blocks.
    """

    def __init__(self, host: HostTier, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._host = host
        self._table = host.reserve(num_blocks)
        self._ready: list[int] = []
        self._out: set[int] = set()
        self._cooling = deque((host.num_dispatched, block_id) for block_id in self._table.block_ids())

    @property
    def num_out(self) -> int:
        """Return the number of blocks in use."""
        return len(self._out)

    def take(self) -> int | None:
        """Take a block that any thread may read and write; None if none is ready."""
        while self._cooling and self._host.is_settled([self._cooling[0][1]], self._cooling[0][0]):
            self._ready.append(self._cooling.popleft()[1])
        if not self._ready:
            return None
        block_id = self._ready.pop()
        self._out.add(block_id)
        return block_id

    def give_back(self, block_id: int) -> None:
        """Release a block, which already decided moves may still read."""
        if block_id not in self._out:
            raise InternalError(f"host block {block_id} is released but not held")
        self._out.remove(block_id)
        self._cooling.append((self._host.num_dispatched, block_id))

    def check(self, on_the_way: Iterable[int]) -> None:
        """Check the bookkeeping of staging blocks.

        Args:
            on_the_way: blocks in use as counted by the users.

        Raises:
            InternalError: a block is lost, in two lists, or free while in use.
        """
        places = sorted([*self._ready, *self._out, *(block_id for _, block_id in self._cooling)])
        if places != sorted(self._table.block_ids()):
            raise InternalError(f"blocks {places} are staging buffers, but {self._table.block_ids()} are reserved")
        if sorted(on_the_way) != sorted(self._out):
            raise InternalError(f"blocks {sorted(on_the_way)} are in flight, but {sorted(self._out)} are lent")
