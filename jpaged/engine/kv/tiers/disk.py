"""Cached prefixes on local disk: the third tier, below host memory.

    prefix cache ── known, evicted ──> Spilling ──> BlockStore     in the background, limited in bytes per second
    waiting group <── cached blocks ── Fetching <── BlockStore     many concurrent reads; other groups keep running

Keys are those of the prefix cache, so isolation by tenant, salt and adapter holds here too. The replicas of one server
share one store: each writes what it computes, and can load what the others wrote.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jpaged.blockstore.store import BlockStore, StoreCounts
from jpaged.config import CacheOptions
from jpaged.engine.executor import DeviceRates, Geometry, HostBlocks
from jpaged.engine.kv.blocks import Key, MemoryOps
from jpaged.engine.kv.prefix_cache import PrefixCache
from jpaged.engine.kv.prefixes import Prefixes
from jpaged.engine.kv.tiers.bringing import Bringing
from jpaged.engine.kv.tiers.fetching import Fetching
from jpaged.engine.kv.tiers.host import HostTier
from jpaged.engine.kv.tiers.spilling import Spilling
from jpaged.engine.kv.tiers.staging import Staging
from jpaged.engine.kv.tiers.threads import DiskThreads
from jpaged.engine.kv.tiers.told import ToldOfDisk
from jpaged.engine.sequence import Group
from jpaged.errors import InvalidArgument, Unavailable

logger = logging.getLogger(__name__)

_NUM_READERS, _NUM_WRITERS = 8, 1
_STAGING_BYTES, _STAGING_SHARE = 64 << 20, 4
"""Host memory for disk transfers: maximum bytes, and divisor of the number of host blocks."""
_OUT_BYTES_PER_S, _OUT_BYTES_ALONE_PER_S = 64 << 20, 1 << 30
"""Bytes per second of writes to start while groups run, and while none runs."""
_OUT_BYTES, _IN_BYTES = 2 << 20, 4 << 20
"""Bytes per step that are written and loaded while groups run: milliseconds of copying."""
_BYTES_ALONE = 64 << 20
_END_S = 5.0
"""Timeout at close for a disk that does not respond."""


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """Counters of a disk tier since the start.

    Attributes:
        num_tokens: prompt tokens loaded.
        num_fallbacks: groups that computed blocks that failed to load or did not load in time.
        store: counters of the store, which several tiers may share.
    """

    store: StoreCounts
    num_tokens: int = 0
    num_fallbacks: int = 0
    is_on: bool = True


@dataclass(frozen=True, slots=True)
class Disk:
    """Block store of one engine.

    Attributes:
        store: owned by the engine until it stops; other engines may share it.
        threads: executors for reads and for writes; None creates them.
    """

    store: BlockStore
    threads: tuple[Executor, Executor] | None = None

    def tier(self, blocks: HostBlocks, geometry: Geometry, rates: DeviceRates) -> Callable[[HostTier], DiskTier]:
        """Return a function that creates the disk tier once the engine has host memory."""
        return lambda host: DiskTier(self, blocks, host, geometry, rates)


def num_staged(bytes_per_block: int, num_host_blocks: int) -> int:
    """Return the number of host blocks reserved for disk transfers.

    Raises:
        InvalidArgument: there are too few.
    """
    num_blocks = min(_STAGING_BYTES // bytes_per_block, num_host_blocks // _STAGING_SHARE)
    if num_blocks < 2:
        raise InvalidArgument(
            "swap_space",
            f"host memory has {num_host_blocks} blocks of {bytes_per_block} bytes; kv_disk_space uses one of "
            f"{_STAGING_SHARE} of them as staging buffers and requires at least {2 * _STAGING_SHARE}",
        )
    return num_blocks


def open_disks(
    options: CacheOptions, blocks: HostBlocks | None, geometry: Geometry, num_engines: int
) -> list[Disk | None]:
    """Open one persistent store for all engines and return each engine's share; None for each if disk is off.

    Reads all weights, to compute the identity of the blocks.

    Raises:
        InvalidArgument: the folder cannot be used, or there is too little room on disk or in host memory.
    """
    if not options.kv_disk_space or options.kv_disk_dir is None or blocks is None:
        return [None] * num_engines
    num_staged(blocks.bytes_per_block, geometry.num_host_blocks)
    max_bytes = int(options.kv_disk_space * 2**30)
    store = BlockStore(Path(options.kv_disk_dir), blocks.kv_identity(), blocks.bytes_per_block, max_bytes)
    return [Disk(store), *(Disk(store.share()) for _ in range(num_engines - 1))]


class DiskTier:
    """Disk tier of one engine. Only the engine thread calls it, unless a method states otherwise.

    Implements `jpaged.engine.kv.prefixes.Below`.

    Attributes:
        is_worth: see `Fetching.is_worth`.

    Args:
        disk: its store is owned by this tier until `close`.
        blocks: contents of host memory.

    Raises:
        InvalidArgument: host memory has too few blocks for disk transfers.
    """

    def __init__(self, disk: Disk, blocks: HostBlocks, host: HostTier, geometry: Geometry, rates: DeviceRates) -> None:
        self._store = store = disk.store
        self._bytes_per_block = blocks.bytes_per_block
        self._readers, self._writers = disk.threads or (
            DiskThreads(_NUM_READERS, "jpaged-disk-read"),
            DiskThreads(_NUM_WRITERS, "jpaged-disk-write"),
        )
        self._told: ToldOfDisk | None = None

        def may_hold(key: Key) -> None:
            if self._told is not None:
                self._told.may_hold(key)

        self._may_hold = may_hold
        num_blocks = num_staged(blocks.bytes_per_block, geometry.num_host_blocks)
        num_out = max(1, num_blocks // 4)
        self._stagings = Staging(host, num_out), Staging(host, num_blocks - num_out)
        self._max_due = max_due = geometry.num_blocks + geometry.num_host_blocks
        self._spilling = Spilling(store, blocks, host, self._stagings[0], max_due, self._writers, may_hold)
        self._fetching = Fetching(
            store,
            blocks,
            self._stagings[1],
            rates,
            geometry.block_size,
            self._readers,
            self._count,
            may_hold,
        )
        self.is_worth = self._fetching.is_worth
        self._counts = DiskCounts(store.counts)
        self._cache: PrefixCache | None = None
        self._bringing: Bringing | None = None
        self._used: dict[Key, None] = {}
        self._noting: Future[None] | None = None
        self._lock = threading.Lock()
        self._lent: list[Future[bool]] = []  # reads for other servers
        self._allowance_bytes = 0.0
        self._last_s = 0.0
        self._is_flushing = False

    def serve(self, prefixes: Prefixes, ops: MemoryOps) -> None:
        """Connect the prefix cache whose blocks this tier stores and loads, with the queue of device moves."""
        self._cache, self._bringing = prefixes.cache, Bringing(prefixes, ops)
        self._told = ToldOfDisk(self._store, prefixes.changes, prefixes.has_prefix)

    # --- changes of prefixes --------------------------------------------------------------------------------------

    def note(self, key: Key) -> None:
        if self._store.is_on:
            self._may_hold(key)
            self._spilling.note(key)

    def used(self, keys: Sequence[Key]) -> None:
        for key in keys if self._store.is_on else ():
            self._used.pop(key, None)
            self._used[key] = None
        while len(self._used) > self._max_due:
            del self._used[next(iter(self._used))]

    def forget(self, key: Key) -> None:
        self._spilling.forget(key)
        self._fetching.forget(key)
        self._store.forget(key)

    def reset(self) -> int:
        self._spilling.forget_all()
        self._fetching.forget(None)
        return self._store.reset()

    def block_s(self, key: Key) -> float | None:
        """Return the seconds to load a block from disk; None if it is not there."""
        return self._fetching.block_s(key)

    # --- exports to other servers ---------------------------------------------------------------------------------

    def __contains__(self, key: Key) -> bool:
        """Return True if the index of the store has the key. Any thread may ask."""
        return key in self._store

    def read(self, key: Key, into: memoryview) -> Future[bool]:
        """Read a block on a reader thread; the result is True if it was there and valid. Any thread may call.

        Raises:
            Unavailable: the tier is closed.
        """
        with self._lock:
            try:
                reading: Future[bool] = self._readers.submit(self._store.read, key, into)
            except RuntimeError:  # the executor is shut down
                raise Unavailable("the server is shutting down") from None
            self._lent = [one for one in self._lent if not one.done()]
            self._lent.append(reading)
        return reading

    # --- waiting groups -------------------------------------------------------------------------------------------

    def begin(self, group: Group) -> bool:
        """Start to load a waiting group's prompt; return False if it need not wait, else `advance` returns it later."""
        return self._bringing is not None and self._store.is_on and self._fetching.begin(group, self._bringing)

    def leave(self, group: Group) -> None:
        """Handle the end of a group, whether or not it was waiting for a load."""
        self._fetching.leave(group)

    # --- steps ------------------------------------------------------------------------------------------------------

    def advance(self, now_s: float, *, is_alone: bool) -> list[Group]:
        """Advance reads and writes before the step is scheduled; return the groups that need not wait any more.

        Args:
            is_alone: no group runs that the copies would delay.
        """
        if self._cache is None or self._bringing is None or self._told is None:
            return []
        self._told.advance()
        max_bytes = self._allowed_bytes(now_s, is_alone)
        if not self._store.is_on:
            self._spilling.forget_all()
        self._note_used()
        num_begun = self._spilling.advance(max_bytes // self._bytes_per_block, self._cache)
        self._allowance_bytes -= num_begun * self._bytes_per_block
        return self._fetching.advance(now_s, _BYTES_ALONE if is_alone else _IN_BYTES, self._bringing)

    def flush(self) -> bool:
        """Write all cached blocks that disk lacks as fast as possible from now on; return True if none is left."""
        self._is_flushing = True
        return not self._spilling.is_busy

    @property
    def is_busy(self) -> bool:
        """Return True if reads, writes or removals are pending: steps must run even if no group does."""
        is_behind = self._told is not None and self._told.is_busy
        return self._spilling.is_busy or self._fetching.is_busy or is_behind

    @property
    def counts(self) -> DiskCounts:
        """Return a snapshot of the counters."""
        return replace(self._counts, store=self._store.counts, is_on=self._store.is_on)

    def check(self) -> None:
        """Check the bookkeeping of blocks in transfer.

        Raises:
            InternalError: a block is lost between memory and disk, or free during its transfer.
        """
        self._spilling.check()
        self._fetching.check()
        self._store.check()

    def close(self) -> None:
        """Wait for started calls and close the store; if calls time out, leave the store open to them."""
        with self._lock:
            for threads in (self._readers, self._writers):
                threads.shutdown(wait=False, cancel_futures=True)
        asked: list[Future[Any]] = [*self._spilling.under_way, *self._fetching.under_way, *self._lent]
        if self._noting is not None:
            asked.append(self._noting)
        left = wait_for(asked, _END_S).not_done
        if left:
            logger.error("disk offload: abandoned %d disk calls that did not return", len(left))
            return
        self._store.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _note_used(self) -> None:
        """Submit the hits since the last call to the store, unless the previous update is still running."""
        if self._noting is not None and self._noting.done():
            self._noting.result()
            self._noting = None
        if self._used and self._noting is None:
            used, self._used = self._used, {}
            self._noting = self._writers.submit(self._store.touch, list(used))

    def _allowed_bytes(self, now_s: float, is_alone: bool) -> int:
        """Return the number of bytes that may start to be written in this step."""
        is_fast = is_alone or self._is_flushing
        rate, most = (_OUT_BYTES_ALONE_PER_S, _BYTES_ALONE) if is_fast else (_OUT_BYTES_PER_S, _OUT_BYTES)
        most = max(most, self._bytes_per_block)
        self._allowance_bytes = min(float(most), self._allowance_bytes + (now_s - self._last_s) * rate)
        self._last_s = now_s
        return int(self._allowance_bytes)

    def _count(self, num_tokens: int, is_fallback: bool) -> None:
        self._counts = replace(
            self._counts,
            num_tokens=self._counts.num_tokens + num_tokens,
            num_fallbacks=self._counts.num_fallbacks + is_fallback,
        )
