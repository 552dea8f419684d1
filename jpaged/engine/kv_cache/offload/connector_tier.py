"""Cached prefixes in a store outside the engine's memory: the tier below host memory, over any `ConnectorStore`.

    prefix cache ── stored, evicted ──> BlockWriter ──> store     in the background, limited in bytes per second
    waiting group <── cached blocks ── BlockReader <── store      many concurrent loads; other groups keep running

Keys are those of the prefix cache, so isolation by tenant, salt and adapter holds here too. The replicas of one server
share one store: each writes what it computes, and can load what the others wrote.

**Missing blocks** of a waiting group, and their insertion into the prefix cache (`BlockLoader`):

    prompt   [0][1][2][3][4][5]      0 and 1 are on the device, 2 in host memory, 3 and 4 in the store: these two are
                                     missing

**Loads** while their groups wait and others run (`BlockReader`):

    blocks    [0][1][2][3][4][5][6][7]      missing blocks of the prompt that the store has
    reads      in  in  done .. .. ..        many concurrent loads, into staging blocks
    device    [a ][b ]                      cached and free, as after a request that computed them

Valid blocks are copied to the device in order, limited per step so that running groups are not delayed. A group resumes
when all its blocks are loaded, when a load fails, or when it has waited as long as computing would have taken. It then
hits the loaded blocks and computes the rest. A group whose first missing block is being loaded for another group waits
for that group first.

**Writes** in the background (`BlockWriter`):

    due ──> staging block, or the cached block in host memory ──> saved by a thread ──> in the store

A key is due when its block enters the prefix cache, and again when it leaves the device. So the store follows memory
with a small delay, and a killed process loses little. The tier limits how many bytes a step starts to write.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from jpaged.config import CacheOptions
from jpaged.engine.executor import DeviceRates, Geometry, HostBlocks, Move
from jpaged.engine.kv_cache.blocks import BlockCopyPlan, BlockHash, BlockTable, group_block_hash
from jpaged.engine.kv_cache.connector import (
    ConnectorCounts,
    ConnectorStore,
    DaemonThreadPool,
    EngineStore,
    PrefillRate,
    TransferRate,
    open_store,
)
from jpaged.engine.kv_cache.events import ConnectorKVEvents
from jpaged.engine.kv_cache.offload.host import HostTier, Staging
from jpaged.engine.kv_cache.prefix_cache import BlockHashIndex, PrefixCacheManager, num_usable
from jpaged.engine.sequence import SequenceGroup
from jpaged.errors import InternalError, InvalidArgument, Unavailable


@dataclass(frozen=True, slots=True, order=True)
class PromptBlock:
    """Block at an index of a prompt in one KV group, with its cache key."""

    index: int
    kv_group: int
    key: BlockHash


class BlockLoader:
    """Loader of device blocks for waiting prompts. Loaded blocks are cached and free, without a reference."""

    def __init__(self, prefixes: PrefixCacheManager, ops: BlockCopyPlan) -> None:
        self._prefixes = prefixes
        self._ops = ops

    def missing(self, group: SequenceGroup, is_below: Callable[[BlockHash], bool]) -> list[PromptBlock]:
        """Return the blocks that memory misses of the longest prefix there or below, in prompt order.

        If the pool has too little room for the prefix, it is shortened. Blocks on the device or in host memory that the
        prompt hits also take free blocks. The prefix's device blocks move to the end of the eviction order, so that
        loading does not evict them.
        """
        prefixes, reaches = self._prefixes, self._prefixes.reaches
        keys = prefixes.lookup_keys(group)
        num_blocks = len(keys)
        while num_blocks := num_usable(
            keys[:num_blocks], reaches, lambda key: prefixes.has_prefix(key) or is_below(key)
        ):
            seen = [
                PromptBlock(i, kv_group, group_block_hash(keys[i], kv_group))
                for kv_group, reach in enumerate(reaches)
                for i in reach.seen(num_blocks)
            ]
            blocks = sorted(block for block in seen if not prefixes.has_prefix(block.key))
            if not blocks:
                return []
            num_needed = sum(self._takes_room(block.key) for block in seen)
            if prefixes.pool.can_allocate(num_needed):
                prefixes.touch([block.key for block in seen])
                return blocks
            num_blocks -= max(1, (num_needed - prefixes.pool.num_free) // len(reaches))
        return []

    def _takes_room(self, key: BlockHash) -> bool:
        """Return True if a hit on the key takes a free block of the pool: the cached block, or one to copy it to."""
        block_id = self._prefixes.cache.find(key)
        return block_id is None or self._prefixes.pool.is_free(block_id)

    def bring_in(self, group: SequenceGroup, block: PromptBlock, host_block_id: int) -> bool:
        """Insert a block that a reserved host block holds into the cache; return False if the pool has no room."""
        prefixes, leader = self._prefixes, group.live[0]
        if prefixes.cache.find(block.key) is not None:
            return True
        if not prefixes.pool.can_allocate(1):
            return False
        table = BlockTable(1)
        table.extend(prefixes.pool.allocate(1))
        self._ops.add(Move.SWAP_IN, host_block_id, table.block_id(0), passes=True)
        key = prefixes.lookup_keys(group)[block.index]
        prefixes.cache.insert_in_group(leader, block.index, table.block_id(0), key, block.kv_group)
        prefixes.pool.release(table)
        return True


_FIRST_BYTES_PER_S = 200e6
_LATENCY_S = 0.002
"""Assumed rate and latency of a store before there are measurements."""
_LEAST_WAIT_S = 0.05
"""Minimum wait: shorter ones are within the wake-up time of threads."""
_NUM_AT_ONCE = 16
"""Maximum number of groups processed per step."""


@dataclass(frozen=True, slots=True)
class _Read:
    """Block of a call that loads one or several."""

    call: Future[Sequence[bool]]
    index: int

    def is_done(self) -> bool:
        return self.call.done()

    def is_valid(self) -> bool:
        return self.call.result()[self.index]


@dataclass(slots=True, eq=False)
class _Fetch:
    """Load for one group.

    Attributes:
        host_block_ids, reads: of the first blocks: the staging block of each, and whether its read was valid.
        num_in: number of blocks that are finished.
        is_over: nothing more is inserted; only pending reads are awaited.
        began_s: time of the first step that processed it; None before that.
        until_s: deadline at which the group resumes in any case.
    """

    group: SequenceGroup
    blocks: list[PromptBlock]
    longest_s: float
    behind: _Fetch | None = None
    host_block_ids: list[int] = field(default_factory=list)
    reads: list[_Read] = field(default_factory=list)
    num_in: int = 0
    is_over: bool = False
    is_late: bool = False
    has_gone_on: bool = False
    began_s: float | None = None
    until_s: float = 0.0

    @property
    def is_done(self) -> bool:
        """Return True if the group need not wait any more."""
        return self.is_over or (self.behind is None and self.num_in == len(self.blocks))

    @property
    def is_empty(self) -> bool:
        """Return True if no read is pending."""
        return self.is_done and self.num_in == len(self.reads)


class BlockReader:
    """Loader of the blocks that waiting groups need. Only the engine thread calls it, except `is_worth`.

    Args:
        threads: executor with one thread per concurrent read.
        count: called with the number of loaded tokens, and whether a group resumed before its load completed.
        came: called with each key that was loaded.
    """

    def __init__(
        self,
        store: ConnectorStore,
        blocks: HostBlocks,
        staging: Staging,
        rates: DeviceRates,
        block_size: int,
        threads: Executor,
        count: Callable[[int, bool], None],
        came: Callable[[BlockHash], None],
    ) -> None:
        self._store = store
        self._blocks = blocks
        self._staging = staging
        self.prefill = PrefillRate(rates)
        self._block_size = block_size
        self._threads = threads
        self._count = count
        self._came = came
        self.rate = TransferRate(_FIRST_BYTES_PER_S, _LATENCY_S)
        self._fetches: dict[SequenceGroup, _Fetch] = {}
        self._wanting: dict[BlockHash, dict[_Fetch, None]] = {}  # fetches that wait for a key; none is empty
        self._leftover: list[_Fetch] = []

    @property
    def is_busy(self) -> bool:
        """Return True if a group waits, or reads for a group that no longer waits are pending."""
        return bool(self._fetches or self._leftover)

    @property
    def has_waiting_groups(self) -> bool:
        """Return True if a group waits, for at most as long as computing would take."""
        return bool(self._fetches)

    @property
    def under_way(self) -> list[Future[Sequence[bool]]]:
        """Return the calls of which a result is not processed."""
        return [*{read.call for fetch in self._all() for read in fetch.reads[fetch.num_in :]}]

    def block_s(self, key: BlockHash) -> float | None:
        """Return the seconds to read a block at the measured rate; None if the store lacks it."""
        return self._blocks.bytes_per_block / self.rate.bytes_per_s if self._store.lookup(key) else None

    def is_worth(self, begin: int, end: int, num_blocks: int) -> bool:
        """Return True if reading num_blocks is faster than computing blocks `begin` to `end`. Any thread may ask."""
        return self._compute_s(begin, end) > self.rate.seconds(num_blocks * self._blocks.bytes_per_block)

    def start_load(self, group: SequenceGroup, loader: BlockLoader) -> bool:
        """Start to load a group's prompt; return False if the store has nothing that is faster than computing."""
        blocks = loader.missing(group, self._store.lookup)
        if not blocks:
            return False
        begin, end = blocks[0].index, blocks[-1].index + 1
        if not self.is_worth(begin, end, len(blocks)):
            self.rate.speed_up(len(blocks) * self._blocks.bytes_per_block)
            return False
        first = blocks[0].key
        behind = next((other for other in self._wanting.get(first, ()) if other.blocks[0].key == first), None)
        self._fetches[group] = fetch = _Fetch(group, blocks, max(self._compute_s(begin, end), _LEAST_WAIT_S), behind)
        self._want(fetch)
        return True

    def cancel(self, group: SequenceGroup) -> None:
        """Stop loading for a group that has ended."""
        fetch = self._fetches.pop(group, None)
        if fetch is not None:
            self._want_no_more(fetch)
            fetch.is_over = fetch.has_gone_on = True
            self._leftover.append(fetch)

    def cancel_key(self, key: BlockHash | None) -> None:
        """Prevent pending loads from inserting a key; None stands for any key."""
        for fetch in self._fetches.values() if key is None else self._wanting.get(key, ()):
            fetch.is_over = True

    def advance(self, now_s: float, max_bytes: int, loader: BlockLoader) -> list[SequenceGroup]:
        """Insert loaded blocks, up to max_bytes, and start further reads; return the groups that resume now."""
        going_on = []
        for fetch in self._leftover:
            self._clear(fetch)
        self._leftover = [fetch for fetch in self._leftover if not fetch.is_empty]
        for fetch in list(islice(self._fetches.values(), _NUM_AT_ONCE)):
            if fetch.behind is not None:
                if not fetch.behind.has_gone_on:
                    continue
                self._want_no_more(fetch)
                fetch.behind, fetch.blocks = None, loader.missing(fetch.group, self._store.lookup)
                self._want(fetch)
            if fetch.began_s is None:
                fetch.began_s, fetch.until_s = now_s, now_s + fetch.longest_s
            max_bytes -= self._bring_in(fetch, max_bytes, loader)
            self._read_on(fetch)
            if now_s > fetch.until_s and not fetch.is_done:
                fetch.is_over = fetch.is_late = True
            if fetch.is_done:
                self._end(fetch, now_s)
                going_on.append(fetch.group)
        return going_on

    def _want(self, fetch: _Fetch) -> None:
        for block in fetch.blocks:
            self._wanting.setdefault(block.key, {})[fetch] = None

    def _want_no_more(self, fetch: _Fetch) -> None:
        for block in fetch.blocks:
            wanting = self._wanting[block.key]
            del wanting[fetch]
            if not wanting:
                del self._wanting[block.key]

    def _end(self, fetch: _Fetch, now_s: float) -> None:
        fetch.has_gone_on = True
        del self._fetches[fetch.group]
        self._want_no_more(fetch)
        self._leftover.append(fetch)
        self._count(0, fetch.is_over)
        if fetch.began_s is not None and (fetch.is_late or not fetch.is_over):  # late ones take at least that long
            waited_s = min(now_s - fetch.began_s, 2 * fetch.longest_s)
            self.rate.record(len(fetch.blocks) * self._blocks.bytes_per_block, waited_s)

    def _bring_in(self, fetch: _Fetch, max_bytes: int, loader: BlockLoader) -> int:
        """Insert loaded blocks in order; return the number of bytes moved."""
        num_bytes = 0
        while not fetch.is_over and num_bytes < max_bytes and fetch.num_in < len(fetch.reads):
            read = fetch.reads[fetch.num_in]
            if not read.is_done():
                break
            block, host_block_id = fetch.blocks[fetch.num_in], fetch.host_block_ids[fetch.num_in]
            if read.is_valid() and loader.bring_in(fetch.group, block, host_block_id):
                num_bytes += self._blocks.bytes_per_block
                self._came(block.key)
                self._count(0 if block.kv_group else self._block_size, False)
            else:
                fetch.is_over = True
            self._staging.give_back(host_block_id)
            fetch.num_in += 1
        return num_bytes

    def _read_on(self, fetch: _Fetch) -> None:
        """Start to read the next blocks, as far as staging blocks are free, several of them by one call."""
        while not fetch.is_over and len(fetch.reads) < len(fetch.blocks):
            first = len(fetch.reads)
            host_block_ids = self._staging.take_up_to(min(self._store.max_batch, len(fetch.blocks) - first))
            if not host_block_ids:
                return
            keys = [block.key for block in fetch.blocks[first : first + len(host_block_ids)]]
            views = [self._blocks.view(host_block_id) for host_block_id in host_block_ids]
            call = self._threads.submit(self._store.load_all, keys, views)
            fetch.host_block_ids += host_block_ids
            fetch.reads += [_Read(call, index) for index in range(len(keys))]

    def _clear(self, fetch: _Fetch) -> None:
        """Return the staging blocks of finished reads that no group waits for."""
        while fetch.num_in < len(fetch.reads) and fetch.reads[fetch.num_in].is_done():
            fetch.reads[fetch.num_in].is_valid()
            self._staging.give_back(fetch.host_block_ids[fetch.num_in])
            fetch.num_in += 1

    def check(self) -> None:
        """Check the bookkeeping of reads.

        Raises:
            InternalError: a block that is read into is free, or the waiting fetches of a key are wrong.
        """
        wanted = {(block.key, fetch) for fetch in self._fetches.values() for block in fetch.blocks}
        if wanted != {(key, fetch) for key, wanting in self._wanting.items() for fetch in wanting}:
            raise InternalError(
                f"{len(wanted)} blocks are pending, which do not match those of {len(self._wanting)} keys"
            )
        self._staging.check(one for fetch in self._all() for one in fetch.host_block_ids[fetch.num_in :])

    def _all(self) -> Iterator[_Fetch]:
        yield from self._fetches.values()
        yield from self._leftover

    def _compute_s(self, begin: int, end: int) -> float:
        """Return the seconds to compute the tokens of these blocks of a prompt."""
        return self.prefill.seconds(begin * self._block_size, end * self._block_size)


