"""Import of a prefix from another server: written to host memory, and hit by the next request.

    reserve(n)              host blocks without pending copies, exclusive to the import; fewer if there is no room
    write(block_id, ...)    their bytes, on the receiver's thread
    enter(places, ids)      insert complete, verified blocks into the cache
    read(places, ids)       write and enter blocks from disk, before a prefix that memory has in part is exported

Blocks that were entered or already in host memory are pinned until `close`, so no part of a prefix evicts another. The
prefix's device blocks move to the end of the eviction order, and are evicted to host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future

from jpaged.engine.kv.blocks import BlockTable, Key, key_in_group
from jpaged.engine.kv.eviction.policy import Entry
from jpaged.engine.kv.tiers.chain import Chain, Place
from jpaged.engine.kv.tiers.leaving import Tiers
from jpaged.errors import Cancelled, InternalError, Unavailable


class Arriving:
    """Host blocks that a prefix is written to. Any thread may call; writes are serialized.

    Attributes:
        num_blocks_at_once: number of blocks to reserve per call.
    """

    def __init__(self, tiers: Tiers, chain: Chain) -> None:
        self.chain = chain
        self.num_blocks_at_once = tiers.num_blocks_at_once
        self._tiers = tiers
        self._lock = threading.Lock()
        self._is_closed = False
        self._tables: list[BlockTable] = []
        self._reserved: set[int] = set()

    @property
    def bytes_per_block(self) -> int:
        """Return the required size of each block."""
        return self._tiers.blocks.bytes_per_block

    @property
    def num_kv_groups(self) -> int:
        """Return the number of KV groups: blocks per token range."""
        return len(self._tiers.reaches)

    def missing(self, num_skipped: int) -> tuple[Place, ...]:
        """Return the missing blocks from index num_skipped on that a request would need after the whole prefix."""
        places = self._tiers.places(self.chain, len(self.chain.keys), num_skipped)
        return tuple(place for place in places if not self.is_known(place))

    def on_disk(self, num_skipped: int) -> tuple[int, tuple[Place, ...]]:
        """Return the length of the longest prefix here or on disk, and its disk-only blocks from num_skipped on."""
        return self._tiers.on_disk(self.chain, num_skipped)

    def is_known(self, place: Place) -> bool:
        """Return True if the block is already here, so that receiving it is unnecessary."""
        return self._tiers.has(self.chain, place)

    def reserve(self, num_blocks: int, *, is_early: bool = False) -> Future[list[int]]:
        """Reserve up to num_blocks host blocks, as available; an empty list means there is no room.

        Args:
            is_early: no data arrives yet, so half of host memory is left free.
        """
        future: Future[list[int]] = Future()
        future.set_running_or_notify_cancel()

        def reserve() -> None:
            if self._is_closed:
                future.set_exception(Cancelled("the incoming prefix was canceled"))
                return
            host = self._tiers.host
            if not self._tables:  # pin what is here already, so that reserving does not evict it
                self._tables.append(host.hold(self._kept()))
                self._tiers.prefixes.renew(self._keys())
            num_left = host.pool.num_blocks // 2 if is_early else 0
            table = host.reserve(min(num_blocks, max(0, host.pool.num_free - num_left)))
            self._tables.append(table)
            block_ids = table.block_ids()
            host.when_settled(table, lambda: self._reserve(block_ids, future))

        self._tiers.ask(reserve)
        return future

    def read(self, places: Sequence[Place], block_ids: Sequence[int]) -> int:
        """Load blocks from disk and insert them, up to the first invalid one; return their number. Blocks the thread.

        Raises:
            Cancelled: the import was closed.
            Unavailable: the engine has ended.
        """
        disk = self._tiers.disk
        found = [bytearray(self.bytes_per_block) for _ in places]
        num_read = 0
        if disk is not None:
            reads = [
                disk.read(self.chain.key(place), memoryview(one)) for place, one in zip(places, found, strict=True)
            ]
            try:
                while num_read < len(reads) and reads[num_read].result():
                    self.write(block_ids[num_read], 0, found[num_read])
                    num_read += 1
            except CancelledError:
                raise Unavailable("the server is shutting down") from None
        self.enter(places[:num_read], block_ids[:num_read])
        return num_read

    def write(self, block_id: int, start: int, contents: bytes | bytearray) -> None:
        """Write a part of a reserved block at a byte offset.

        Raises:
            Cancelled: the import was closed, and the block may have been reallocated.
            InternalError: the block is not reserved, was already entered, or the write exceeds it.
        """
        with self._lock:
            if self._is_closed:
                raise Cancelled("the incoming prefix was canceled")
            if block_id not in self._reserved or start + len(contents) > self.bytes_per_block:
                raise InternalError(f"host block {block_id} is written at {start}, outside this prefix")
            self._tiers.blocks.view(block_id)[start : start + len(contents)] = contents

    def enter(self, places: Sequence[Place], block_ids: Sequence[int]) -> None:
        """Insert written blocks into the cache, after which they must not be written. Blocks cached since then stay."""
        with self._lock:
            if self._is_closed:
                return
            if not self._reserved.issuperset(block_ids):
                raise InternalError(f"not all of the host blocks {list(block_ids)[:8]} to insert are reserved")
            self._reserved.difference_update(block_ids)
        reaches = self._tiers.reaches
        named = [
            (self.chain.entry(place, reaches), block_id) for place, block_id in zip(places, block_ids, strict=True)
        ]
        self._tiers.ask(lambda: self._enter(named))

    def num_known(self) -> Future[int]:
        """Return the length of the cached prefix once the entered blocks are inserted."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        self._tiers.ask(lambda: future.set_result(self._tiers.num_known(self.chain)))
        return future

    def close(self) -> Future[int]:
        """Release all blocks; return the length of the cached prefix. Any thread may call it, repeatedly."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._is_closed = True
            self._reserved.clear()

        def close() -> None:
            tables, self._tables = self._tables, []
            for table in tables:
                self._tiers.host.let_go(table)
            future.set_result(self._tiers.num_known(self.chain))

        self._tiers.ask(close)
        return future

    # --- on the engine thread ---------------------------------------------------------------------------------------

    def _kept(self) -> list[Key]:
        """Return the keys of the prefix that host memory stores."""
        return [key for key in self._keys() if key in self._tiers.host]

    def _keys(self) -> list[Key]:
        """Return the keys of all blocks, of every KV group."""
        return [key_in_group(key, group) for key in self.chain.keys for group in range(self.num_kv_groups)]

    def _reserve(self, block_ids: list[int], future: Future[list[int]]) -> None:
        with self._lock:
            if not self._is_closed:
                self._reserved.update(block_ids)
        future.set_result(block_ids)

    def _enter(self, named: Sequence[tuple[Entry, int]]) -> None:
        if self._tables:  # not closed: the blocks still belong to this import
            for entry, block_id in named:
                self._tiers.host.take_in(entry.key, block_id, entry)
