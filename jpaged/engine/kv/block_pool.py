"""Physical blocks: which are free, and how many tables hold each of the others.

    free list   oldest ...... newest        allocate takes from the left, release appends on the right, a table's last
                                            block first: the list is in order of last use
    ref counts  block -> number of block tables that hold it; 0 exactly for the blocks of the free list
    content     a block of the free list may still hold a cached prefix; it is told to the cache when it is reissued

    fork          a [ 7 8 9 ]   b [ 7 8 9 ]       every block of the parent is shared
    copy on write a [ 7 8 9 ]   b [ 7 8 4 ]       b wrote: one copy 9 -> 4, and block 9 is a's alone

Knows nothing of tokens, requests or devices. Block 0 is the null block: it is never allocated and never counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import NULL_BLOCK
from jpaged.errors import InternalError


class BlockTable:
    """The blocks of one sequence, in order. Unused places hold the null block, so a row of it is ready for the device.

    Attributes:
        ids_m: [M] int32, read by the batch; written here alone.
    """

    __slots__ = ("_ids", "ids_m", "num_blocks")

    def __init__(self, max_blocks: int) -> None:
        self.ids_m: NDArray[np.int32] = np.full(max_blocks, NULL_BLOCK, np.int32)
        self.num_blocks = 0
        self._ids: list[int] = []  # the same once more: an element of a list is read five times as fast

    def extend(self, block_ids: list[int]) -> None:
        self._ids += block_ids
        self.ids_m[self.num_blocks : len(self._ids)] = block_ids
        self.num_blocks = len(self._ids)

    def replace(self, index: int, block_id: int) -> None:
        self._ids[index] = block_id
        self.ids_m[index] = block_id

    def block_id(self, index: int) -> int:
        return self._ids[index]

    def block_ids(self) -> list[int]:
        return list(self._ids)

    def clear(self) -> list[int]:
        """Empties the table and returns what it held, for the pool to release."""
        block_ids, self._ids = self._ids, []
        self.ids_m[: self.num_blocks] = NULL_BLOCK
        self.num_blocks = 0
        return block_ids


class BlockPool:
    """Hands blocks out and takes them back. The only writer of reference counts and of the free list.

    Args:
        on_reissue: called with a block of the free list just before it is given to somebody else.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, on_reissue: Callable[[int], None] = lambda block_id: None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._on_reissue = on_reissue
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
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

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def is_free(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes the blocks that were free the longest; each then has one reference.

        Raises:
            InternalError: there are too few; the caller asks `can_allocate` first.
        """
        if num_blocks > len(self._free):
            raise InternalError(f"{num_blocks} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._on_reissue(block_id)
            self._ref_counts[block_id] = 1
        return block_ids

    def acquire(self, block_id: int) -> bool:
        """Adds a reference to a block with its content; True when it was free (and still cached) until now."""
        was_free = self._ref_counts[block_id] == 0
        if was_free:
            del self._free[block_id]
        self._ref_counts[block_id] += 1
        return was_free

    def fork(self, parent: BlockTable, child: BlockTable) -> None:
        """Makes the empty child table hold every block of the parent."""
        if child.num_blocks:
            raise InternalError(f"a table of {child.num_blocks} blocks is to become a fork")
        block_ids = parent.block_ids()
        for block_id in block_ids:
            self.acquire(block_id)
        child.extend(block_ids)

    def copy_on_write(self, table: BlockTable, index: int) -> tuple[int, int] | None:
        """Makes the block at `index` the table's alone; the (source, destination) to copy, None when it was already."""
        source = table.block_id(index)
        if self._ref_counts[source] == 1:
            return None
        (destination,) = self.allocate(1)
        self._ref_counts[source] -= 1
        table.replace(index, destination)
        return source, destination

    def release(self, table: BlockTable) -> list[int]:
        """Drops one reference to every block of a table, last block first, and empties it.

        Returns:
            the blocks that are free now.

        Raises:
            InternalError: a block is free already.
        """
        freed = []
        for block_id in reversed(table.clear()):
            count = self._ref_counts[block_id]
            if count <= 0:
                raise InternalError(f"block {block_id} is released but has {count} references")
            self._ref_counts[block_id] = count - 1
            if count == 1:
                self._free[block_id] = None
                freed.append(block_id)
        return freed

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
            if held and block_id in self._free:
                raise InternalError(f"block {block_id} is free and held by {held} tables")
        num_referenced = sum(1 for count in counts if count)
        if len(self._free) + num_referenced != self.num_blocks:
            raise InternalError(f"{len(self._free)} free + {num_referenced} referenced are not {self.num_blocks}")
