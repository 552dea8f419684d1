"""Cached prefixes in host memory: the second tier, below the device pool.

Readers and writers other than the device (disk, other servers) access blocks between these calls:

    table = hold(keys)   or   reserve(3)                pins blocks
    when_settled(table, then)                           no device copy to or from them is pending: any thread may
                                                        read or write their bytes (`HostBlocks.view`)
    take_in(key, block_id)                              inserts a reserved block into the cache under a key
    let_go(table)

Only the engine thread may make these calls.

Host memory buffers for transfers to and from disk.

    ready     no pending copy to or from it: any thread may use it
    out       in use by a transfer
    cooling   released, but a copy that was decided before may still read it

They are reserved permanently, so that transfers never evict prefixes from host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from jpaged.engine.executor import HostBlocks, Move
from jpaged.engine.kv_cache.blocks import BlockCopyPlan, BlockHash, BlockPool, BlockTable
from jpaged.engine.kv_cache.events import KVEventRecorder
from jpaged.engine.kv_cache.eviction.free_list import CachedBlock, RankedFreeList
from jpaged.errors import InternalError


class HostTier:
    """Cached prefixes evicted from the device pool, in the free blocks of host memory.

    Attributes:
        blocks: block of each cached key.
        pending_callbacks: those of `on_transfers_done`; while there are any, steps must run even if no group does.

    Args:
        blocks: contents of host memory; None if only the device accesses them.
        ranked: free list in eviction order; None for least recently used.
        changes: recorder of KV cache events; None for none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        ops: BlockCopyPlan,
        *,
        blocks: HostBlocks | None = None,
        ranked: RankedFreeList | None = None,
        changes: KVEventRecorder | None = None,
    ) -> None:
        self._changes = KVEventRecorder() if changes is None else changes
        self.pool = BlockPool(num_blocks=num_blocks, block_size=block_size, free=ranked, on_reissue=self._evict)
        self._ranked = ranked
        self._bytes = blocks
        self._held: dict[BlockTable, None] = {}
        self.pending_callbacks: deque[tuple[int, BlockTable, Callable[[], None]]] = deque()
        self._ops = ops
        self.blocks: dict[BlockHash, int] = {}
        self._keys: dict[int, BlockHash] = {}
        self.marks = bytearray(num_blocks + 1)  # 1 if a prefix is cached in the block

    def __contains__(self, key: BlockHash) -> bool:
        return key in self.blocks

    def keep(self, key: BlockHash, block_id: int, entry: CachedBlock | None = None) -> None:
        """Copy a device block that is about to be overwritten, if there is room.

        Args:
            entry: its eviction entry, if blocks are ranked.
        """
        if key in self.blocks or not self.pool.can_allocate(1):
            return
        (host_block_id,) = self.pool.allocate(1)
        self.blocks[key], self._keys[host_block_id] = host_block_id, key
        self.marks[host_block_id] = 1
        if self._changes.is_on:
            self._changes.stored("host", key)
        if self._ranked is not None and entry is not None:
            self._ranked.enter(host_block_id, entry)
        self._ops.add(Move.SWAP_OUT, block_id, host_block_id)
        _hand_back(self.pool, host_block_id)

    def load(self, keys: Sequence[BlockHash], pool: BlockPool) -> list[int]:
        """Copy cached blocks to new device blocks, which are returned; the pool must have enough free ones."""
        sources = [self.blocks[key] for key in keys]
        for source in sources:
            self.pool.acquire(source)  # while they are read: allocating may evict others to host memory
        destinations = pool.allocate(len(sources))
        if self._ranked is not None:
            self._ranked.found(sources)
        for source, destination in zip(sources, destinations, strict=True):
            self._ops.add(Move.SWAP_IN, source, destination)
            _hand_back(self.pool, source)
        return destinations

    def times_seen(self, key: BlockHash) -> int:
        """Return the number of requests that computed or hit a cached block; 1 if blocks are not ranked."""
        return 1 if self._ranked is None else self._ranked.times_seen(self.blocks[key])

    def remove(self, key: BlockHash) -> None:
        """Remove a key, if it is cached."""
        if key in self.blocks:
            host_block_id = self.blocks.pop(key)
            del self._keys[host_block_id]
            self.marks[host_block_id] = 0
            if self._changes.is_on:
                self._changes.removed("host", key)
            if self._ranked is not None:
                self._ranked.discard(host_block_id)

    # --- readers and writers other than the device ----------------------------------------------------------------

    def reserve(self, num_blocks: int) -> BlockTable:
        """Reserve num_blocks blocks, which must be free, and evict their contents."""
        table = _get_table(self.pool.allocate(num_blocks))
        self._held[table] = None
        return table

    def hold(self, keys: Iterable[BlockHash]) -> BlockTable:
        """Pin the cached blocks of these keys; the table has them in the order of the keys.

        Raises:
            InternalError: one of the keys is not cached.
        """
        keys = list(keys)
        if missing := [key.hex() for key in keys if key not in self.blocks]:
            raise InternalError(f"no host block has the hashes {missing[:3]}")
        for key in keys:
            self.pool.acquire(self.blocks[key])
        table = _get_table([self.blocks[key] for key in keys])
        self._held[table] = None
        return table

    def release(self, table: BlockTable) -> None:
        """Release reserved or pinned blocks; cached ones stay cached until they are evicted."""
        if table not in self._held:
            raise InternalError(f"host blocks {table.block_ids()[:8]} are released but not held")
        del self._held[table]
        self.pool.release(table)

    def insert(self, key: BlockHash, block_id: int, entry: CachedBlock | None = None) -> bool:
        """Insert a reserved block under a key; return False if another block already has the key.

        Args:
            entry: its eviction entry; None if only the key is known.

        Raises:
            InternalError: the block is not reserved, or has another key.
        """
        if self.pool.is_free(block_id) or block_id in self._keys:
            raise InternalError(f"host block {block_id} is inserted but not reserved")
        if key in self.blocks:
            return False
        self.blocks[key], self._keys[block_id] = block_id, key
        self.marks[block_id] = 1
        if self._changes.is_on:
            self._changes.stored("host", key)
        if self._ranked is not None:
            self._ranked.enter(block_id, entry or CachedBlock(key, None, 0, b""))
        return True

    def copy_out(self, block_id: int, host_block_id: int) -> None:
        """Copy a device block to a reserved one, before the next step."""
        self._ops.add(Move.SWAP_OUT, block_id, host_block_id, passes=True)

    @property
    def num_dispatched(self) -> int:
        """Return how often moves were dispatched to the device: current moves are dispatched once it is larger."""
        return self._ops.num_taken

    def is_settled(self, block_ids: Sequence[int], since: int) -> bool:
        """Return True if no move decided when `num_dispatched` was `since` is still to access these blocks."""
        if self._ops.num_taken <= since:
            return False
        return self._bytes is None or self._bytes.have_landed(block_ids)

    def on_transfers_done(self, table: BlockTable, then: Callable[[], None]) -> None:
        """Call `then` in a step in which no copy to or from the blocks is pending."""
        self.pending_callbacks.append((self._ops.num_taken, table, then))

    def advance(self) -> None:
        """Run the `on_transfers_done` callbacks that are due; called once per step, before it is scheduled."""
        for _ in range(len(self.pending_callbacks)):
            since, table, then = self.pending_callbacks.popleft()
            if self.is_settled(table.block_ids(), since):
                then()
            else:
                self.pending_callbacks.append((since, table, then))

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Check the bookkeeping of host blocks.

        Args:
            tables: host block tables of swapped groups.

        Raises:
            InternalError: a block is lost, free and in use, or indexed under a wrong key.
        """
        self.pool.check([*tables, *self._held])
        if self._ranked is not None:
            self._ranked.check(set(self._keys), self.pool.is_free)
        known = {key: block_id for block_id, key in self._keys.items()}
        if known != self.blocks or [*self._keys] != [b for b in self._keys if self.marks[b]]:
            raise InternalError(f"{len(known)} host blocks have keys, but {len(self.blocks)} keys have blocks")

    # --- contents -------------------------------------------------------------------------------------------------

    def reset(self) -> int:
        """Remove all cached prefixes; return the number of their blocks."""
        num_kept = len(self.blocks)
        for key in self.blocks if self._changes.is_on else ():
            self._changes.removed("host", key)
        if self._ranked is not None:
            for host_block_id in self._keys:
                self._ranked.discard(host_block_id)
        self.blocks.clear()
        self._keys.clear()
        self.marks = bytearray(len(self.marks))
        return num_kept

    def _evict(self, host_block_id: int) -> None:
        key = self._keys.pop(host_block_id, None)
        if key is not None:
            del self.blocks[key]
            self.marks[host_block_id] = 0
            if self._changes.is_on:
                self._changes.removed("host", key)
            if self._ranked is not None:
                self._ranked.evicted(host_block_id)


def _hand_back(pool: BlockPool, block_id: int) -> None:
    pool.release(_get_table([block_id]))


def _get_table(block_ids: list[int]) -> BlockTable:
    table = BlockTable(len(block_ids))
    table.extend(block_ids)
    return table


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

    def take_up_to(self, num_blocks: int) -> list[int]:
        """Take up to `num_blocks` blocks, as far as they are ready."""
        block_ids: list[int] = []
        while len(block_ids) < num_blocks and (block_id := self.take()) is not None:
            block_ids.append(block_id)
        return block_ids

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
