"""Physical blocks: which are free, and how many tables hold each of the others.

    free list   oldest ...... newest        allocate takes from the left, release appends on the right, a table's last
                                            block first, so that the list is in order of last use
    ref counts  block -> number of block tables that hold it; 0 exactly for the blocks of the free list

Knows nothing of tokens, requests or devices. Block 0 is the null block: it is never allocated and never counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import NULL_BLOCK
from jpaged.errors import InternalError


class BlockTable:
    """The blocks of one sequence, in order. Unused places hold the null block, so a row of it is ready for the device.

    Attributes:
        ids_m: [M] int32, read by the batch; written here alone.
    """

    __slots__ = ("ids_m", "num_blocks")

    def __init__(self, max_blocks: int) -> None:
        self.ids_m: NDArray[np.int32] = np.full(max_blocks, NULL_BLOCK, np.int32)
        self.num_blocks = 0

    def extend(self, block_ids: list[int]) -> None:
        end = self.num_blocks + len(block_ids)
        self.ids_m[self.num_blocks : end] = block_ids
        self.num_blocks = end

    def block_ids(self) -> list[int]:
        ids: list[int] = self.ids_m[: self.num_blocks].tolist()
        return ids

    def clear(self) -> list[int]:
        """Empties the table and returns what it held, for the pool to release."""
        ids = self.block_ids()
        self.ids_m[: self.num_blocks] = NULL_BLOCK
        self.num_blocks = 0
        return ids


class BlockPool:
    """Hands blocks out and takes them back. The only writer of reference counts and of the free list."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._ref_counts = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill or begin to fill."""
        return -(-num_tokens // self.block_size)

    def num_missing(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks to allocate before the table holds num_tokens slots."""
        return max(0, self.num_blocks_for(num_tokens) - table.num_blocks)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks from the free list; each then has one reference.

        Raises:
            InternalError: there are too few; the caller asks `can_allocate` first.
        """
        if num_blocks > len(self._free):
            raise InternalError(f"{num_blocks} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        block_ids = [self._free.popleft() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def release(self, table: BlockTable) -> None:
        """Drops one reference to every block of the table, last block first, and empties the table.

        Raises:
            InternalError: a block is free already.
        """
        for block_id in reversed(table.clear()):
            count = self._ref_counts[block_id]
            if count <= 0:
                raise InternalError(f"block {block_id} is released but has {count} references")
            self._ref_counts[block_id] = count - 1
            if count == 1:
                self._free.append(block_id)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """The invariant: free + referenced = N, counts match the tables, no table names a free block.

        Raises:
            InternalError: it does not hold; the message says where.
        """
        counts = [0] * (self.num_blocks + 1)
        for table in tables:
            for block_id in table.block_ids():
                counts[block_id] += 1
        if counts[NULL_BLOCK]:
            raise InternalError(f"the null block is held by {counts[NULL_BLOCK]} tables")
        for block_id, (held, counted) in enumerate(zip(counts, self._ref_counts, strict=True)):
            if held != counted:
                raise InternalError(f"block {block_id} is held by {held} tables, its reference count is {counted}")
        free = set(self._free)
        if len(free) != len(self._free):
            raise InternalError("a block is twice in the free list")
        num_referenced = sum(1 for count in counts if count)
        if len(free) + num_referenced != self.num_blocks:
            raise InternalError(f"{len(free)} free + {num_referenced} referenced blocks are not {self.num_blocks}")
        for block_id in free:
            if counts[block_id]:
                raise InternalError(f"block {block_id} is free and held by {counts[block_id]} tables")