_MAX_LOOKS = 256
"""Maximum number of keys examined per step: most may be in the store, or evicted."""


@dataclass(slots=True, eq=False)
class _Spill:
    """Write of one block.

    Attributes:
        held: pinned cached block in host memory; None if the block is copied to the staging block `host_block_id`.
        since: `num_dispatched` when the copy was decided.
        is_wanted: False cancels the write; set by the engine thread, read by the writer thread.
    """

    key: BlockHash
    host_block_id: int
    held: BlockTable | None
    since: int
    is_wanted: bool = True
    written: Future[Sequence[bool]] | None = None


class BlockWriter:
    """Writer of due blocks. Only the engine thread calls it.

    Args:
        max_due: maximum number of waiting keys; beyond it the oldest, which is evicted soonest, is dropped.
        threads: executor with one thread, which writes.
        written: called with each written key.
    """

    def __init__(
        self,
        store: ConnectorStore,
        blocks: HostBlocks,
        host: HostTier,
        staging: Staging,
        max_due: int,
        threads: Executor,
        written: Callable[[BlockHash], None],
    ) -> None:
        self._store = store
        self._blocks = blocks
        self._host = host
        self._staging = staging
        self._max_due = max_due
        self._threads = threads
        self._written = written
        self._due: OrderedDict[BlockHash, None] = OrderedDict()
        self._landing: deque[_Spill] = deque()
        self._writing: deque[_Spill] = deque()
        self._under_way: dict[BlockHash, _Spill] = {}

    @property
    def is_busy(self) -> bool:
        """Return True if keys are due or being written."""
        return bool(self._due or self._under_way)

    @property
    def under_way(self) -> list[Future[Sequence[bool]]]:
        """Return the pending calls of the writer thread."""
        return [*{spill.written: None for spill in self._writing if spill.written is not None}]

    @property
    def progress(self) -> tuple[int, int, int]:
        """Return the numbers of due blocks, of those being copied and of those being written."""
        return len(self._due), len(self._landing), len(self._writing)

    @property
    def num_unwritten(self) -> int:
        """Return the number of blocks that must be written and are not."""
        writes = [spill.written for spill in self._writing if spill.is_wanted]
        num_written = sum(write is not None and write.done() and not write.cancelled() for write in writes)
        num_due = sum(not self._store.lookup(key) for key in self._due)
        return num_due + sum(spill.is_wanted for spill in self._landing) + len(writes) - num_written

    def note(self, key: BlockHash) -> None:
        """Mark a key as due, unless it is in the store or being written."""
        if key in self._due or key in self._under_way or self._store.lookup(key):
            return
        self._due[key] = None
        if len(self._due) > self._max_due:
            self._due.popitem(last=False)

    def cancel(self, key: BlockHash) -> None:
        """Prevent a key from being written, even if its write has started."""
        self._due.pop(key, None)
        if key in self._under_way:
            self._under_way[key].is_wanted = False

    def cancel_all(self) -> None:
        """Prevent all pending keys from being written."""
        self._due.clear()
        for spill in self._under_way.values():
            spill.is_wanted = False

    def advance(self, max_blocks: int, cache: BlockHashIndex) -> int:
        """Finish completed writes, start writes of copied blocks, and begin up to max_blocks more; return that count.

        Args:
            cache: index of the device blocks.
        """
        while self._writing and (written := self._writing[0].written) is not None and written.done():
            written.result()  # an error of the thread is an error of the engine
            self._written(self._writing[0].key)
            self._end(self._writing.popleft())
        settled: list[_Spill] = []
        while self._landing and self._host.is_settled([self._landing[0].host_block_id], self._landing[0].since):
            spill = self._landing.popleft()
            if spill.is_wanted:
                settled.append(spill)
            else:
                self._end(spill)
        self._start_writes(settled)
        return sum(self._begin(key, cache) for key in self._next(max_blocks))

    def _start_writes(self, settled: Sequence[_Spill]) -> None:
        """Submit the copied blocks, several of them to one call."""
        for start in range(0, len(settled), self._store.max_batch):
            spills = settled[start : start + self._store.max_batch]
            written = self._threads.submit(self._write, spills)
            for spill in spills:
                spill.written = written
            self._writing.extend(spills)

    def _next(self, max_blocks: int) -> Iterable[BlockHash]:
        """Yield due keys in order, up to max_blocks begun ones and while staging blocks are free."""
        num_begun = len(self._under_way)
        for _ in range(min(_MAX_LOOKS, len(self._due))):
            if len(self._under_way) - num_begun >= max_blocks or self._host_is_full:
                return
            yield self._due.popitem(last=False)[0]

    @property
    def _host_is_full(self) -> bool:
        """Return True if the number of pending writes has reached the number of staging blocks."""
        return len(self._under_way) >= self._staging.num_blocks

    def _begin(self, key: BlockHash, cache: BlockHashIndex) -> bool:
        """Begin to write a key; return False if it is in the store by now or evicted, or no staging block is free."""
        if self._store.lookup(key):
            return False
        since, block_id = self._host.num_dispatched, cache.find(key)
        if key in self._host:
            held = self._host.hold([key])
            spill = _Spill(key, held.block_id(0), held, since)
        elif block_id is None:
            return False
        elif (host_block_id := self._staging.take()) is None:
            self._due[key] = None
            self._due.move_to_end(key, last=False)
            return False
        else:
            self._host.copy_out(block_id, host_block_id)
            spill = _Spill(key, host_block_id, None, since)
        self._under_way[key] = spill
        self._landing.append(spill)
        return True

    def _end(self, spill: _Spill) -> None:
        del self._under_way[spill.key]
        if spill.held is None:
            self._staging.give_back(spill.host_block_id)
        else:
            self._host.release(spill.held)

    def _write(self, spills: Sequence[_Spill]) -> Sequence[bool]:
        """Write blocks, except canceled ones; runs on the writer thread."""
        kept, view = [one for one in spills if one.is_wanted], self._blocks.view
        return self._store.save_all(
            [(one.key, view(one.host_block_id), partial(getattr, one, "is_wanted")) for one in kept]
        )

    def check(self) -> None:
        """Check the bookkeeping of writes.

        Raises:
            InternalError: a block that is being written is lost, or free.
        """
        if len(self._landing) + len(self._writing) != len(self._under_way):
            raise InternalError(
                f"{len(self._landing)} blocks being copied and {len(self._writing)} being written are not "
                f"{len(self._under_way)}"
            )
        self._staging.check(spill.host_block_id for spill in self._under_way.values() if spill.held is None)


