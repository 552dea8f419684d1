"""Physical blocks: which are free, and how many tables hold each of the others.

    free list   oldest ...... newest        allocate takes from the left, release appends on the right, a table's last
                                            block first: the list is in order of last use, or a policy's (`eviction/`)
    ref counts  block -> number of block tables that hold it; 0 exactly for the blocks of the free list
    content     a block of the free list may still hold a cached prefix; it is told to the cache when it is reissued

    fork          a [ 7 8 9 ]   b [ 7 8 9 ]       every block of the parent is shared
    copy on write a [ 7 8 9 ]   b [ 7 8 4 ]       b wrote: one copy 9 -> 4, and block 9 is a's alone

    keys        root ── a b c d ── e f g h    a full block is keyed by SHA-256 over its parent's key and its tokens
    KV groups   0 [ 7 8 9 ]   1 [ . . 6 ]     a table for each; of a window's the places that nobody sees any more are
                                              given up, and hold the null block; what is lossy keeps the first

Knows nothing of requests or devices. Block 0 is the null block: it is never allocated and never counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import NULL_BLOCK, BlockMoves, Move
from jpaged.engine.kv.eviction.free_list import FreeList
from jpaged.engine.kv.eviction.lru import LeastRecentlyUsed
from jpaged.errors import InternalError
from jpaged.pool import Owner

Key = bytes


def root_key(salt: str, tenant: str = "", adapter_digest: bytes = b"") -> Key:
    """The parent of a sequence's first block; no two triples of salt, tenant and adapter have the same.

    It means the same in every process: keys are what blocks are known by on disk and between servers.

    Args:
        adapter_digest: `Adapter.digest`, 32 bytes; empty is none.
    """
    if adapter_digest:
        return hashlib.sha256(b"jpaged/prefix/3\0" + adapter_digest + root_key(salt, tenant)).digest()
    if not tenant:
        return hashlib.sha256(b"jpaged/prefix/1\0" + salt.encode()).digest()
    named = tenant.encode()
    return hashlib.sha256(b"jpaged/prefix/2\0" + len(named).to_bytes(4, "big") + named + salt.encode()).digest()


def block_key(parent: Key, token_ids: Sequence[int]) -> Key:
    """The key of a full block that comes after `parent`."""
    return hashlib.sha256(parent + np.asarray(token_ids, np.int32).tobytes()).digest()


def key_in_group(key: Key, kv_group: int) -> Key:
    """What the cache knows a block of a KV group by: the groups keep other layers of the same tokens."""
    return key + bytes([kv_group]) if kv_group else key


class BlockTable:
    """The blocks of one sequence in one KV group, in order.

    Unused places hold the null block, so a row of it is ready for the device.

    Attributes:
        ids_m: [M] int32, read by the batch; written here alone.
        num_blocks: places that are used, those that were given up included.
        num_dropped: places at the beginning that were given up, but for num_sinks; 0 where none was.
        num_sinks: places in front of those that were given up, which keep their blocks.

    Args:
        ids_m: whose array it is, of null blocks; None is one of its own.
    """

    __slots__ = ("_ids", "ids_m", "num_blocks", "num_dropped", "num_sinks")

    def __init__(self, max_blocks: int, ids_m: NDArray[np.int32] | None = None) -> None:
        self.ids_m: NDArray[np.int32] = np.full(max_blocks, NULL_BLOCK, np.int32) if ids_m is None else ids_m
        self.num_blocks = 0
        self.num_dropped = self.num_sinks = 0
        self._ids: list[int] = []  # the same once more: an element of a list is read five times as fast

    def extend(self, block_ids: list[int]) -> None:
        self._ids += block_ids
        self.ids_m[self.num_blocks : len(self._ids)] = block_ids
        self.num_blocks = len(self._ids)

    def fill(self, block_ids: list[int], num_dropped: int, num_sinks: int = 0) -> None:
        """Takes blocks into an empty table, num_sinks of them in front of the places that it gives up."""
        num_sinks = min(num_sinks, num_dropped)
        num_empty = num_dropped - num_sinks
        self.extend([*block_ids[:num_sinks], *[NULL_BLOCK] * num_empty, *block_ids[num_sinks:]])
        self.num_dropped, self.num_sinks = (num_dropped, num_sinks) if num_empty else (0, 0)

    def replace(self, index: int, block_id: int) -> None:
        self._ids[index] = block_id
        self.ids_m[index] = block_id

    def block_id(self, index: int) -> int:
        return self._ids[index]

    def block_ids(self) -> list[int]:
        """The blocks that it holds."""
        return self._ids[: self.num_sinks] + self._ids[self.num_dropped :]

    def holds(self, index: int) -> bool:
        """Whether a place that is used was not given up."""
        return index >= self.num_dropped or index < self.num_sinks

    def drop(self, num_blocks: int, num_sinks: int = 0) -> list[int]:
        """Gives up the first num_blocks places but for num_sinks, always as many, and returns what they held."""
        first = max(self.num_dropped, num_sinks)
        block_ids = self._ids[first:num_blocks]
        if block_ids:
            self._ids[first:num_blocks] = [NULL_BLOCK] * len(block_ids)
            self.ids_m[first:num_blocks] = NULL_BLOCK
            self.num_dropped, self.num_sinks = num_blocks, num_sinks
        return block_ids

    def truncate(self, num_blocks: int = 0) -> list[int]:
        """Keeps the first num_blocks places and returns what the others held, for the pool to release."""
        block_ids = self._ids[num_blocks : self.num_sinks] + self._ids[max(num_blocks, self.num_dropped) :]
        del self._ids[num_blocks:]
        self.ids_m[num_blocks : self.num_blocks] = NULL_BLOCK
        self.num_blocks = len(self._ids)
        if num_blocks <= self.num_sinks:
            self.num_dropped = self.num_sinks = 0
        self.num_dropped = min(self.num_dropped, num_blocks)
        return block_ids


class KVHandle:
    """What the memory keeps of one sequence; nobody else writes it.

    Attributes:
        ids_gm: [G, M] int32, the rows of the tables.
        tables: the sequence's blocks on the device, a table for each KV group, all with as many places in use.
        host_tables: its blocks in host memory while it is swapped out.
        root: the parent of its first block; None when it takes no part in the prefix cache.
        num_registered_blocks: how many of its blocks were offered to the prefix cache.
        owner: what the root is made of.
    """

    __slots__ = ("_keys", "host_tables", "ids_gm", "num_registered_blocks", "owner", "root", "tables")

    def __init__(self, max_blocks: int, root: Key | None, num_kv_groups: int = 1, owner: Owner | None = None) -> None:
        self.owner = owner
        self.ids_gm: NDArray[np.int32] = np.full((num_kv_groups, max_blocks), NULL_BLOCK, np.int32)
        self.tables = tuple(BlockTable(max_blocks, ids_m) for ids_m in self.ids_gm)
        self.host_tables = tuple(BlockTable(max_blocks) for _ in self.ids_gm)
        self.root = root
        self.num_registered_blocks = 0
        self._keys: list[Key] = []

    def twin(self) -> KVHandle:
        """An empty handle for a sequence with the same tokens."""
        num_kv_groups, max_blocks = self.ids_gm.shape
        return KVHandle(max_blocks, self.root, num_kv_groups, self.owner)

    @property
    def num_blocks(self) -> int:
        """Places of its tables on the device that are in use."""
        return self.tables[0].num_blocks

    def block_ids(self) -> list[int]:
        """The blocks that it holds on the device, one KV group after the other."""
        return [block_id for table in self.tables for block_id in table.block_ids()]

    def keys(self, token_ids: Sequence[int], num_blocks: int, block_size: int) -> list[Key]:
        """The chain of the first num_blocks full blocks of token_ids, each computed once."""
        keys = self._keys
        while len(keys) < num_blocks and self.root is not None:
            i = len(keys)
            keys.append(block_key(keys[-1] if keys else self.root, token_ids[i * block_size : (i + 1) * block_size]))
        return keys

    def parent(self, index: int) -> Key:
        """The key that the block at `index` comes after; the keys before it are known."""
        return self._keys[index - 1] if index else self.root or b""

    def registered(self, num_blocks: int) -> None:
        """Notes that the first num_blocks were offered to the prefix cache, and none after them."""
        self.num_registered_blocks = num_blocks

    def share(self, parent: KVHandle, num_full: int) -> None:
        """Takes over what is known of the parent's first full blocks, which this one's sequence holds too.

        Of the others the parent may know keys as well, of tokens that are its own: it was preempted, and ran before.
        """
        self._keys = parent._keys[:num_full]
        self.num_registered_blocks = min(parent.num_registered_blocks, num_full)

    def rewind(self, num_blocks: int) -> None:
        """Forgets the keys of all blocks but the first num_blocks."""
        del self._keys[num_blocks:]
        self.num_registered_blocks = min(self.num_registered_blocks, num_blocks)

    def leave_cache(self) -> None:
        """Takes no part in the prefix cache any more."""
        self.root = None


class BlockPool:
    """Hands blocks out and takes them back. The only writer of reference counts and of the free list.

    Args:
        free: a free list that has all blocks; None is a plain one.
        on_reissue: called with a block of the free list just before it is given to somebody else.
        on_release: called with the blocks that a release has freed.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        free: FreeList | None = None,
        on_reissue: Callable[[int], None] = lambda block_id: None,
        on_release: Callable[[list[int]], None] = lambda block_ids: None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._on_reissue = on_reissue
        self._on_release = on_release
        self._free: FreeList = LeastRecentlyUsed.fromkeys(range(1, num_blocks + 1)) if free is None else free
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
        """Takes the blocks that go first, which were free the longest; each then has one reference.

        Raises:
            InternalError: there are too few; the caller asks `can_allocate` first.
        """
        if num_blocks > len(self._free):
            raise InternalError(f"{num_blocks} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        block_ids = []
        for _ in range(num_blocks):
            block_id, _ = self._free.popitem(last=False)
            self._on_reissue(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def allocate_last(self, num_blocks: int) -> list[int]:
        """Takes up to so many free blocks, those with the highest numbers, as `allocate` takes the oldest."""
        block_ids = sorted(self._free)[::-1][:num_blocks]
        for block_id in block_ids:
            del self._free[block_id]
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
        child.fill(block_ids, parent.num_dropped, parent.num_sinks)

    def copy_on_write(self, table: BlockTable, index: int) -> tuple[int, int] | None:
        """Makes the block at `index` the table's alone; the (source, destination) to copy, None when it was already."""
        source = table.block_id(index)
        if self._ref_counts[source] == 1:
            return None
        (destination,) = self.allocate(1)
        self._ref_counts[source] -= 1
        table.replace(index, destination)
        return source, destination

    def num_copies(self, writers: Iterable[tuple[BlockTable, int]]) -> int:
        """Copies that are made when each table's next token, so many in, is written: the last holder keeps a block."""
        shared: dict[int, int] = {}
        for table, num_tokens in writers:
            index = num_tokens // self.block_size
            if index < table.num_blocks and self._ref_counts[table.block_id(index)] > 1:
                block_id = table.block_id(index)
                shared[block_id] = shared.get(block_id, 0) + 1
        return sum(min(count, self._ref_counts[block_id] - 1) for block_id, count in shared.items())

    def num_owned(self, table: BlockTable) -> int:
        """Blocks that a table alone holds."""
        counts = self._ref_counts
        return sum(counts[block_id] == 1 for block_id in table.block_ids())

    def release(self, *tables: BlockTable, num_kept: int = 0) -> None:
        """Drops one reference to each block of a sequence's tables behind num_kept places, and takes it out.

        The last blocks go first, whatever the table: those of one place are of use together.

        Raises:
            InternalError: a block is free already.
        """
        if len(tables) == 1:
            self._let_go(reversed(tables[0].truncate(num_kept)))
            return
        rows = [reversed(table.truncate(num_kept)) for table in tables]
        self._let_go(block_id for place in zip_longest(*rows) for block_id in place if block_id is not None)

    def drop(self, table: BlockTable, num_blocks: int, num_sinks: int = 0) -> None:
        """Gives up the first num_blocks places of a table but for num_sinks, which drops its references to them."""
        self._let_go(table.drop(num_blocks, num_sinks))

    def _let_go(self, block_ids: Iterable[int]) -> None:
        freed = []
        for block_id in block_ids:
            count = self._ref_counts[block_id]
            if count <= 0:
                raise InternalError(f"block {block_id} is released but has {count} references")
            self._ref_counts[block_id] = count - 1
            if count == 1:
                self._free[block_id] = None
                freed.append(block_id)
        self._on_release(freed)

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


@dataclass(slots=True)
class _Batch:
    """Moves that run as one. Host blocks are entered into `reads` and `writes` as negative numbers."""

    moves: BlockMoves
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)

    def add(self, source: int, destination: int, read: int, written: int) -> None:
        self.moves.sources.append(source)
        self.moves.destinations.append(destination)
        self.reads.add(read)
        self.writes.add(written)

    def must_precede(self, read: int, written: int) -> bool:
        return read in self.writes or written in self.writes or written in self.reads


@dataclass(slots=True)
class MemoryCounts:
    """What memory did since the start, in tokens and blocks."""

    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_copies_on_write: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_host_hit_tokens: int = 0

    def brought_back(self, num_tokens: int) -> None:
        self.num_host_hit_tokens += num_tokens

    def looked_up(self, num_tokens: int, num_found: int) -> None:
        self.num_prefix_query_tokens += num_tokens
        self.num_prefix_hit_tokens += num_found

    def copied_on_write(self) -> None:
        self.num_copies_on_write += 1

    def moved(self, move: Move) -> None:
        self.num_swapped_out += move is Move.SWAP_OUT
        self.num_swapped_in += move is Move.SWAP_IN


@dataclass(slots=True)
class MemoryOps:
    """What the device has to move before a step, in as few transfers as the order allows.

    Each decision is made on the state that the ones before it leave behind: a block that is read by one move may be
    given away and written by the next. A move joins an earlier one of its kind unless it would overtake one that it
    depends on.

        decided    out 7>h1   copy 3>7   out 8>h2   copy 4>8   copy 5>3
        batches    out 7>h1 8>h2         copy 3>7 4>8          copy 5>3      the last writes what the first copy reads
    """

    counts: MemoryCounts = field(default_factory=MemoryCounts)
    _moves: list[tuple[Move, int, int]] = field(default_factory=list)
    passing: set[tuple[Move, int, int]] = field(default_factory=set)
    """Those of them whose block is on its way through host memory."""
    num_taken: int = 0
    """How often `take` was called: what was added when it was less is on its way."""

    def add(self, move: Move, source: int, destination: int, *, passes: bool = False) -> None:
        """Adds a move behind those that there are.

        Args:
            passes: the block is on its way through host memory, to a disk or another server or from there: that is
                counted where it goes to or comes from.
        """
        self._moves.append((move, source, destination))
        if passes:
            self.passing.add((move, source, destination))
        else:
            self.counts.moved(move)

    def take(self) -> MemoryOps:
        """The moves so far, which are not among these any more."""
        taken = MemoryOps(self.counts, self._moves, self.passing)
        self._moves, self.passing = [], set()
        self.num_taken += 1
        return taken

    def batches(self) -> Iterator[BlockMoves]:
        """The moves in batches to be run in order; none of them writes what it reads, or writes twice."""
        batches: list[_Batch] = []
        for move, source, destination in self._moves:
            read = -source if move is Move.SWAP_IN else source
            written = -destination if move is Move.SWAP_OUT else destination
            _batch_for(batches, move, read, written).add(source, destination, read, written)
        for batch in batches:
            yield batch.moves


def _batch_for(batches: list[_Batch], move: Move, read: int, written: int) -> _Batch:
    for batch in reversed(batches):
        if batch.must_precede(read, written):
            break
        if batch.moves.move is move:
            return batch
    batches.append(_Batch(BlockMoves(move, [], [])))
    return batches[-1]
