"""Physical blocks: free list, reference counts and block tables.

    free list   oldest ...... newest        allocate takes from the left, release appends on the right, a table's last
                                            block first: ordered by last use, or by a policy (`eviction/`)
    ref counts  block -> number of block tables that contain it; 0 exactly for the blocks of the free list
    content     a block of the free list may still hold a cached prefix; the cache is notified when it is reissued

    fork          a [ 7 8 9 ]   b [ 7 8 9 ]       every block of the parent is shared
    copy on write a [ 7 8 9 ]   b [ 7 8 4 ]       b wrote: one copy 9 -> 4, and block 9 belongs to a alone

    keys        root ── a b c d ── e f g h    the hash of a full block is SHA-256 over its parent's hash and its tokens
    KV groups   0 [ 7 8 9 ]   1 [ . . 6 ]     one table per KV group; entries outside a sliding window are dropped and
                                              hold the null block; a group with attention sinks keeps its first blocks

This module does not depend on requests or devices. Block 0 is the null block: it is never allocated and never counted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import NULL_BLOCK, BlockMoves, Move
from jpaged.engine.kv_cache.eviction.free_list import FreeList, LeastRecentlyUsed
from jpaged.errors import InternalError
from jpaged.pool import PrefixOwner

BlockHash = bytes


def root_block_hash(salt: str, tenant: str = "", adapter_digest: bytes = b"", weights: bytes = b"") -> BlockHash:
    """Return the parent hash of a sequence's first block, unique for each salt, tenant, adapter and weights.

    The hash is the same in every process, because disks and other servers identify blocks by it.

    Args:
        adapter_digest: `Adapter.digest`, 32 bytes; empty for no adapter.
        weights: `WeightVersion.digest`, 32 bytes; empty for those that the model was loaded with.
    """
    if weights:
        return hashlib.sha256(b"jpaged/prefix/4\0" + weights + root_block_hash(salt, tenant, adapter_digest)).digest()
    if adapter_digest:
        return hashlib.sha256(b"jpaged/prefix/3\0" + adapter_digest + root_block_hash(salt, tenant)).digest()
    if not tenant:
        return hashlib.sha256(b"jpaged/prefix/1\0" + salt.encode()).digest()
    named = tenant.encode()
    return hashlib.sha256(b"jpaged/prefix/2\0" + len(named).to_bytes(4, "big") + named + salt.encode()).digest()


def block_key(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of a full block that follows `parent`."""
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


_MAX_RUN_BLOCKS, _RUN_TOKENS, _NUM_RUNS = 64, 1024, 2048
"""Maximum size of a run of blocks, and the number of runs whose hashes are kept: 17 MB at most."""


