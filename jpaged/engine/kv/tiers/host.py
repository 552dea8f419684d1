"""Cached prefixes in host memory: the second tier, beneath the pool of the device."""

from __future__ import annotations

from collections.abc import Sequence

from jpaged.engine.executor import Move
from jpaged.engine.kv.blocks import BlockPool, BlockTable, Key, MemoryOps


class HostTier:
    """Cached prefixes that the device pool had to give up, in the free blocks of host memory."""

    def __init__(self, num_blocks: int, block_size: int, ops: MemoryOps) -> None:
        self.pool = BlockPool(num_blocks=num_blocks, block_size=block_size, on_reissue=self._evict)
        self._ops = ops
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self.marks = bytearray(num_blocks + 1)  # 1 where a block is kept

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def keep(self, key: Key, block_id: int) -> None:
        """Takes what a device block holds, while there is room; the block is about to be written."""
        if key in self._blocks or not self.pool.can_allocate(1):
            return
        (home,) = self.pool.allocate(1)
        self._blocks[key], self._keys[home] = home, key
        self.marks[home] = 1
        self._ops.add(Move.SWAP_OUT, block_id, home)
        self._hand_back(home)

    def bring_back(self, keys: Sequence[Key], pool: BlockPool) -> list[int]:
        """Copies kept blocks into blocks of the device pool, which has as many free ones; the new blocks."""
        sources = [self._blocks[key] for key in keys]
        for source in sources:
            self.pool.acquire(source)  # while they are read: allocating may evict others to host memory
        destinations = pool.allocate(len(sources))
        for source, destination in zip(sources, destinations, strict=True):
            self._ops.add(Move.SWAP_IN, source, destination)
            self._hand_back(source)
        return destinations

    def forget(self, key: Key) -> None:
        """Drops what is kept under a key, if anything is."""
        if key in self._blocks:
            home = self._blocks.pop(key)
            del self._keys[home]
            self.marks[home] = 0

    @property
    def is_used(self) -> bool:
        """Something is kept."""
        return bool(self._blocks)

    def reset(self) -> int:
        """Drops everything that is kept; the number of blocks."""
        num_kept = len(self._blocks)
        self._blocks.clear()
        self._keys.clear()
        self.marks = bytearray(len(self.marks))
        return num_kept

    def _hand_back(self, home: int) -> None:
        table = BlockTable(1)
        table.extend([home])
        self.pool.release(table)

    def _evict(self, home: int) -> None:
        key = self._keys.pop(home, None)
        if key is not None:
            del self._blocks[key]
            self.marks[home] = 0