logger = logging.getLogger(__name__)

_NUM_READERS, _NUM_WRITERS = 8, 1
_STAGING_BYTES, _STAGING_SHARE = 64 << 20, 4
"""Host memory for transfers: maximum bytes, and divisor of the number of host blocks."""
_OUT_BYTES_PER_S, _OUT_BYTES_ALONE_PER_S = 64 << 20, 1 << 30
"""Bytes per second of writes to start while groups run, and while none runs."""
_OUT_BYTES, _IN_BYTES = 2 << 20, 4 << 20
"""Bytes per step that are written and loaded while groups run: milliseconds of copying."""
_BYTES_ALONE = 64 << 20
_END_S = 5.0
"""Timeout at close for a store that does not respond."""
_STALLED_S = 1.0
"""Time without progress after which pending calls count as hung: an idle engine then polls them rarely."""


def num_staged(bytes_per_block: int, num_host_blocks: int) -> int:
    """Return the number of host blocks reserved for transfers.

    Raises:
        InvalidArgument: there are too few.
    """
    num_blocks = min(_STAGING_BYTES // bytes_per_block, num_host_blocks // _STAGING_SHARE)
    if num_blocks < 2:
        raise InvalidArgument(
            "swap_space",
            f"host memory has {num_host_blocks} blocks of {bytes_per_block} bytes; a store below it uses one of "
            f"{_STAGING_SHARE} of them as staging buffers and requires at least {2 * _STAGING_SHARE}",
        )
    return num_blocks


def open_stores(
    options: CacheOptions, blocks: HostBlocks | None, geometry: Geometry, num_engines: int
) -> list[tuple[EngineStore, ...]]:
    """Open the store that the options select and return each engine's share; empty ones if there is none.

    Reads all weights, to compute the identity of the blocks.

    Raises:
        InvalidArgument: the store cannot be used, or there is too little room on disk or in host memory.
    """
    if options.store_option is None or blocks is None:
        return [()] * num_engines
    num_staged(blocks.bytes_per_block, geometry.num_host_blocks)
    tier, store = open_store(options, blocks)
    return [(EngineStore(store, tier),), *((EngineStore(store.share(), tier),) for _ in range(num_engines - 1))]


class ConnectorTier:
    """Tier of one engine over a store. Only the engine thread calls it, unless a method states otherwise.

    Implements `jpaged.engine.kv_cache.prefix_cache.LowerTier`.

    Attributes:
        is_worth: see `BlockReader.is_worth`.
        prefill: rate of the alternative to a load.

    Args:
        share: the engine's share of a store, which this tier owns until `close`.
        blocks: contents of host memory.

    Raises:
        InvalidArgument: host memory has too few blocks for transfers.
    """

    def __init__(
        self, share: EngineStore, blocks: HostBlocks, host: HostTier, geometry: Geometry, rates: DeviceRates
    ) -> None:
        self._store = store = share.store
        self._tier = share.tier
        self._bytes_per_block = blocks.bytes_per_block
        self._load_threads, self._save_threads = share.threads or (
            DaemonThreadPool(_NUM_READERS, f"jpaged-{share.tier}-load"),
            DaemonThreadPool(_NUM_WRITERS, f"jpaged-{share.tier}-save"),
        )
        self._events: ConnectorKVEvents | None = None

        def may_hold(key: BlockHash) -> None:
            if self._events is not None:
                self._events.may_hold(key)

        self._may_hold = may_hold
        num_blocks = num_staged(blocks.bytes_per_block, geometry.num_host_blocks)
        num_out = max(1, num_blocks // 4)
        self._stagings = Staging(host, num_out), Staging(host, num_blocks - num_out)
        self._max_due = max_due = geometry.num_blocks + geometry.num_host_blocks
        self._writer = BlockWriter(store, blocks, host, self._stagings[0], max_due, self._save_threads, may_hold)
        self._reader = BlockReader(
            store,
            blocks,
            self._stagings[1],
            rates,
            geometry.block_size,
            self._load_threads,
            self._count,
            may_hold,
        )
        self.is_worth, self.prefill = self._reader.is_worth, self._reader.prefill
        self._counts = ConnectorCounts(store.counts)
        self._prefixes: PrefixCacheManager | None = None
        self._loader: BlockLoader | None = None
        self._used: dict[BlockHash, None] = {}
        self._noting: Future[None] | None = None
        self._lock = threading.Lock()
        self._lent: list[Future[bool]] = []  # reads for other servers
        self._allowance_bytes = 0.0
        self._last_s = 0.0
        self._progress_s = 0.0
        self._is_flushing = False

    def connect(self, prefixes: PrefixCacheManager, ops: BlockCopyPlan) -> None:
        """Connect the prefix cache whose blocks this tier stores and loads, with the queue of device moves."""
        self._prefixes, self._loader = prefixes, BlockLoader(prefixes, ops)
        self._events = ConnectorKVEvents(self._store, self._tier, prefixes.changes, prefixes.has_prefix)

    # --- changes of prefixes --------------------------------------------------------------------------------------

    def on_block_stored(self, key: BlockHash) -> None:
        if self._store.is_on:
            self._may_hold(key)
            self._writer.note(key)
            self._progress_s = self._last_s

    def on_blocks_hit(self, keys: Sequence[BlockHash]) -> None:
        for key in keys if self._store.is_on else ():
            self._used.pop(key, None)
            self._used[key] = None
        while len(self._used) > self._max_due:
            del self._used[next(iter(self._used))]

    def remove(self, key: BlockHash) -> None:
        self._writer.cancel(key)
        self._reader.cancel_key(key)
        self._store.remove(key)

    def reset(self) -> int:
        self._writer.cancel_all()
        self._reader.cancel_key(None)
        return self._store.reset()

    def cancel_loads(self) -> None:
        """Insert no block of pending loads; required if the keys of their groups change."""
        self._reader.cancel_key(key=None)

    def block_s(self, key: BlockHash) -> float | None:
        """Return the seconds to load a block; None if it is not there."""
        return self._reader.block_s(key)

    def refresh(self, keys: Sequence[BlockHash]) -> None:
        """Enter those of a chain of keys that the store has in its index, as far as a hit needs them.

        Any thread may call. Returns after 50 ms in any case (`ConnectorStore.refresh`).
        """
        if self._prefixes is not None:
            has_prefix, reaches = self._prefixes.has_prefix, self._prefixes.reaches
            hashes = (group_block_hash(key, kv_group) for key in keys for kv_group in range(len(reaches)))
            self._store.refresh(
                lambda is_stored: num_usable(keys, reaches, lambda key: has_prefix(key) or is_stored(key)),
                [key for key in hashes if not has_prefix(key)],
            )

    # --- exports to other servers ---------------------------------------------------------------------------------

    def lookup(self, key: BlockHash) -> bool:
        """Return True if the index of the store has the key. Any thread may ask."""
        return self._store.lookup(key)

    def load_block(self, key: BlockHash, into: memoryview) -> Future[bool]:
        """Read a block on a reader thread; the result is True if it was there and valid. Any thread may call.

        Raises:
            Unavailable: the tier is closed.
        """
        with self._lock:
            try:
                reading: Future[bool] = self._load_threads.submit(self._store.load, key, into)
            except RuntimeError:  # the executor is shut down
                raise Unavailable("the server is shutting down") from None
            self._lent = [one for one in self._lent if not one.done()]
            self._lent.append(reading)
        return reading

    # --- waiting groups -------------------------------------------------------------------------------------------

    def start_load(self, group: SequenceGroup) -> bool:
        """Start to load a waiting group's prompt; return False if it need not wait, else `poll` returns it later."""
        if self._prefixes is None or self._loader is None or not self._store.is_on:
            return False
        self.refresh(self._prefixes.lookup_keys(group))
        return self._reader.start_load(group, self._loader)

    def on_request_finished(self, group: SequenceGroup) -> None:
        """Handle the end of a group, whether or not it was waiting for a load."""
        self._reader.cancel(group)

    # --- steps ------------------------------------------------------------------------------------------------------

    def poll(self, now_s: float, *, is_alone: bool) -> list[SequenceGroup]:
        """Advance reads and writes before the step is scheduled; return the groups that need not wait any more.

        Args:
            is_alone: no group runs that the copies would delay.
        """
        if self._prefixes is None or self._loader is None or self._events is None:
            return []
        was_pending = self._pending
        self._events.advance()
        max_bytes = self._allowed_bytes(now_s, is_alone)
        if not self._store.is_on:
            self._writer.cancel_all()
        self._note_used()
        num_begun = self._writer.advance(max_bytes // self._bytes_per_block, self._prefixes.cache)
        self._allowance_bytes -= num_begun * self._bytes_per_block
        going_on = self._reader.advance(now_s, _BYTES_ALONE if is_alone else _IN_BYTES, self._loader)
        if self._pending != was_pending or not self._is_pending or self._reader.has_waiting_groups:
            self._progress_s = now_s
        return going_on

    def flush(self) -> bool:
        """Write cached blocks that the store lacks as fast as possible from now on; return True if none can follow."""
        self._is_flushing = True
        return not (self._store.is_on and self._writer.is_busy)

    @property
    def is_busy(self) -> bool:
        """Return True if reads, writes or removals are pending: steps must run even if no group does.

        Calls that hang in a store that is off need no steps.
        """
        return self._is_pending and (self._store.is_on or not self.is_stalled)

    @property
    def is_stalled(self) -> bool:
        """Return True if nothing that is pending has advanced for a second of steps: they may run rarely."""
        return self._is_pending and self._last_s - self._progress_s > _STALLED_S

    @property
    def counts(self) -> ConnectorCounts:
        """Return a snapshot of the counters."""
        return replace(self._counts, store=self._store.counts, is_on=self._store.is_on)

    def load_fields(self) -> dict[str, float]:
        """Return the counters as fields of `jpaged.server_load.EngineLoad`."""
        counts, tier = self.counts, self._tier
        store = counts.store
        return {
            f"{tier}_is_on": int(counts.is_on),
            f"num_{tier}_hit_tokens": counts.num_tokens,
            f"num_{tier}_fallbacks": counts.num_fallbacks,
            f"num_{tier}_blocks": store.num_blocks,
            f"num_{tier}_blocks_read": store.num_read,
            f"num_{tier}_blocks_written": store.num_written,
            f"{tier}_bytes_read": store.read_bytes,
            f"{tier}_bytes_written": store.written_bytes,
            f"{tier}_read_s": store.read_s,
            f"{tier}_write_s": store.write_s,
            f"num_{tier}_blocks_dropped": store.num_dropped,
            f"num_{tier}_blocks_evicted": store.num_evicted,
            f"num_{tier}_failures": store.num_failures,
        }

    def check(self) -> None:
        """Check the bookkeeping of blocks in transfer.

        Raises:
            InternalError: a block is lost between memory and the store, or free during its transfer.
        """
        self._writer.check()
        self._reader.check()
        self._store.check()

    def close(self) -> None:
        """Wait for started calls and close the store; if calls time out, leave the store open to them."""
        with self._lock:
            for threads in (self._load_threads, self._save_threads):
                threads.shutdown(wait=False, cancel_futures=True)
        calls: list[Future[Any]] = [*self._writer.under_way, *self._reader.under_way, *self._lent]
        if self._noting is not None:
            calls.append(self._noting)
        left = wait_for(calls, _END_S).not_done
        if num_unwritten := self._writer.num_unwritten:
            logger.warning("KV connector (%s): %d blocks were not written", self._tier, num_unwritten)
        if left:
            logger.error("KV connector (%s): abandoned %d calls that did not return", self._tier, len(left))
            return
        self._store.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _is_behind(self) -> bool:
        return self._events is not None and self._events.is_busy

    @property
    def _is_pending(self) -> bool:
        return self._writer.is_busy or self._reader.is_busy or self._is_behind

    @property
    def _pending(self) -> tuple[int, ...]:
        """Return numbers that change when anything pending advances."""
        return *self._writer.progress, len(self._reader.under_way), self._is_behind

    def _note_used(self) -> None:
        """Submit the hits since the last call to the store, unless the previous update is still running."""
        if self._noting is not None and self._noting.done():
            self._noting.result()
            self._noting = None
        if self._used and self._noting is None:
            used, self._used = self._used, {}
            self._noting = self._save_threads.submit(self._store.touch, list(used))

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