def block_keys(
    parent: BlockHash, token_ids: Sequence[int], block_size: int, digests: Sequence[bytes] = ()
) -> list[BlockHash]:
    """Return the hashes of all full blocks of some tokens that follow `parent`.

    Args:
        digests: of what else than tokens the first blocks have; empty for tokens only.
    """
    tokens = array("i", token_ids).tobytes()
    if not any(digests):
        return hash_blocks(parent, tokens, block_size)
    block_bytes = 4 * block_size
    keys: list[BlockHash] = []
    for index, digest in enumerate(digests[: len(token_ids) // block_size]):
        block = tokens[index * block_bytes : (index + 1) * block_bytes]
        parent = hashlib.sha256(b"".join((parent, block, digest))).digest()
        keys.append(parent)
    return keys + hash_blocks(parent, tokens[len(keys) * block_bytes :], block_size)


def hash_blocks(parent: BlockHash, tokens: bytes, block_size: int) -> list[BlockHash]:
    """Return what `block_keys` does, for tokens as in `PackedTokens.packed`.

    Hashes of runs of blocks are kept, because each turn of a conversation begins with the tokens of the last one: 1900
    blocks then take 0.1 ms instead of 2.1. A run is found only after the same tokens, tenant and salt.
    """
    block_bytes = 4 * block_size
    run_bytes = block_bytes * max(1, min(_MAX_RUN_BLOCKS, _RUN_TOKENS // block_size))
    keys: list[BlockHash] = []
    for begin in range(0, len(tokens), run_bytes):
        run, last = tokens[begin : begin + run_bytes], keys[-1] if keys else parent
        keys += (_run_keys if len(run) == run_bytes else _run_keys.__wrapped__)(last, run, block_bytes)
    return keys


@lru_cache(_NUM_RUNS)
def _run_keys(parent: BlockHash, tokens: bytes, block_bytes: int) -> tuple[BlockHash, ...]:
    """Return the hashes of the full blocks of a run, given as bytes of tokens."""
    keys = []
    for begin in range(0, len(tokens) - block_bytes + 1, block_bytes):
        parent = hashlib.sha256(parent + tokens[begin : begin + block_bytes]).digest()
        keys.append(parent)
    return tuple(keys)


def group_block_hash(key: BlockHash, kv_group: int) -> BlockHash:
    """Return the cache key of a block of a KV group: groups store different layers of the same tokens."""
    return key + bytes([kv_group]) if kv_group else key


class BlockTable:
    """Block table of one sequence in one KV group.

    Unused entries hold the null block, so a row of it is ready for the device.

    Attributes:
        ids_m: [M] int32, read by the batch and written only by this class.
        num_blocks: entries in use, dropped ones included.
        num_dropped: leading entries that were dropped, except the num_sinks first ones; 0 if none was.
        num_sinks: entries before the dropped ones that keep their blocks (attention sinks).

    Args:
        ids_m: array of null blocks to write to; None allocates one.
    """

    __slots__ = ("_ids", "ids_m", "num_blocks", "num_dropped", "num_sinks")

    def __init__(self, max_blocks: int, ids_m: NDArray[np.int32] | None = None) -> None:
        self.ids_m: NDArray[np.int32] = np.full(max_blocks, NULL_BLOCK, np.int32) if ids_m is None else ids_m
        self.num_blocks = 0
        self.num_dropped = self.num_sinks = 0
        self._ids: list[int] = []  # the same ids as a list: reading an element is five times as fast

    def extend(self, block_ids: list[int]) -> None:
        self._ids += block_ids
        self.ids_m[self.num_blocks : len(self._ids)] = block_ids
        self.num_blocks = len(self._ids)

    def fill(self, block_ids: list[int], num_dropped: int, num_sinks: int = 0) -> None:
        """Add blocks to an empty table: num_sinks of them before the dropped entries, the others after."""
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
        """Return the blocks of the table, without dropped entries."""
        return self._ids[: self.num_sinks] + self._ids[self.num_dropped :]

    def holds(self, index: int) -> bool:
        """Return True if an entry in use was not dropped."""
        return index >= self.num_dropped or index < self.num_sinks

    def drop(self, num_blocks: int, num_sinks: int = 0) -> list[int]:
        """Drop the first num_blocks entries except num_sinks, and return their blocks; num_sinks must not change."""
        first = max(self.num_dropped, num_sinks)
        block_ids = self._ids[first:num_blocks]
        if block_ids:
            self._ids[first:num_blocks] = [NULL_BLOCK] * len(block_ids)
            self.ids_m[first:num_blocks] = NULL_BLOCK
            self.num_dropped, self.num_sinks = num_blocks, num_sinks
        return block_ids

    def truncate(self, num_blocks: int = 0) -> list[int]:
        """Keep the first num_blocks entries and return the blocks of the others, for the pool to release."""
        block_ids = self._ids[num_blocks : self.num_sinks] + self._ids[max(num_blocks, self.num_dropped) :]
        del self._ids[num_blocks:]
        self.ids_m[num_blocks : self.num_blocks] = NULL_BLOCK
        self.num_blocks = len(self._ids)
        if num_blocks <= self.num_sinks:
            self.num_dropped = self.num_sinks = 0
        self.num_dropped = min(self.num_dropped, num_blocks)
        return block_ids


class SequenceBlocks:
    """KV bookkeeping of one sequence, written only by the KV memory.

    Attributes:
        ids_gm: [G, M] int32, the rows of the tables.
        tables: device block tables, one for each KV group, all with the same number of entries in use.
        host_tables: block tables in host memory while the sequence is swapped out.
        root: parent hash of the first block; None if the sequence does not use the prefix cache.
        num_registered_blocks: number of leading blocks that were offered to the prefix cache.
        owner: salt, tenant and adapter that the root is computed from.
        rank: the part of the pool that its blocks are in (data-parallel attention); 0 if there is one.
        state_slot: slot of the recurrent state after the last scheduled step; 0 is none.
        state_source: slot that this step reads; another one if the state was shared.
        draft_slots: slots for the state after each draft token of the step in flight.
        stops: numbers of leading blocks after which a prefill chunk ends, because other prompts continue differently.
        replaced_key: hash of the checkpoint that the next one of this sequence replaces; None if there is none.
        digests: digests of what else than tokens the first blocks have (input embeddings); empty for tokens only.

    Args:
        packed: its first tokens, as in `PackedTokens.packed`; may be empty.
    """

    __slots__ = (
        *("_keys", "_packed", "digests", "host_tables", "ids_gm", "num_registered_blocks", "owner", "rank", "root"),
        *("draft_slots", "replaced_key", "state_slot", "state_source", "stops", "tables"),
    )

    def __init__(
        self,
        max_blocks: int,
        root: BlockHash | None,
        num_kv_groups: int = 1,
        owner: PrefixOwner | None = None,
        digests: tuple[bytes, ...] = (),
        packed: bytes = b"",
    ) -> None:
        self.owner = owner
        self.digests = digests
        self.ids_gm: NDArray[np.int32] = np.full((num_kv_groups, max_blocks), NULL_BLOCK, np.int32)
        self.tables = tuple(BlockTable(max_blocks, ids_m) for ids_m in self.ids_gm)
        self.host_tables = tuple(BlockTable(max_blocks) for _ in self.ids_gm)
        self.root = root
        self.num_registered_blocks = 0
        self.rank = 0
        self.state_slot = self.state_source = 0
        self.draft_slots: tuple[int, ...] = ()
        self.stops: frozenset[int] = frozenset()
        self.replaced_key: BlockHash | None = None
        self._keys: list[BlockHash] = []
        self._packed = packed

    def new_like(self) -> SequenceBlocks:
        """Return an empty handle for a sequence with the same tokens."""
        num_kv_groups, max_blocks = self.ids_gm.shape
        made = SequenceBlocks(max_blocks, self.root, num_kv_groups, self.owner, self.digests, self._packed)
        made.rank = self.rank
        return made

    def place(self, rank: int) -> None:
        """Set the part of the pool that later blocks are taken from; the sequence must have no blocks."""
        self.rank = rank

    @property
    def num_blocks(self) -> int:
        """Return the number of entries in use in each device block table."""
        return self.tables[0].num_blocks

    def block_ids(self) -> list[int]:
        """Return the device blocks of the sequence, KV group by KV group."""
        return [block_id for table in self.tables for block_id in table.block_ids()]

    def keys(self, token_ids: Sequence[int], num_blocks: int, block_size: int) -> list[BlockHash]:
        """Return the block hashes of at least the first num_blocks full blocks of token_ids; each is computed once."""
        keys, num_known = self._keys, len(self._keys)
        if num_known < num_blocks and self.root is not None:
            parent, begin, end = keys[-1] if keys else self.root, num_known * block_size, num_blocks * block_size
            if 4 * end <= len(self._packed) and not self.digests:
                keys += hash_blocks(parent, self._packed[4 * begin : 4 * end], block_size)
            else:
                keys += block_keys(parent, token_ids[begin:end], block_size, self.digests[num_known:num_blocks])
        return keys

    def is_of_tokens(self, index: int) -> bool:
        """Return True if only tokens distinguish the block at `index` from others after the same parent."""
        return index >= len(self.digests) or not self.digests[index]

    def parent(self, index: int) -> BlockHash:
        """Return the parent hash of the block at `index`; the hashes before it must have been computed."""
        return self._keys[index - 1] if index else self.root or b""

    def registered(self, num_blocks: int) -> None:
        """Set the number of leading blocks that were offered to the prefix cache."""
        self.num_registered_blocks = num_blocks

    def share(self, parent: SequenceBlocks, num_full: int) -> None:
        """Copy the block hashes of the parent's first full blocks, which this sequence shares.

        Hashes after these are not copied. A preempted parent may have more, of tokens that are not shared.
        """
        self._keys = parent._keys[:num_full]
        self.num_registered_blocks = min(parent.num_registered_blocks, num_full)

    def rewind(self, num_blocks: int) -> None:
        """Drop the block hashes after the first num_blocks."""
        del self._keys[num_blocks:]
        self.num_registered_blocks = min(self.num_registered_blocks, num_blocks)

    def set_root(self, root: BlockHash) -> None:
        """Replace the parent hash of a sequence without blocks; no-op if it does not use the prefix cache."""
        if self.root is not None:
            self.root = root
        self._keys, self.num_registered_blocks, self.replaced_key = [], 0, None

    def leave_cache(self) -> None:
        """Exclude the sequence from the prefix cache."""
        self.root = None

    def hold_state(self, source: int, slot: int) -> None:
        """Set the slots that the next step reads and writes; 0 is none."""
        self.state_source, self.state_slot = source, slot

    def hold_drafts(self, slots: tuple[int, ...]) -> None:
        """Set the slots for the states after draft tokens."""
        self.draft_slots = slots

    def stop_after(self, num_blocks: int) -> None:
        """Let a prefill chunk end after the first num_blocks blocks."""
        self.stops |= {num_blocks}

    def replace_checkpoint(self, key: BlockHash | None) -> None:
        """Set the checkpoint that the next one replaces."""
        self.replaced_key = key


class StateCheckpoint(NamedTuple):
    """State of a sequence at a block boundary.

    Attributes:
        is_lasting: the next checkpoint of the sequence does not replace it.
    """

    num_blocks: int
    slot: int
    is_lasting: bool


class StateSlots:
    """Allocator of slots for recurrent state, numbered from 1; the only writer of their reference counts.

    A sequence holds one slot, from its first step until it is released. A fork shares the parent's slot. The first
    of them that runs gets a new slot, for which its step reads the shared one; the last one writes in place. So there
    are never more slots in use than sequences.

    The other slots hold checkpoints: states at block boundaries, by the hash of the block before. A checkpoint costs no
    copy, because it takes over the sequence's slot: the next step reads that one and writes another.

        slot      4   5
        step 7    w           the state after 32 tokens, which becomes a checkpoint
        step 8    r   w
        hit       r       w   another sequence begins after these tokens

    Checkpoints are evicted, least recently used first, if a sequence needs a slot. A sequence that is swapped out keeps
    its slot, which then counts as one of those for checkpoints.

    Each draft token of a step has a slot for the state after it. The sequence continues with the slot of the last
    accepted one, and releases the others:

        slot         4   5   6
        t7 a b       w   w   w     the last token and two drafts
        a accepted       .         its slot is the sequence's

    Args:
        num_spare: slots beyond those of running sequences: for checkpoints, some of them pinned, and swapped sequences.
    """

    def __init__(self, num_slots: int, num_spare: int = 0) -> None:
        self._free = list(range(num_slots, 0, -1))
        self._ref_counts = [0] * (num_slots + 1)
        self._checkpoints: dict[BlockHash, int] = {}  # least recently used first
        # Those of which not all tokens are known yet.
        self._pending: dict[SequenceBlocks, StateCheckpoint] = {}
        self._pins: Counter[BlockHash] = Counter()
        self._swapped: set[SequenceBlocks] = set()
        self._num_spare = num_spare

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def num_slots(self) -> int:
        """Number of slots, free or not."""
        return len(self._ref_counts) - 1

    @property
    def num_checkpoints(self) -> int:
        """Number of checkpoints that a prompt may hit."""
        return len(self._checkpoints)

    def __contains__(self, key: object) -> bool:
        return key in self._checkpoints

    def prepare(self, kv: SequenceBlocks) -> None:
        """Make the slot that a sequence's next step writes exclusive to it.

        Raises:
            InternalError: every slot is in use.
        """
        source = kv.state_slot
        while not (source and self._ref_counts[source] == 1) and not self._free:
            self._evict()
        if source and self._ref_counts[source] == 1:
            kv.hold_state(source, source)
            return
        slot = self._take()
        if source:
            self._ref_counts[source] -= 1
        kv.hold_state(source or slot, slot)

    def fork(self, parent: SequenceBlocks, child: SequenceBlocks) -> None:
        """Share the parent's slot with the child, which holds none."""
        if parent.state_slot:
            self._ref_counts[parent.state_slot] += 1
            child.hold_state(parent.state_slot, parent.state_slot)

    def release(self, kv: SequenceBlocks) -> None:
        """Release the slot of a sequence, if it holds one, and drop its pending checkpoint."""
        self._drop_pending(kv)
        self._swapped.discard(kv)
        kv.replace_checkpoint(None)
        self.accept(kv, kv.state_slot)
        if kv.state_slot:
            self._drop(kv.state_slot)
            kv.hold_state(0, 0)

    # --- draft tokens -----------------------------------------------------------------------------------------------

    def num_drafts(self, most: int) -> int:
        """Return for how many draft tokens of a sequence there are slots, up to `most`."""
        if most <= len(self._free):
            return most
        stored = Counter(slot for key, slot in self._checkpoints.items() if not self._pins[key])
        stored.update(pending.slot for pending in self._pending.values())
        return min(most, len(self._free) + sum(self._ref_counts[slot] == count for slot, count in stored.items()))

    def add_drafts(self, kv: SequenceBlocks, num_tokens: int) -> None:
        """Take slots for the states after the draft tokens of a sequence, until `accept`.

        Raises:
            InternalError: every slot is in use.
        """
        kv.hold_drafts(tuple(self._take() for _ in range(num_tokens)))

    def accept(self, kv: SequenceBlocks, slot: int) -> None:
        """Let a sequence continue from one of the slots that it holds, and release those for draft tokens."""
        for draft in kv.draft_slots:
            self._drop(kv.state_slot if draft == slot else draft)
        if slot in kv.draft_slots:
            kv.hold_state(slot, slot)
        kv.hold_drafts(())

    # --- swapped sequences ------------------------------------------------------------------------------------------

    def can_swap_out(self, num_sequences: int) -> bool:
        """Return True if this many sequences can keep their slots while others run."""
        return self._num_spare - self.num_pinned - len(self._swapped) >= num_sequences

    def swap_out(self, kv: SequenceBlocks) -> None:
        """Keep the slot of a sequence that no longer runs."""
        self._drop_pending(kv)
        self._swapped.add(kv)

    def swap_in(self, kv: SequenceBlocks) -> None:
        """Count the slot of a sequence among those of running ones again."""
        self._swapped.discard(kv)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def checkpoint(self, kv: SequenceBlocks, num_blocks: int, keys: Sequence[BlockHash], *, is_lasting: bool) -> None:
        """Store the state of a sequence, which is the one after its first num_blocks blocks.

        Args:
            keys: hashes of the blocks that the prefix cache has; if these are fewer, `commit` completes it.
        """
        self._drop_pending(kv)
        if kv.state_slot:
            self._ref_counts[kv.state_slot] += 1
            self._pending[kv] = StateCheckpoint(num_blocks, kv.state_slot, is_lasting)
            self.commit(kv, keys)

    def commit(self, kv: SequenceBlocks, keys: Sequence[BlockHash]) -> None:
        """Let prompts hit the pending checkpoint of a sequence, if its block is among `keys`, the cached ones."""
        pending = self._pending.get(kv)
        if pending is None or pending.num_blocks > len(keys):
            return
        del self._pending[kv]
        key, replaced = keys[pending.num_blocks - 1], kv.replaced_key
        is_new = key not in self._checkpoints
        if is_new:
            self._checkpoints[key] = pending.slot
        else:
            self._drop(pending.slot)
            self._touch(key)
        if replaced is not None and replaced != key and not self._pins[replaced]:
            self.remove(replaced)
        kv.replace_checkpoint(key if is_new and not pending.is_lasting else None)

    def restore(self, kv: SequenceBlocks, key: BlockHash) -> None:
        """Let a sequence that holds no slot continue from a checkpoint."""
        slot = self._touch(key)
        self._ref_counts[slot] += 1
        kv.hold_state(slot, slot)

    def remove(self, key: BlockHash) -> None:
        """Remove the checkpoint of a block that is no longer cached, if there is one."""
        slot = self._checkpoints.pop(key, 0)
        if slot:
            self._drop(slot)

    def reset(self) -> None:
        """Remove all checkpoints that are not pinned."""
        for key in [key for key in self._checkpoints if not self._pins[key]]:
            self.remove(key)

    def pin(self, key: BlockHash) -> bool:
        """Exclude a checkpoint from eviction; return False if there is none, or too many are pinned."""
        if key not in self._checkpoints or not (self._pins[key] or self.can_swap_out(1)):
            return False
        self._pins[key] += 1
        return True

    def unpin(self, key: BlockHash) -> None:
        """Undo one call of `pin`."""
        self._pins[key] -= 1

    @property
    def num_pinned(self) -> int:
        """Number of pinned checkpoints."""
        return sum(count > 0 for count in self._pins.values())

    def _touch(self, key: BlockHash) -> int:
        """Make a checkpoint the most recently used one; return its slot."""
        slot = self._checkpoints[key] = self._checkpoints.pop(key)
        return slot

    def _take(self) -> int:
        """Return a slot with one reference, of a checkpoint if none is free."""
        while not self._free:
            self._evict()
        slot = self._free.pop()
        self._ref_counts[slot] = 1
        return slot

    def _evict(self) -> None:
        """Remove the least recently used checkpoint, or a pending one.

        Raises:
            InternalError: there is none.
        """
        key = next((key for key in self._checkpoints if not self._pins[key]), None)
        if key is not None:
            self.remove(key)
        elif self._pending:
            self._drop_pending(next(iter(self._pending)))
        else:
            raise InternalError(f"all {self.num_slots} slots for recurrent state are in use")

    def _drop_pending(self, kv: SequenceBlocks) -> None:
        pending = self._pending.pop(kv, None)
        if pending is not None:
            self._drop(pending.slot)

    def _drop(self, slot: int) -> None:
        """Drop a reference to a slot."""
        self._ref_counts[slot] -= 1
        if not self._ref_counts[slot]:
            self._free.append(slot)

    def check(self, handles: Iterable[SequenceBlocks]) -> None:
        """Raise InternalError if a reference count differs from the number of holders."""
        held = Counter(slot for kv in handles for slot in (kv.state_slot, *kv.draft_slots) if slot)
        stored = Counter([*self._checkpoints.values(), *(pending.slot for pending in self._pending.values())])
        for slot, count in enumerate(self._ref_counts[1:], 1):
            if count != held[slot] + stored[slot] or (count == 0) != (slot in self._free):
                raise InternalError(
                    f"state slot {slot} has {count} references, but {held[slot]} sequences and {stored[slot]} "
                    "checkpoints hold it"
                )


class BlockPool:
    """Allocator of blocks; the only writer of reference counts and of the free list.

    Args:
        free: a free list that contains all blocks; None creates an LRU list for each part.
        dp_size: equal parts of consecutive blocks, from each of which a sequence takes all its blocks.
        on_reissue: called with a free block just before it is allocated again.
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
        dp_size: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dp_size = dp_size
        self._of_rank = num_blocks // dp_size
        self._on_reissue = on_reissue
        self._on_release = on_release
        self._free_lists: list[FreeList] = [
            LeastRecentlyUsed.fromkeys(range(rank * self._of_rank + 1, (rank + 1) * self._of_rank + 1))
            for rank in range(dp_size)
        ]
        if free is not None:
            self._free_lists = [free]
        self._ref_counts = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free_lists))

    def get_num_free(self, rank: int) -> int:
        """Return the number of free blocks in one part."""
        return len(self._free_lists[rank])

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def get_rank(self, block_id: int) -> int:
        """Return the part that a block is in."""
        return 0 if self.dp_size == 1 else (block_id - 1) // self._of_rank

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that num_tokens fill, the last one possibly in part."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int, rank: int = 0) -> bool:
        return num_blocks <= len(self._free_lists[rank])

    def is_free(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def count_free(self, block_ids: Iterable[int]) -> int:
        """Return the number of free blocks among some."""
        return list(map(self._ref_counts.__getitem__, block_ids)).count(0)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, num_blocks: int, rank: int = 0) -> list[int]:
        """Allocate the first blocks of the free list of a part, with one reference each.

        Raises:
            InternalError: too few blocks are free; the caller must check `can_allocate` first.
        """
        free = self._free_lists[rank]
        if num_blocks > len(free):
            raise InternalError(f"{num_blocks} blocks requested, but {len(free)} of {self._of_rank} are free")
        block_ids = []
        for _ in range(num_blocks):
            block_id, _ = free.popitem(last=False)
            self._on_reissue(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def allocate_last(self, num_blocks: int) -> list[int]:
        """Allocate up to num_blocks free blocks, the last ones of each part first."""
        free = (block_id for free in self._free_lists for block_id in free)
        block_ids = sorted(free, key=lambda block_id: (-((block_id - 1) % self._of_rank), block_id))[:num_blocks]
        for block_id in block_ids:
            del self._free_lists[self.get_rank(block_id)][block_id]
            self._on_reissue(block_id)
            self._ref_counts[block_id] = 1
        return block_ids

    def acquire(self, block_id: int) -> bool:
        """Add a reference to a block and keep its content. Return True if it was free (and still cached) until now."""
        was_free = self._ref_counts[block_id] == 0
        if was_free:
            del self._free_lists[self.get_rank(block_id)][block_id]
        self._ref_counts[block_id] += 1
        return was_free

    def acquire_all(self, block_ids: Iterable[int]) -> int:
        """Add a reference to each of several blocks; return how many were free until now."""
        counts, num_free = self._ref_counts, 0
        for block_id in block_ids:
            if counts[block_id] == 0:
                del self._free_lists[self.get_rank(block_id)][block_id]
                num_free += 1
            counts[block_id] += 1
        return num_free

    def fork(self, parent: BlockTable, child: BlockTable) -> None:
        """Add a reference to every block of the parent to the empty child table."""
        if child.num_blocks:
            raise InternalError(f"cannot fork into a table that has {child.num_blocks} blocks")
        block_ids = parent.block_ids()
        for block_id in block_ids:
            self.acquire(block_id)
        child.fill(block_ids, parent.num_dropped, parent.num_sinks)

    def copy_on_write(self, table: BlockTable, index: int) -> tuple[int, int] | None:
        """Make the block at `index` exclusive to the table; return the (source, destination) to copy, if any."""
        source = table.block_id(index)
        if self._ref_counts[source] == 1:
            return None
        (destination,) = self.allocate(1, self.get_rank(source))
        self._ref_counts[source] -= 1
        table.replace(index, destination)
        return source, destination

    def num_copies(self, writers: Iterable[tuple[BlockTable, int]]) -> int:
        """Return the copies needed to write the next token of each (table, num_tokens); the last holder copies none."""
        shared: dict[int, int] = {}
        for table, num_tokens in writers:
            index = num_tokens // self.block_size
            if index < table.num_blocks and self._ref_counts[table.block_id(index)] > 1:
                block_id = table.block_id(index)
                shared[block_id] = shared.get(block_id, 0) + 1
        return sum(min(count, self._ref_counts[block_id] - 1) for block_id, count in shared.items())

    def num_owned(self, table: BlockTable) -> int:
        """Return the number of blocks that only this table references."""
        counts = self._ref_counts
        return sum(counts[block_id] == 1 for block_id in table.block_ids())

    def release(self, *tables: BlockTable, num_kept: int = 0) -> None:
        """Remove the blocks after the first num_kept entries of a sequence's tables, and drop one reference to each.

        Blocks are freed last entry first, across tables: blocks of one entry are useful only together.

        Raises:
            InternalError: a block is already free.
        """
        if len(tables) == 1:
            self._let_go(reversed(tables[0].truncate(num_kept)))
            return
        rows = [reversed(table.truncate(num_kept)) for table in tables]
        self._let_go(block_id for place in zip_longest(*rows) for block_id in place if block_id is not None)

    def drop(self, table: BlockTable, num_blocks: int, num_sinks: int = 0) -> None:
        """Drop the first num_blocks entries of a table except num_sinks, and the references to their blocks."""
        self._let_go(table.drop(num_blocks, num_sinks))

    def _let_go(self, block_ids: Iterable[int]) -> None:
        freed = []
        for block_id in block_ids:
            count = self._ref_counts[block_id]
            if count <= 0:
                raise InternalError(f"block {block_id} is released but has {count} references")
            self._ref_counts[block_id] = count - 1
            if count == 1:
                self._free_lists[self.get_rank(block_id)][block_id] = None
                freed.append(block_id)
        self._on_release(freed)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Check that free + referenced = N, that counts match the tables, and that no table contains a free block.

        Raises:
            InternalError: the check failed; the message names the block.
        """
        counts = [0] * (self.num_blocks + 1)
        for table in tables:
            for block_id in table.block_ids():
                counts[block_id] += 1
        if counts[NULL_BLOCK]:
            raise InternalError(f"the null block is held by {counts[NULL_BLOCK]} tables")
        for block_id, (held, counted) in enumerate(zip(counts, self._ref_counts, strict=True)):
            if held != counted:
                raise InternalError(f"block {block_id} is held by {held} tables, but its reference count is {counted}")
            if held and block_id in self._free_lists[self.get_rank(block_id)]:
                raise InternalError(f"block {block_id} is free but held by {held} tables")
        num_referenced = sum(1 for count in counts if count)
        if self.num_free + num_referenced != self.num_blocks:
            raise InternalError(f"{self.num_free} free + {num_referenced} referenced blocks are not {self.num_blocks}")


@dataclass(slots=True)
class _MoveBatch:
    """Moves that run as one transfer. `reads` and `writes` store host blocks as negative numbers."""

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
    """Counters of the KV memory since the start, in tokens and blocks."""

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
class BlockCopyPlan:
    """Block copies that the device must run before a step, in as few transfers as their order allows.

    Each decision assumes the state after the earlier ones: a block that one move reads may be reallocated and written
    by the next. A move joins an earlier batch of the same kind unless it would overtake a move that it depends on.

        decided    out 7>h1   copy 3>7   out 8>h2   copy 4>8   copy 5>3
        batches    out 7>h1 8>h2         copy 3>7 4>8          copy 5>3      the last writes what the first copy reads
    """

    counts: MemoryCounts = field(default_factory=MemoryCounts)
    _moves: list[tuple[Move, int, int]] = field(default_factory=list)
    passing: set[tuple[Move, int, int]] = field(default_factory=set)
    """Moves of blocks that only pass through host memory."""
    num_taken: int = 0
    """Number of calls of `take`: a move that was added when the number was lower has been dispatched."""

    def add(self, move: Move, source: int, destination: int, *, passes: bool = False) -> None:
        """Append a move.

        Args:
            passes: the block passes through host memory to or from a disk or another server, whose own counters count
            it.
        """
        self._moves.append((move, source, destination))
        if passes:
            self.passing.add((move, source, destination))
        else:
            self.counts.moved(move)

    def take(self) -> BlockCopyPlan:
        """Remove and return the pending moves."""
        taken = BlockCopyPlan(self.counts, self._moves, self.passing)
        self._moves, self.passing = [], set()
        self.num_taken += 1
        return taken

    def batches(self) -> Iterator[BlockMoves]:
        """Yield the moves in batches to run in order; no batch writes a block that it reads, or writes one twice."""
        batches: list[_MoveBatch] = []
        for move, source, destination in self._moves:
            read = -source if move is Move.SWAP_IN else source
            written = -destination if move is Move.SWAP_OUT else destination
            _batch_for(batches, move, read, written).add(source, destination, read, written)
        for batch in batches:
            yield batch.moves


def _batch_for(batches: list[_MoveBatch], move: Move, read: int, written: int) -> _MoveBatch:
    for batch in reversed(batches):
        if batch.must_precede(read, written):
            break
        if batch.moves.move is move:
            return batch
    batches.append(_MoveBatch(BlockMoves(move, [], [])))
    return batches[-1]
