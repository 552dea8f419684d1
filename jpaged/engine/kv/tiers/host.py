"""Cached prefixes in host memory: the second tier, beneath the pool of the device.

Who reads or writes blocks besides the device (a disk, another server) does so between these verbs:

    table = hold(keys)   or   reserve(3)                blocks that nobody else gets
    when_settled(table, then)                           no move is under way to them or from them: any thread may
                                                        read or write their bytes (`HostBlocks.view`)
    take_in(key, block_id)                              a reserved block holds what a key names: it is found from now on
    let_go(table)

All of them are the engine's thread's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from jpaged.engine.executor import HostBlocks, Move
from jpaged.engine.kv.blocks import BlockPool, BlockTable, Key, MemoryOps
from jpaged.engine.kv.changes import Changes
from jpaged.engine.kv.eviction.free_list import RankedFreeList
from jpaged.engine.kv.eviction.policy import Entry
from jpaged.errors import InternalError


class HostTier:
    """Cached prefixes that the device pool had to give up, in the free blocks of host memory.

    Args:
        blocks: their bytes; None where nobody but the device has to do with them.
        ranked: in which order they are given up here; None is as they were used, the least recently first.
        changes: where is noted what comes and goes; None is nowhere.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        ops: MemoryOps,
        *,
        blocks: HostBlocks | None = None,
        ranked: RankedFreeList | None = None,
        changes: Changes | None = None,
    ) -> None:
        self._changes = Changes() if changes is None else changes
        self.pool = BlockPool(num_blocks=num_blocks, block_size=block_size, free=ranked, on_reissue=self._evict)
        self._ranked = ranked
        self._bytes = blocks
        self._held: dict[BlockTable, None] = {}
        self._errands: deque[tuple[int, BlockTable, Callable[[], None]]] = deque()
        self._ops = ops
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self.marks = bytearray(num_blocks + 1)  # 1 where a block is kept

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def keep(self, key: Key, block_id: int, entry: Entry | None = None) -> None:
        """Takes what a device block holds, while there is room; the block is about to be written.

        Args:
            entry: what is known of it, where blocks are ranked.
        """
        if key in self._blocks or not self.pool.can_allocate(1):
            return
        (home,) = self.pool.allocate(1)
        self._blocks[key], self._keys[home] = home, key
        self.marks[home] = 1
        if self._changes.is_on:
            self._changes.stored("host", key)
        if self._ranked is not None and entry is not None:
            self._ranked.enter(home, entry)
        self._ops.add(Move.SWAP_OUT, block_id, home)
        _hand_back(self.pool, home)

    def bring_back(self, keys: Sequence[Key], pool: BlockPool) -> list[int]:
        """Copies kept blocks into blocks of the device pool, which has as many free ones; the new blocks."""
        sources = [self._blocks[key] for key in keys]
        for source in sources:
            self.pool.acquire(source)  # while they are read: allocating may evict others to host memory
        destinations = pool.allocate(len(sources))
        if self._ranked is not None:
            self._ranked.found(sources)
        for source, destination in zip(sources, destinations, strict=True):
            self._ops.add(Move.SWAP_IN, source, destination)
            _hand_back(self.pool, source)
        return destinations

    def times_seen(self, key: Key) -> int:
        """Requests that computed or found a block that is kept; 1 where blocks are not ranked."""
        return 1 if self._ranked is None else self._ranked.times_seen(self._blocks[key])

    def forget(self, key: Key) -> None:
        """Drops what is kept under a key, if anything is."""
        if key in self._blocks:
            home = self._blocks.pop(key)
            del self._keys[home]
            self.marks[home] = 0
            if self._changes.is_on:
                self._changes.removed("host", key)
            if self._ranked is not None:
                self._ranked.forget(home)

    # --- who reads and writes besides the device --------------------------------------------------------------------

    def reserve(self, num_blocks: int) -> BlockTable:
        """Takes blocks out of use, as many as there are free; what they held is not found any more."""
        table = _table_of(self.pool.allocate(num_blocks))
        self._held[table] = None
        return table

    def hold(self, keys: Iterable[Key]) -> BlockTable:
        """Keeps blocks as they are: those that are kept under these keys, each in the place of its key.

        Raises:
            InternalError: nothing is kept under one of them.
        """
        keys = list(keys)
        if missing := [key.hex() for key in keys if key not in self._blocks]:
            raise InternalError(f"no host block is kept under {missing[:3]}")
        for key in keys:
            self.pool.acquire(self._blocks[key])
        table = _table_of([self._blocks[key] for key in keys])
        self._held[table] = None
        return table

    def let_go(self, table: BlockTable) -> None:
        """Gives back what was reserved or held; what is kept under a key stays until it has to make room."""
        if table not in self._held:
            raise InternalError(f"host blocks {table.block_ids()[:8]} are let go of, and nobody holds them")
        del self._held[table]
        self.pool.release(table)

    def take_in(self, key: Key, block_id: int, entry: Entry | None = None) -> bool:
        """Makes a reserved block known, which holds what a key names; False where another does already.

        Args:
            entry: what eviction is to know of it; None where nothing but the key is known.

        Raises:
            InternalError: it is nobody's, or known under another key.
        """
        if self.pool.is_free(block_id) or block_id in self._keys:
            raise InternalError(f"host block {block_id} is taken in, and is not reserved")
        if key in self._blocks:
            return False
        self._blocks[key], self._keys[block_id] = block_id, key
        self.marks[block_id] = 1
        if self._changes.is_on:
            self._changes.stored("host", key)
        if self._ranked is not None:
            self._ranked.enter(block_id, entry or Entry(key, None, 0, b""))
        return True

    def copy_out(self, block_id: int, home: int) -> None:
        """Copies a block of the device into a reserved one, before the next step's rows."""
        self._ops.add(Move.SWAP_OUT, block_id, home, passes=True)

    @property
    def num_dispatched(self) -> int:
        """How often moves were given to the device: those of now are there when it is larger."""
        return self._ops.num_taken

    def is_settled(self, block_ids: Sequence[int], since: int) -> bool:
        """No move that was decided when `num_dispatched` was `since` is still to read or write held blocks."""
        if self._ops.num_taken <= since:
            return False
        return self._bytes is None or self._bytes.have_landed(block_ids)

    def when_settled(self, table: BlockTable, then: Callable[[], None]) -> None:
        """Calls `then` in a step in which nothing is under way to or from held blocks."""
        self._errands.append((self._ops.num_taken, table, then))

    @property
    def has_errands(self) -> bool:
        """Somebody waits for `when_settled`: further steps have to come, though nothing runs in them."""
        return bool(self._errands)

    def advance(self) -> None:
        """Calls whom `when_settled` has promised it; once a step, before what that decides."""
        for _ in range(len(self._errands)):
            since, table, then = self._errands.popleft()
            if self.is_settled(table.block_ids(), since):
                then()
            else:
                self._errands.append((since, table, then))

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raises InternalError when a block is lost, free and in use, or known by a key that is another's.

        Args:
            tables: of swapped groups.
        """
        self.pool.check([*tables, *self._held])
        if self._ranked is not None:
            self._ranked.check(set(self._keys), self.pool.is_free)
        known = {key: block_id for block_id, key in self._keys.items()}
        if known != self._blocks or [*self._keys] != [b for b in self._keys if self.marks[b]]:
            raise InternalError(f"{len(known)} host blocks are known by keys, {len(self._blocks)} keys have blocks")

    # --- what is kept -----------------------------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """Something is kept."""
        return bool(self._blocks)

    def reset(self) -> int:
        """Drops everything that is kept; the number of blocks."""
        num_kept = len(self._blocks)
        for key in self._blocks if self._changes.is_on else ():
            self._changes.removed("host", key)
        if self._ranked is not None:
            for home in self._keys:
                self._ranked.forget(home)
        self._blocks.clear()
        self._keys.clear()
        self.marks = bytearray(len(self.marks))
        return num_kept

    def _evict(self, home: int) -> None:
        key = self._keys.pop(home, None)
        if key is not None:
            del self._blocks[key]
            self.marks[home] = 0
            if self._changes.is_on:
                self._changes.removed("host", key)
            if self._ranked is not None:
                self._ranked.evicted(home)


def _hand_back(pool: BlockPool, block_id: int) -> None:
    pool.release(_table_of([block_id]))


def _table_of(block_ids: list[int]) -> BlockTable:
    table = BlockTable(len(block_ids))
    table.extend(block_ids)
    return table
