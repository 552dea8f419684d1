"""Export of a prefix to another server: found in both tiers, pinned, and staged in host memory a few blocks per step.

    found    [d0][d1][h2][d3] | [d4][h5][d6]      d on the device, h in host memory; all are pinned from here on
    staged   [h .. h .. h .. h] settled           device blocks are copied to reserved host blocks
    read     bytes, on the reader's thread        a part is released after it was read

Parts are staged in sequence, one per step, whether or not they are read. Device blocks are therefore pinned for one
step per part, and a slow reader does not extend that. Requests that need these blocks wait for no more than these
steps. An export next to others is truncated if more than half of the pool would be pinned.

Full blocks of a prompt and their hashes: the identity of a prefix that is transferred.

Export to a data port (`BlockExport`): nothing is staged. A part's device blocks stay pinned until the part is read into
device arrays, which waits for no more than one step.

Import of a prefix from another server: written to host memory, and hit by the next request.

    reserve(n)              host blocks without pending copies, exclusive to the import; fewer if there is no room
    write(block_id, ...)    their bytes, on the receiver's thread
    enter(positions, ids)   insert complete, verified blocks into the cache
    read(positions, ids)    write and enter blocks from a connector, before a prefix that memory has in part leaves

Blocks that were entered or already in host memory are pinned until `close`, so no part of a prefix evicts another. The
prefix's device blocks move to the end of the eviction order, and are evicted to host memory.

Thread-safe front end of prefix transfers, for one pool or the pools of all replicas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import TypeVar

from jpaged.engine.executor import BlockArrays, Geometry, HostBlocks
from jpaged.engine.executor.io import WindowSpec
from jpaged.engine.kv_cache.blocks import BlockHash, BlockTable, block_keys, group_block_hash
from jpaged.engine.kv_cache.connector import PrefillRate
from jpaged.engine.kv_cache.eviction.free_list import CachedBlock
from jpaged.engine.kv_cache.interface import KVCacheManager
from jpaged.engine.kv_cache.offload.connector_tier import ConnectorTier
from jpaged.engine.kv_cache.offload.host import HostTier
from jpaged.engine.kv_cache.prefix_cache import PinnedForRead, PrefixCacheManager, num_usable
from jpaged.errors import Cancelled, InternalError, JpagedError, Unavailable, Unsupported


@dataclass(frozen=True, slots=True)
class BlockHashChain:
    """Leading full blocks of a prompt.

    Attributes:
        root: parent hash of the first block.
        token_ids: tokens of exactly these blocks.
        keys: hash of each block.
    """

    root: BlockHash
    token_ids: tuple[int, ...]
    keys: tuple[BlockHash, ...]

    @classmethod
    def of(
        cls, root: BlockHash, token_ids: Sequence[int], block_size: int, num_blocks: int | None = None
    ) -> BlockHashChain:
        """Return the chain of the first full blocks of some tokens; takes up to a microsecond per block."""
        most = len(token_ids) // block_size
        num_blocks = most if num_blocks is None else min(num_blocks, most)
        whole = tuple(token_ids[: num_blocks * block_size])
        return cls(root, whole, tuple(block_keys(root, whole, block_size)))

    def key(self, position: BlockPosition) -> BlockHash:
        """Return the cache key of a block."""
        return group_block_hash(self.keys[position.index], position.kv_group)

    def entry(self, position: BlockPosition, reaches: Sequence[WindowSpec]) -> CachedBlock:
        """Return the eviction entry of a block; in a sliding window its only parents are attention sinks."""
        needed = reaches[position.kv_group].above(position.index)
        above = None if needed is None else group_block_hash(self.keys[needed], position.kv_group)
        return CachedBlock(self.key(position), above, position.index, self.root)


@dataclass(frozen=True, slots=True, order=True)
class BlockPosition:
    """Position of a block: index in a chain, and KV group."""

    index: int
    kv_group: int


_MAX_PART_BYTES, _MAX_PART_BLOCKS = 64 << 20, 512
"""Maximum of an exported part that a data port offers at once."""
MAX_STAGED_BYTES, MAX_STAGED_BLOCKS = 4 << 20, 64
"""Maximum copied to host memory per step, next to the step's rows."""
HURRIED = 4
"""Factor on that for a prompt that a client waits for, on a server that only computes prompts."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Memory tiers that exports and imports use. Only the engine thread writes.

    Attributes:
        limit: returns the number of device blocks that requests and pins may use.
        ask: posts a callable to the engine thread, to run between two steps.
        connectors: tiers whose blocks are loaded to host memory before an export.
    """

    prefixes: PrefixCacheManager
    held: PinnedForRead
    host: HostTier
    blocks: HostBlocks
    reaches: tuple[WindowSpec, ...]
    limit: Callable[[], int]
    ask: Callable[[Callable[[], None]], None]
    connectors: tuple[ConnectorTier, ...] = ()

    @property
    def num_blocks_at_once(self) -> int:
        """Return the maximum number of blocks moved per step."""
        return max(1, min(MAX_STAGED_BLOCKS, MAX_STAGED_BYTES // self.blocks.bytes_per_block))

    @property
    def num_free_to_leave(self) -> int:
        """Return the device blocks that another export may pin: all for the only one, else half the pool in total."""
        num_held, limit = self.held.num_blocks, self.limit()
        return max(0, limit // 2 - num_held) if num_held else limit

    def num_known(self, chain: BlockHashChain) -> int:
        """Return the length of the longest cached prefix. Any thread may ask."""
        return num_usable(chain.keys, self.reaches, self.prefixes.has_prefix)

    def num_findable(self, chain: BlockHashChain) -> int:
        """Return the same, with blocks of connectors if loading is faster than computing. Any thread may ask."""
        num_blocks, away = self.lookup(chain, 0)
        if not away:
            return num_blocks
        connector = self.connector_with(chain.key(away[0]))
        is_worth = connector is not None and connector.is_worth(away[0].index, away[-1].index + 1, len(away))
        return num_blocks if is_worth else self.num_known(chain)

    def lookup(self, chain: BlockHashChain, num_skipped: int) -> tuple[int, tuple[BlockPosition, ...]]:
        """Return the length of the longest prefix, and its blocks that only connectors have. Any thread may ask."""
        has_prefix = self.prefixes.has_prefix
        if not self.connectors:
            return self.num_known(chain), ()
        for connector in self.connectors:
            connector.refresh(chain.keys)
        num_blocks = num_usable(
            chain.keys, self.reaches, lambda key: has_prefix(key) or self.connector_with(key) is not None
        )
        away = [
            position for position in self.positions(chain, num_blocks, num_skipped) if not self.has(chain, position)
        ]
        return num_blocks, tuple(position for position in away if self.connector_with(chain.key(position)) is not None)

    def connector_with(self, key: BlockHash) -> ConnectorTier | None:
        """Return the first connector that stores a key; None if none does. Any thread may ask."""
        return next((connector for connector in self.connectors if connector.lookup(key)), None)

    def has(self, chain: BlockHashChain, position: BlockPosition) -> bool:
        """Return True if a block is on the device or in host memory. Any thread may ask."""
        return self.prefixes.has_prefix(chain.key(position))

    def positions(self, chain: BlockHashChain, num_blocks: int, num_skipped: int) -> tuple[BlockPosition, ...]:
        """Return the blocks visible after num_blocks blocks or after one fewer: a prompt's last token always runs."""
        positions = []
        for kv_group, reach in enumerate(self.reaches):
            before = reach.first_block(max(0, num_blocks - 1))
            kept = reach.visible_blocks(before, num_blocks)
            positions += [BlockPosition(index, kv_group) for index in kept if index >= num_skipped]
        return tuple(sorted(positions))


@dataclass(slots=True, eq=False)
class _ExportPart:
    """Blocks that are staged and read together.

    Attributes:
        at_device: pinned device blocks, until they are staged.
        kept, staged: host blocks that were already cached there, and those reserved as copy targets.
        host_block_ids: host block of each position.
        is_there: done when the bytes may be read.
    """

    positions: tuple[BlockPosition, ...]
    at_device: BlockTable | None
    kept: BlockTable | None
    staged: BlockTable | None
    host_block_ids: list[int]
    is_there: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.is_there.set_running_or_notify_cancel()  # waiters cannot cancel it


class PrefixExport:
    """Export of a prefix, which pins blocks while they are read. Created on the engine thread, read by any other.

    Attributes:
        chain: identity of the prefix.
        num_found: full blocks of the prompt that are cached here.
        num_blocks: exported ones of these; fewer if host memory has no room for the rest.
        positions: exported blocks, parents first.

    Args:
        num_skipped: leading blocks that are not exported.
        is_hurried: more blocks are staged per step: see `HURRIED`.
    """

    def __init__(self, tiers: Tiers, chain: BlockHashChain, num_skipped: int, is_hurried: bool = False) -> None:
        self.chain = chain
        self._tiers = tiers
        self._num_at_once = tiers.num_blocks_at_once * (HURRIED if is_hurried else 1)
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_found = tiers.num_known(chain)
        self.num_blocks, self.positions = _that_fit(tiers, chain, self.num_found, num_skipped)
        self._parts = self._hold(chain)
        self._num_staged = 0
        self._stage()

    @property
    def num_parts(self) -> int:
        """Return the number of parts, which are read in sequence."""
        return len(self._parts)

    def get_positions(self, part: int) -> Sequence[BlockPosition]:
        """Return the blocks of a part."""
        return self._parts[part].positions

    def when_there(self, part: int) -> Future[None]:
        """Return a future that is done when the part may be read."""
        return self._parts[part].is_there

    def read(self, part: int, take: Callable[[BlockPosition, memoryview], None]) -> None:
        """Pass the bytes of each block of a part to `take`, then release the part. Call it on a thread that may block.

        Raises:
            Cancelled: the export was closed.
            InternalError: the part is not staged.
        """
        one = self._parts[part]
        with self._lock:
            if self._is_closed:
                raise Cancelled("the outgoing prefix was canceled")
            if not one.is_there.done():
                raise InternalError(f"part {part} of {len(self._parts)} is read before it is ready")
            for position, host_block_id in zip(one.positions, one.host_block_ids, strict=True):
                take(position, self._tiers.blocks.view(host_block_id))
        self._tiers.ask(lambda: self._let_go(one))

    def close(self) -> None:
        """Release everything that is still pinned; waits for a reader of a part. Any thread may call it, repeatedly."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._tiers.ask(self._let_all_go)

    # --- on the engine thread ---------------------------------------------------------------------------------------

    def _hold(self, chain: BlockHashChain) -> list[_ExportPart]:
        host, size = self._tiers.host, self._num_at_once
        parts = []
        for start in range(0, len(self.positions), size):
            positions = self.positions[start : start + size]
            here = [position for position in positions if chain.key(position) in host]
            away = [position for position in positions if chain.key(position) not in host]
            kept = host.hold([chain.key(position) for position in here])
            parts.append(
                _ExportPart(
                    positions, self._tiers.held.hold([chain.key(position) for position in away]), kept, None, []
                )
            )
            host_block_ids = dict(zip(here, kept.block_ids(), strict=True))
            parts[-1].host_block_ids = [host_block_ids.get(position, 0) for position in positions]
        for part in parts:  # after all host blocks are pinned, because reserving evicts
            assert part.at_device is not None
            part.staged = host.reserve(part.at_device.num_blocks)
            free = iter(part.staged.block_ids())
            part.host_block_ids = [host_block_id or next(free) for host_block_id in part.host_block_ids]
        return parts

    def _stage(self) -> None:
        """Start to stage the next part, which is ready once no copy to its host blocks is pending."""
        if self._num_staged == len(self._parts):
            return
        part = self._parts[self._num_staged]
        assert part.at_device is not None
        assert part.staged is not None
        for source, host_block_id in zip(part.at_device.block_ids(), part.staged.block_ids(), strict=True):
            self._tiers.host.copy_out(source, host_block_id)
        host_block_ids = BlockTable(len(part.host_block_ids))
        host_block_ids.extend(part.host_block_ids)
        self._tiers.host.on_transfers_done(host_block_ids, lambda: self._staged(part))

    def _staged(self, part: _ExportPart) -> None:
        if part.at_device is None:  # it was closed in the meantime
            return
        self._tiers.held.release(part.at_device)
        part.at_device = None
        self._num_staged += 1
        part.is_there.set_result(None)
        self._stage()

    def _let_go(self, part: _ExportPart) -> None:
        if part.at_device is not None:
            self._tiers.held.release(part.at_device)
        for table in (part.kept, part.staged):
            if table is not None:
                self._tiers.host.release(table)
        part.at_device = part.kept = part.staged = None

    def _let_all_go(self) -> None:
        for part in self._parts:
            self._let_go(part)
            if not part.is_there.done():
                part.is_there.set_exception(Cancelled("the outgoing prefix was canceled"))


def _that_fit(
    tiers: Tiers, chain: BlockHashChain, num_blocks: int, num_skipped: int
) -> tuple[int, tuple[BlockPosition, ...]]:
    """Return the longest prefix, up to num_blocks, whose device blocks may be pinned and staged; and its positions."""
    host, num_kv_groups = tiers.host, len(tiers.reaches)
    while True:
        positions = tuple(
            position for position in tiers.positions(chain, num_blocks, num_skipped) if tiers.has(chain, position)
        )
        keys = [chain.key(position) for position in positions]
        kept = host.hold([key for key in keys if key in host])  # pinned blocks are no room for the others
        num_away = len(keys) - kept.num_blocks
        num_short = num_away - min(host.pool.num_free, tiers.num_free_to_leave)
        host.release(kept)
        if num_short <= 0:
            return num_blocks, positions
        fewer = max(0, num_blocks - max(1, num_short // num_kv_groups))
        num_blocks = tiers.num_known(BlockHashChain(chain.root, chain.token_ids, chain.keys[:fewer]))


@dataclass(slots=True, eq=False)
class _ArrayPart:
    """Blocks that are read together: those on the device, then those in host memory.

    Attributes:
        at_device, at_host: pinned blocks, until they are read.
    """

    positions: tuple[BlockPosition, ...]
    at_device: BlockTable | None
    at_host: BlockTable | None


class BlockExport:
    """Export of a prefix as device arrays, in parts. Created on the engine thread, read by any other.

    Attributes:
        chain: identity of the prefix.

    Args:
        num_skipped: leading blocks that are not exported.
    """

    def __init__(self, tiers: Tiers, chain: BlockHashChain, num_skipped: int) -> None:
        self.chain = chain
        self._tiers = tiers
        _, positions = _that_fit(tiers, chain, tiers.num_known(chain), num_skipped)
        size = max(8, min(_MAX_PART_BLOCKS, _MAX_PART_BYTES // tiers.blocks.bytes_per_block))
        self._parts = [self._hold(positions[start : start + size]) for start in range(0, len(positions), size)]

    @property
    def num_parts(self) -> int:
        """Return the number of parts, parents first."""
        return len(self._parts)

    def get_positions(self, part: int) -> Sequence[BlockPosition]:
        """Return the blocks of a part, in the order of the rows."""
        return self._parts[part].positions

    def read(self, part: int) -> Future[BlockArrays]:
        """Start to read a part, and release its blocks then; Cancelled if the export was closed. Any thread may ask."""
        future: Future[BlockArrays] = Future()
        future.set_running_or_notify_cancel()
        one = self._parts[part]

        def read() -> None:
            if one.at_device is None or one.at_host is None:
                future.set_exception(Cancelled("the outgoing prefix was canceled"))
                return
            blocks = self._tiers.blocks
            future.set_result(blocks.read(one.at_device.block_ids(), one.at_host.block_ids()))
            self._release(one)

        # Moves that were decided before are dispatched then, so the blocks have their contents.
        self._tiers.ask(lambda: self._tiers.host.on_transfers_done(one.at_host or BlockTable(0), read))
        return future

    def close(self) -> None:
        """Release everything that is still pinned. Any thread may call it, repeatedly."""
        self._tiers.ask(self._release_all)

    # --- on the engine thread ---------------------------------------------------------------------------------------

    def _hold(self, positions: Sequence[BlockPosition]) -> _ArrayPart:
        host, keys = self._tiers.host, self.chain
        away = [position for position in positions if keys.key(position) not in host]
        here = [position for position in positions if keys.key(position) in host]
        at_device = self._tiers.held.hold([keys.key(position) for position in away])
        return _ArrayPart((*away, *here), at_device, host.hold([keys.key(position) for position in here]))

    def _release_all(self) -> None:
        for part in self._parts:
            self._release(part)

    def _release(self, part: _ArrayPart) -> None:
        if part.at_device is not None and part.at_host is not None:
            self._tiers.held.release(part.at_device)
            self._tiers.host.release(part.at_host)
        part.at_device = part.at_host = None


class PrefixImport:
    """Host blocks that a prefix is written to. Any thread may call; writes are serialized.

    Attributes:
        num_blocks_at_once: number of blocks to reserve per call.
    """

    def __init__(self, tiers: Tiers, chain: BlockHashChain) -> None:
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

    def missing(self, num_skipped: int) -> tuple[BlockPosition, ...]:
        """Return the missing blocks from index num_skipped on that a request would need after the whole prefix."""
        positions = self._tiers.positions(self.chain, len(self.chain.keys), num_skipped)
        return tuple(position for position in positions if not self.is_known(position))

    def lookup(self, num_skipped: int) -> tuple[int, tuple[BlockPosition, ...]]:
        """Return the length of the longest prefix, and its connector-only blocks from num_skipped on."""
        return self._tiers.lookup(self.chain, num_skipped)

    def is_known(self, position: BlockPosition) -> bool:
        """Return True if the block is already here, so that receiving it is unnecessary."""
        return self._tiers.has(self.chain, position)

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
                self._tiers.prefixes.touch(self._keys())
            num_left = host.pool.num_blocks // 2 if is_early else 0
            table = host.reserve(min(num_blocks, max(0, host.pool.num_free - num_left)))
            self._tables.append(table)
            block_ids = table.block_ids()
            host.on_transfers_done(table, lambda: self._reserve(block_ids, future))

        self._tiers.ask(reserve)
        return future

    def read(self, positions: Sequence[BlockPosition], block_ids: Sequence[int]) -> int:
        """Load blocks from connectors and insert them, up to the first invalid one; return their number. May block.

        Raises:
            Cancelled: the import was closed.
            Unavailable: the engine has ended.
        """
        found = [bytearray(self.bytes_per_block) for _ in positions]
        reads: list[Future[bool]] = []
        for position, one in zip(positions, found, strict=True):
            connector = self._tiers.connector_with(self.chain.key(position))
            if connector is None:
                break
            reads.append(connector.load_block(self.chain.key(position), memoryview(one)))
        num_read = 0
        try:
            while num_read < len(reads) and reads[num_read].result():
                self.write(block_ids[num_read], 0, found[num_read])
                num_read += 1
        except CancelledError:
            raise Unavailable("the server is shutting down") from None
        self.enter(positions[:num_read], block_ids[:num_read])
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

    def enter(self, positions: Sequence[BlockPosition], block_ids: Sequence[int]) -> None:
        """Insert written blocks into the cache, after which they must not be written. Blocks cached since then stay."""
        with self._lock:
            if self._is_closed:
                return
            if not self._reserved.issuperset(block_ids):
                raise InternalError(f"not all of the host blocks {list(block_ids)[:8]} to insert are reserved")
            self._reserved.difference_update(block_ids)
        reaches = self._tiers.reaches
        named = [
            (self.chain.entry(position, reaches), block_id)
            for position, block_id in zip(positions, block_ids, strict=True)
        ]
        self._tiers.ask(lambda: self._enter(named))

    @property
    def place(self) -> object:
        """Return the place of the blocks, for a data port."""
        return self._tiers.blocks.place

    def receive(self, contents: BlockArrays, positions: Sequence[BlockPosition], block_ids: Sequence[int]) -> None:
        """Write device arrays to reserved blocks, and insert them into the cache.

        Args:
            positions: of the rows.
            block_ids: of the rows; 0 drops a row.
        """
        kept = [block_id for block_id in block_ids if block_id]
        with self._lock:
            if self._is_closed:
                raise Cancelled("the incoming prefix was canceled")
            if not self._reserved.issuperset(kept) or len(positions) != len(block_ids):
                raise InternalError(f"not all of the host blocks {kept[:8]} to write are reserved")
            self._reserved.difference_update(kept)
        named = [
            (self.chain.entry(position, self._tiers.reaches), block_id)
            for position, block_id in zip(positions, block_ids, strict=True)
            if block_id  # others may be beyond the chain
        ]

        def receive() -> None:
            if self._tables:  # not closed
                self._tiers.blocks.receive(contents, block_ids)
                self._enter(named)

        self._tiers.ask(receive)

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
                self._tiers.host.release(table)
            future.set_result(self._tiers.num_known(self.chain))

        self._tiers.ask(close)
        return future

    # --- on the engine thread ---------------------------------------------------------------------------------------

    def _kept(self) -> list[BlockHash]:
        """Return the keys of the prefix that host memory stores."""
        return [key for key in self._keys() if key in self._tiers.host]

    def _keys(self) -> list[BlockHash]:
        """Return the keys of all blocks, of every KV group."""
        return [group_block_hash(key, group) for key in self.chain.keys for group in range(self.num_kv_groups)]

    def _reserve(self, block_ids: list[int], future: Future[list[int]]) -> None:
        with self._lock:
            if not self._is_closed:
                self._reserved.update(block_ids)
        future.set_result(block_ids)

    def _enter(self, named: Sequence[tuple[CachedBlock, int]]) -> None:
        if self._tables:  # not closed: the blocks still belong to this import
            for entry, block_id in named:
                self._tiers.host.insert(entry.key, block_id, entry)


_Export = TypeVar("_Export", PrefixExport, BlockExport)


class ReplicaTransfer:
    """Transfers to and from one pool.

    Args:
        ask: posts a callable to the engine thread, to run between two steps.
        prefill_rates: the rate of computing what is not transferred, if it is measured.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        geometry: Geometry,
        blocks: HostBlocks | None,
        ask: Callable[[Callable[[], None]], None],
        prefill_rates: Sequence[PrefillRate],
    ) -> None:
        self.geometry = geometry
        self.prefill_rates = tuple(prefill_rates)
        self._ask = ask
        self._tiers: Tiers | None = None
        self._obstacle = ""
        if memory.prefixes is None or memory.held is None:
            self._obstacle = "the prefix cache is off (enable_prefix_caching, kv_policy)"
        elif memory.prefixes.states is not None:
            self._obstacle = "the model has recurrent state, which stays on its device"
        elif memory.host is None:
            self._obstacle = "no host memory is configured for the transfer (swap_space)"
        elif blocks is None:
            self._obstacle = (
                "no process holds whole blocks: the model is split over several processes (coordinator_address)"
            )
        else:
            self._tiers = Tiers(
                memory.prefixes,
                memory.held,
                memory.host,
                blocks,
                geometry.reaches,
                lambda: memory.limit,
                ask,
                memory.connectors,
            )

    @property
    def tiers(self) -> Tiers:
        """Return the memory tiers.

        Raises:
            Unsupported: prefixes cannot be transferred; the message states why.
        """
        if self._tiers is None:
            raise Unsupported(f"prefixes cannot be transferred: {self._obstacle}")
        return self._tiers

    def leave(self, chain: BlockHashChain, num_skipped: int, is_hurried: bool) -> Future[PrefixExport]:
        """Find a prefix and pin it for export; see `PrefixExport`."""
        tiers = self.tiers
        return self._on_engine(lambda: PrefixExport(tiers, chain, num_skipped, is_hurried))

    def export(self, chain: BlockHashChain, num_skipped: int) -> Future[BlockExport]:
        """Find a prefix and pin it for a data port; see `BlockExport`."""
        tiers = self.tiers
        return self._on_engine(lambda: BlockExport(tiers, chain, num_skipped))

    def _on_engine(self, create: Callable[[], _Export]) -> Future[_Export]:
        future: Future[_Export] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(create())
            except JpagedError as error:
                future.set_exception(error)
                raise

        self._ask(run)
        return future


class KVTransfer:
    """Transfers to and from every pool of a server: one, or one per replica.

    Args:
        choose_replica: returns the index of the pool that a request with these block hashes would go to.
    """

    def __init__(
        self, each: Iterable[ReplicaTransfer], choose_replica: Callable[[Sequence[BlockHash]], int] = lambda keys: 0
    ) -> None:
        self.each = tuple(each)
        self._choose_replica = choose_replica

    @property
    def block_size(self) -> int:
        """Return the number of tokens per block."""
        return self.each[0].geometry.block_size

    @property
    def num_kv_groups(self) -> int:
        """Return the number of KV groups: blocks per token range."""
        return len(self.each[0].geometry.windows)

    @property
    def bytes_per_block(self) -> int:
        """Return the size of a transferred block.

        Raises:
            Unsupported: prefixes cannot be transferred.
        """
        return self.each[0].tiers.blocks.bytes_per_block

    def prefill_s(self, begin: int, end: int) -> float:
        """Return the seconds that this server takes to compute tokens `begin` to `end` of a prompt; a decode server's.

        With several replicas, that of the slowest one.
        """
        return max(rate.seconds(begin, end) for one in self.each for rate in one.prefill_rates)

    def kv_identity(self) -> bytes:
        """Return what the bytes of a block depend on; slow on the first call, see `HostBlocks.kv_identity`."""
        return self.each[0].tiers.blocks.kv_identity()

    @property
    def weights(self) -> bytes:
        """Return the digest of the current weights, see `root_block_hash`.

        Raises:
            Unsupported: prefixes cannot be transferred.
        """
        return self.each[0].tiers.prefixes.weights

    def chain(self, root: BlockHash, token_ids: Sequence[int]) -> BlockHashChain:
        """Return the full blocks of a prompt that may be cached; takes a few microseconds per block.

        Raises:
            Unsupported: prefixes cannot be transferred.
        """
        num_blocks = self.each[0].tiers.prefixes.num_cacheable_blocks(len(token_ids))
        return BlockHashChain.of(root, token_ids, self.block_size, num_blocks)

    def num_known(self, chain: BlockHashChain) -> int:
        """Return the length of the longest cached prefix, in the pool that has most of it."""
        return max(one.tiers.num_known(chain) for one in self.each)

    def num_findable(self, chain: BlockHashChain) -> int:
        """Return the same, with blocks of connectors if loading is faster than computing. Any thread may ask."""
        return max(one.tiers.num_findable(chain) for one in self.each)

    def leave(self, chain: BlockHashChain, num_skipped: int = 0, *, is_hurried: bool = False) -> Future[PrefixExport]:
        """Find a prefix in the pool that has most of it, and pin it while it is read.

        Args:
            num_skipped: leading blocks that the receiver has, which are not exported.
            is_hurried: a client waits for the export, so more blocks are staged per step.

        Raises:
            Unsupported: prefixes cannot be transferred.
        """
        return max(self.each, key=lambda one: one.tiers.num_known(chain)).leave(chain, num_skipped, is_hurried)

    def export(self, chain: BlockHashChain, num_skipped: int = 0) -> Future[BlockExport]:
        """Find a prefix in the pool that has most of it, and pin its blocks until they are read into device arrays.

        Raises:
            Unsupported: prefixes cannot be transferred.
        """
        return max(self.each, key=lambda one: one.tiers.num_known(chain)).export(chain, num_skipped)

    def arrive(self, chain: BlockHashChain) -> PrefixImport:
        """Start the import of a prefix, into the pool that requests with it would go to.

        Raises:
            Unsupported: prefixes cannot be transferred.
        """
        return PrefixImport(self.each[self._choose_replica(chain.keys)].tiers, chain)
