"""Prefix cache: finds the blocks that already hold a prefix, by a SHA-256 chain over full blocks.

    key(0) = H(root(tenant, salt, adapter), tokens of block 0)      key(i) = H(key(i - 1), tokens of block i)

A block hash covers the block's tokens and everything before it, so a match of the last hash is a match of all. Blocks
keep their hash when they are released. The pool's free list, ordered by last use, is the cache's LRU list; a hash is
removed when its block is reissued. Two tenants, or two salts of one tenant, have different roots and never share.

    device pool   cached prefixes in the free list, and pinned ones
    host pool     cached prefixes evicted from the device pool (second tier)
    connectors    copies of both in stores outside the engine's memory, such as disk

Index from block hash to block, and lookup of the longest usable prefix.

    cached     [ a b c d ] [ e f g h ]
    prompt     [ a b c d ] [ e f x y ]       one full block is shared; "e f" of the second is reused by copying the
                 match       2 tokens        block and overwriting its tail

Each KV group has a block per hash. A hit requires all blocks of groups with full attention. Groups with a sliding
window require only the blocks visible to the next token, attention sinks included. The longest such prefix is used.

    full       [0][1][2][3][4][5] .       six blocks are cached
    window      .  . [2][3] . [5] .       window of two full blocks: four are a hit, for 4 and 5 are not both cached

A model with recurrent layers continues only from a state. A hit then ends at a block that has a checkpoint of it:

    full       [0][1][2][3][4][5] .       six blocks are cached
    states      .  .  .  x  .  .  .       four are a hit; the prefill stops after the six, for a checkpoint there

The pool tracks references to blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import Protocol

from jpaged.engine.executor import BEYOND_TOKENS, Geometry, Move
from jpaged.engine.executor.io import WindowSpec
from jpaged.engine.kv_cache.blocks import (
    BlockCopyPlan,
    BlockHash,
    BlockPool,
    BlockTable,
    SequenceBlocks,
    StateSlots,
    group_block_hash,
)
from jpaged.engine.kv_cache.events import KVEventRecorder
from jpaged.engine.kv_cache.eviction.free_list import CachedBlock, RankedFreeList
from jpaged.engine.kv_cache.offload.host import HostTier
from jpaged.engine.sequence import Sequence as TokenSequence
from jpaged.engine.sequence import SequenceGroup
from jpaged.errors import InternalError, InvalidArgument
from jpaged.pool import Stored

_MAX_SIBLINGS = 32
"""Maximum number of sibling blocks compared for a partial match, newest first: the root may have thousands."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached blocks that match a prompt.

    Attributes:
        num_blocks: number of leading full blocks that need not be computed.
        block_ids: of each KV group, the matched blocks visible to the next token, to be shared.
        partial_block_ids: one block per KV group whose first num_partial_tokens continue the match, to be copied rather
            than shared. None if there is none.
        num_without_state: the number of blocks if no state were needed.
    """

    num_blocks: int
    block_ids: tuple[list[int], ...]
    partial_block_ids: list[int] | None = None
    num_partial_tokens: int = 0
    num_without_state: int = 0


class BlockHashIndex:
    """Index from cache key to block, with the data to remove blocks and to find partial matches.

    Attributes:
        marks: [N + 1] 1 if the block is cached; a copy of the index for readers of all blocks at once.
        num_changes: number of insertions and removals.

    Args:
        reaches: attention window of each KV group.
        num_blocks: number of blocks of the pool.
        ranked: free list of the pool, which is notified of contents; None if it ignores them.
        changes: recorder of KV cache events; None for none.
        marks: the attribute, if indexes of other parts of the pool share it; None creates one.
        states: slots with the states that a prefix needs at its end; None if it needs none.
    """

    def __init__(
        self,
        reaches: Sequence[WindowSpec],
        num_blocks: int,
        ranked: RankedFreeList | None = None,
        changes: KVEventRecorder | None = None,
        marks: bytearray | None = None,
        states: StateSlots | None = None,
    ) -> None:
        self._ranked = ranked
        self._states = states
        self._changes = KVEventRecorder() if changes is None else changes
        self.marks = bytearray(num_blocks + 1) if marks is None else marks
        self.num_changes = 0
        self._reaches = reaches
        self._block_size = reaches[0].block_size
        self._blocks: dict[BlockHash, int] = {}
        self._keys: dict[int, BlockHash] = {}
        # Only for the first KV group: the others have blocks of the same tokens.
        self._parents: dict[int, BlockHash] = {}
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._children: dict[BlockHash, dict[int, None]] = {}

    def find(self, key: BlockHash) -> int | None:
        """Return the block with this key, or None."""
        return self._blocks.get(key)

    def get_key(self, block_id: int) -> BlockHash | None:
        """Return the key of a block, or None if it is not cached."""
        return self._keys.get(block_id)

    def block_ids(self) -> Iterable[int]:
        return self._keys.keys()

    def match(
        self, root: BlockHash, keys: Sequence[BlockHash], token_ids: Sequence[int], digests: Sequence[bytes] = ()
    ) -> PrefixMatch:
        """Return the longest cached prefix, always without the last token, which must run to sample the next.

        Args:
            keys: block hashes of all full blocks of token_ids.
            digests: as of `SequenceBlocks`. Blocks with one are never matched in part.
        """
        before_last = keys[: (len(token_ids) - 1) // self._block_size]
        num_without_state = num_usable(before_last, self._reaches, self._blocks.__contains__)
        num_blocks = num_without_state
        if self._states is not None:
            before_last = before_last[:num_without_state]
            num_blocks = num_usable(before_last, self._reaches, self._blocks.__contains__, self._states)
        block_ids = tuple(
            [*map(self._blocks.__getitem__, _keys_of_group(keys, reach.seen(num_blocks), group))]
            for group, reach in enumerate(self._reaches)
        )
        if self._states is not None:
            return PrefixMatch(num_blocks, block_ids, num_without_state=num_without_state)
        start = num_blocks * self._block_size
        if any(digests[num_blocks : num_blocks + 1]):
            return PrefixMatch(num_blocks, block_ids)
        parent = keys[num_blocks - 1] if num_blocks else root
        rest = token_ids[start : min(start + self._block_size, len(token_ids) - 1)]
        return PrefixMatch(num_blocks, block_ids, *self._partial(parent, rest))

    def insert(self, block_id: int, parent: BlockHash, key: BlockHash, token_ids: Sequence[int]) -> bool:
        """Insert a full, written block of the first KV group; return True if it was inserted.

        The first block with a key stays; a duplicate is not inserted.
        """
        is_new = self._enter(block_id, key)
        if is_new:
            self._parents[block_id] = parent
            self._tokens[block_id] = tuple(token_ids)
            self._children.setdefault(parent, {})[block_id] = None
        return is_new

    def insert_in_group(
        self, sequence: TokenSequence, index: int, block_id: int, key: BlockHash, group: int = 0, *, times_seen: int = 1
    ) -> None:
        """Insert the full block at an index of a sequence, for one of the KV groups.

        One with more than tokens has none in the index and in events, where tokens name a block.

        Args:
            times_seen: requests that computed or hit it, this one included.
        """
        parent, is_of_tokens = sequence.kv.parent(index), sequence.kv.is_of_tokens(index)
        if group:
            is_new = self._enter(block_id, group_block_hash(key, group))
        else:
            is_new = self.insert(block_id, parent, key, self._tokens_at(sequence, index) if is_of_tokens else ())
        if is_new and self._changes.is_on and is_of_tokens:
            tokens = tuple(self._tokens_at(sequence, index))
            self._changes.filled(Stored("device", key, group, parent if index else None, tokens, sequence.kv.owner))
        if is_new and self._ranked is not None:
            # In a sliding window no block needs those before it, except attention sinks.
            needed = self._reaches[group].above(index)
            above = None if needed is None else group_block_hash(sequence.kv.parent(needed + 1), group)
            entry = CachedBlock(group_block_hash(key, group), above, index, sequence.kv.root or b"", times_seen)
            self._ranked.enter(block_id, entry)

    def _tokens_at(self, sequence: TokenSequence, index: int) -> list[int]:
        return sequence.token_ids[index * self._block_size : (index + 1) * self._block_size]

    def remove(self, block_id: int) -> BlockHash | None:
        """Remove a block from the index and the free list's ranking; return its key, if any."""
        key = self.evict(block_id)
        if key is not None and self._ranked is not None:
            self._ranked.discard(block_id)
        return key

    def evict(self, block_id: int) -> BlockHash | None:
        """Remove a block that is reissued from the index only; the caller notifies the free list."""
        key = self._keys.pop(block_id, None)
        if key is None:
            return None
        self.marks[block_id] = 0
        self.num_changes += 1
        del self._blocks[key]
        if self._changes.is_on:
            self._changes.removed("device", key)
        if block_id in self._parents:
            del self._tokens[block_id]
            parent = self._parents.pop(block_id)
            siblings = self._children[parent]
            del siblings[block_id]
            if not siblings:
                del self._children[parent]
        return key

    def _enter(self, block_id: int, key: BlockHash) -> bool:
        if key in self._blocks or block_id in self._keys:
            return False
        self._blocks[key] = block_id
        self._keys[block_id] = key
        self.num_changes += 1
        self.marks[block_id] = 1
        return True

    def _partial(self, parent: BlockHash, rest: Sequence[int]) -> tuple[list[int] | None, int]:
        """Return the cached children of `parent` that share the most next tokens, and the number of these tokens."""
        best_ids, best_len = None, 0
        siblings = self._children.get(parent, {})
        for block_id in islice(reversed(siblings), _MAX_SIBLINGS):
            length = _common_length(self._tokens[block_id], rest)
            if length > best_len and (block_ids := self._in_all_groups(block_id)) is not None:
                best_ids, best_len = block_ids, length
        return best_ids, best_len

    def _in_all_groups(self, block_id: int) -> list[int] | None:
        """Return a first-group block and those of the other groups with the same tokens; None if one is missing."""
        block_ids, key = [block_id], self._keys[block_id]
        for group in range(1, len(self._reaches)):
            other = self._blocks.get(group_block_hash(key, group))
            if other is None:
                return None
            block_ids.append(other)
        return block_ids


def num_usable(
    keys: Sequence[BlockHash],
    reaches: Sequence[WindowSpec],
    is_known: Callable[[BlockHash], bool],
    states: Container[BlockHash] | None = None,
) -> int:
    """Return the length of the longest prefix whose blocks visible to the next token are all known.

    Args:
        states: hashes of blocks after which the recurrent state is known; None if no state is needed.
    """
    num_blocks = _num_visible(keys, reaches, is_known)
    while states is not None and num_blocks and keys[num_blocks - 1] not in states:
        end = next((end for end in range(num_blocks - 1, 0, -1) if keys[end - 1] in states), 0)
        num_blocks = _num_visible(keys[:end], reaches, is_known)
    return num_blocks


def _num_visible(
    keys: Sequence[BlockHash], reaches: Sequence[WindowSpec], is_known: Callable[[BlockHash], bool]
) -> int:
    num_blocks, windows = len(keys), []
    for kv_group, reach in enumerate(reaches):
        if reach.num_seen is not None:
            windows.append((kv_group, reach))
        end = num_blocks if reach.num_seen is None else min(num_blocks, reach.num_sinks)
        num_known = len(list(takewhile(is_known, _keys_of_group(keys, range(end), kv_group))))
        num_blocks = num_known if num_known < end else num_blocks
    # A gap that is visible from the end of a prefix is visible from every later end too: the prefix ends there.
    for index in range(num_blocks - 1, -1, -1):
        seen = [kv_group for kv_group, reach in windows if reach.first_block(num_blocks) <= index]
        if not seen:
            break
        if not all(is_known(group_block_hash(keys[index], kv_group)) for kv_group in seen):
            num_blocks = index
    return num_blocks


def keys_seen(keys: Sequence[BlockHash], num_blocks: int, reaches: Sequence[WindowSpec]) -> list[BlockHash]:
    """Return the keys of the blocks visible after num_blocks blocks, KV group by KV group."""
    return [
        key for kv_group, reach in enumerate(reaches) for key in _keys_of_group(keys, reach.seen(num_blocks), kv_group)
    ]


def _keys_of_group(keys: Sequence[BlockHash], indices: Iterable[int], kv_group: int) -> Iterator[BlockHash]:
    """Return the cache keys of some blocks for a KV group; those of the first group are the block hashes."""
    some = map(keys.__getitem__, indices)
    return some if not kv_group else (group_block_hash(key, kv_group) for key in some)


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


class LowerTier(Protocol):
    """Tier below host memory, which is notified of changes to cached prefixes."""

    def on_block_stored(self, key: BlockHash) -> None:
        """Queue the block of a key to be stored: it was just computed, or is leaving the device."""
        ...

    def on_blocks_hit(self, keys: Sequence[BlockHash]) -> None:
        """Record that these keys were hit, even though none was loaded from this tier."""
        ...

    def remove(self, key: BlockHash) -> None:
        """Remove a key, so that it is neither found in this tier nor loaded from it."""
        ...

    def reset(self) -> int:
        """Remove all keys; return the number of blocks."""
        ...


class PrefixCacheManager:
    """Prefix cache of paged memory: lookup, registration, eviction and pinning.

    Attributes:
        pool: device blocks; a free one may still hold a prefix.
        num_cached: number of free blocks that hold a prefix.
        marks: [N + 1] 1 if the block holds a prefix, free or not; written only by the cache.
        changes: recorder of KV cache events of this tier and those below it.
        cache: index of the blocks that hold prefixes, of the first part of the pool.
        reaches: attention window of each KV group.
        states: slots with the recurrent states at the ends of cached prefixes; None without recurrent layers.
        weights: digest of the weights that write blocks, see `root_block_hash`. Any thread may read it.

    Each part of the pool (`Geometry.dp_size`) has its own prefixes, because a sequence has all blocks in one part.

    Args:
        geometry: device blocks and attention windows.
        host: tier that stores evicted blocks.
        connectors: tiers below host memory.
        max_tokens: positions from here on are never cached, and neither is any longer prompt: with position
            embeddings that depend on the prompt's length, equal tokens have unequal keys there. None for no limit.
        ranked: free list in eviction order; None for least recently used.
        changes: recorder of KV cache events; None creates one.
        states: slots of recurrent state; None without recurrent layers.
    """

    def __init__(
        self,
        geometry: Geometry,
        host: HostTier,
        ops: BlockCopyPlan,
        *,
        max_tokens: int | None,
        ranked: RankedFreeList | None = None,
        changes: KVEventRecorder | None = None,
        connectors: Sequence[LowerTier] = (),
        states: StateSlots | None = None,
    ) -> None:
        self.max_tokens = BEYOND_TOKENS if max_tokens is None else max_tokens
        self.num_cached = 0
        self.weights = b""
        self.reaches = reaches = geometry.reaches
        self._block_size = host.pool.block_size
        self.pool = BlockPool(
            num_blocks=geometry.num_blocks,
            block_size=self._block_size,
            free=ranked,
            on_reissue=self._evict,
            on_release=self._freed,
            dp_size=geometry.dp_size,
        )
        self._ranked = ranked
        self._host = host
        self._connectors = connectors
        self._ops = ops
        self.changes = KVEventRecorder() if changes is None else changes
        self.marks, num_blocks = bytearray(geometry.num_blocks + 1), geometry.num_blocks
        self._caches = [
            BlockHashIndex(reaches, num_blocks, ranked, self.changes, self.marks, states)
            for _ in range(geometry.dp_size)
        ]
        self.states = states
        self._interval = geometry.state_checkpoint_interval
        self.cache = self._caches[0]
        self._pinned: dict[Hashable, BlockTable] = {}
        self._pinned_keys: dict[Hashable, BlockHash] = {}  # of recurrent states
        self._last_match: tuple[tuple[object, ...], PrefixMatch] | None = None

    # --- admission ------------------------------------------------------------------------------------------------

    def match(self, group: SequenceGroup) -> PrefixMatch:
        """Return the cached blocks of the tokens that a group's leader has to compute.

        Admission asks several times for the same group: the last answer is kept until a cached block changes.
        """
        leader = group.live[0]
        if leader.kv.root is None:
            return PrefixMatch(0, ([],) * len(self.reaches))
        limit = _num_leading_tokens(group)
        # One more than can be cached: the last token of the match always runs.
        limit = min(limit, self.max_tokens + 1 if leader.rope_len <= self.max_tokens else 0)
        num_full = limit // self._block_size
        keys, cache = _keys(self._block_size, leader, num_full), self._caches[leader.kv.rank]
        parent = keys[num_full - 1] if num_full else leader.kv.root
        rest = leader.token_ids[num_full * self._block_size : limit]
        asked = (leader.kv.rank, cache.num_changes, limit, parent, rest, leader.kv.digests)
        if self._last_match is not None and self._last_match[0] == asked and self.states is None:
            return self._last_match[1]
        match = cache.match(leader.kv.root, keys, leader.token_ids[:limit], leader.kv.digests)
        self._last_match = asked, match
        return match

    def admit(self, group: SequenceGroup) -> int:
        """Assign all cached blocks of a group's prompt to its leader; return the number of tokens that need not run."""
        leader = group.runnable[0]
        match = self.match(group)
        num_blocks = match.num_blocks
        if self._host.blocks:
            num_blocks = _num_in_both(self, self.lookup_keys(group), num_blocks)
        if self.states is not None:
            if num_blocks:
                self.states.restore(leader.kv, _keys(self._block_size, leader, num_blocks)[num_blocks - 1])
            if match.num_without_state > num_blocks:
                leader.kv.stop_after(match.num_without_state)
        if num_blocks == match.num_blocks:
            self._share(leader.kv, match)
        else:
            self._take(leader, num_blocks)
        keys = _keys(self._block_size, leader, num_blocks) if self._connectors else []
        for connector in self._connectors:
            connector.on_blocks_hit(keys_seen(keys, num_blocks, self.reaches))
        num_tokens = num_blocks * self._block_size
        if match.partial_block_ids is not None and num_blocks == match.num_blocks:
            _copy_partial(leader.kv, match.partial_block_ids, self.pool, self._ops)
            num_tokens += match.num_partial_tokens
        leader.kv.registered(num_tokens // self._block_size)
        if leader.kv.root is not None and group.num_cached_tokens is None:
            self._ops.counts.looked_up(leader.num_prompt_tokens, min(num_tokens, leader.num_prompt_tokens))
        return num_tokens

    def is_prefix_in_flight(self, group: SequenceGroup, running: Iterable[SequenceGroup]) -> bool:
        """Return True if a running group is about to compute the next block of this waiting group's prompt."""
        leader = group.runnable[0]
        position = self.match(group).num_blocks
        last = min(leader.num_prompt_tokens, _num_leading_tokens(group)) - 1
        if position >= min(_num_cacheable(self, leader), last // self._block_size):
            return False
        key = _keys(self._block_size, leader, position + 1)[position]
        if self.states is not None:
            return any(self._is_checkpoint_ahead(group, other.live[0], position) for other in running)
        for other in running:
            first = other.live[0]
            begin, end = first.kv.num_registered_blocks, first.num_prompt_tokens // self._block_size
            if (
                first.kv.rank == leader.kv.rank
                and begin < end
                and key in _keys(self._block_size, first, min(_num_cacheable(self, first), end))[begin:end]
            ):
                return True
        return False

    def _is_checkpoint_ahead(self, group: SequenceGroup, other: TokenSequence, position: int) -> bool:
        """Return True if a running sequence will have a state that a waiting group can continue from.

        Let its prefill stop after the blocks that both share.

        Args:
            position: blocks that the group has without waiting.
        """
        if other.kv.rank != group.live[0].kv.rank or other.num_computed_tokens >= other.num_prompt_tokens:
            return False
        end = min(_num_cacheable(self, other), other.num_prompt_tokens // self._block_size)
        theirs = _keys(self._block_size, other, end)[:end]
        num_shared = sum(takewhile(bool, map(bytes.__eq__, self.lookup_keys(group), theirs)))
        if num_shared <= position or num_shared * self._block_size < other.num_computed_tokens:
            return False
        other.kv.stop_after(num_shared)
        return True

    def lookup_keys(self, group: SequenceGroup) -> list[BlockHash]:
        """Return the block hashes that a group's prompt may hit, which end before the last token to run."""
        leader = group.live[0]
        end = min(_num_cacheable(self, leader), (_num_leading_tokens(group) - 1) // self._block_size)
        return _keys(self._block_size, leader, end)[: max(0, end)]

    def touch(self, keys: Iterable[BlockHash]) -> None:
        """Move the free cached blocks among these keys to the end of the eviction order."""
        free = [b for key in keys if (b := self.cache.find(key)) is not None and self.pool.is_free(b)]
        for block_id in free:
            self.num_cached -= self.pool.acquire(block_id)
        table = BlockTable(len(free))
        table.extend(free)
        self.pool.release(table)

    # --- registration -------------------------------------------------------------------------------------------------

    def register_full_blocks(self, sequence: TokenSequence) -> None:
        """Insert the blocks that a sequence has filled since the last call into the cache."""
        kv = sequence.kv
        first = kv.num_registered_blocks
        if sequence.num_computed_tokens < (first + 1) * self._block_size:
            return
        num_known = min(sequence.num_computed_tokens, len(sequence.token_ids))
        # A sequence that was swapped out may have received tokens of a multi-step dispatch since, and has no blocks.
        num_full = min(num_known // self._block_size, _num_cacheable(self, sequence), kv.num_blocks)
        if first >= num_full:
            return
        keys, cache = _keys(self._block_size, sequence, num_full), self._caches[kv.rank]
        for i in range(first, num_full):
            for kv_group, table in enumerate(kv.tables):
                if table.holds(i):
                    cache.insert_in_group(sequence, i, table.block_id(i), keys[i], kv_group)
                    for connector in self._connectors:
                        connector.on_block_stored(group_block_hash(keys[i], kv_group))
        kv.registered(num_full)
        if self.states is not None:
            self.states.commit(kv, keys[:num_full])

    def checkpoint_state(self, sequence: TokenSequence) -> None:
        """Store the recurrent state of a sequence if its computed tokens end at a block boundary.

        The last checkpoint in generated tokens is replaced by the next one, except at multiples of the interval.
        """
        num_blocks, num_rest = divmod(sequence.num_computed_tokens, self._block_size)
        if self.states is None or sequence.kv.root is None or num_rest or not num_blocks:
            return
        if max(sequence.rope_len, sequence.num_computed_tokens) > self.max_tokens:
            return
        num_known = min(sequence.kv.num_registered_blocks, num_blocks)
        keys = _keys(self._block_size, sequence, num_known)[:num_known]
        is_lasting = sequence.num_computed_tokens <= sequence.num_prompt_tokens
        is_lasting = is_lasting or sequence.num_computed_tokens % self._interval == 0
        self.states.checkpoint(sequence.kv, num_blocks, keys, is_lasting=is_lasting)

    def within_checkpoints(self, sequence: TokenSequence, num_tokens: int) -> int:
        """Return the tokens of a prefill chunk of at most num_tokens, which ends where a state is stored.

        That is after the last full block of the prompt, where other prompts continue differently, and at multiples of
        the interval, as far as a chunk can reach one.
        """
        start, last = sequence.num_computed_tokens, sequence.num_prompt_tokens
        end = start + num_tokens
        if self.states is None or not _num_cacheable(self, sequence) or start >= last:
            return num_tokens
        if start < (aligned := end // self._interval * self._interval) and end < sequence.num_tokens:
            end = aligned
        stops = [num_blocks * self._block_size for num_blocks in (*sequence.kv.stops, (last - 1) // self._block_size)]
        return min([*(stop for stop in stops if stop > start), end]) - start

    def num_loadable(self, keys: Sequence[BlockHash]) -> int:
        """Return the length of the longest usable prefix on the device and in host memory together."""
        return num_usable(keys, self.reaches, self.has_prefix, self.states)

    def remove_prefix(self, sequence: TokenSequence) -> None:
        """Remove a sequence's prefix from all tiers, and exclude the sequence from the cache.

        Blocks that it shares with others are removed too, except pinned ones.
        """
        pinned = self.pinned_blocks
        keys = _keys(self._block_size, sequence, len(sequence.token_ids) // self._block_size)
        for key in (group_block_hash(key, kv_group) for key in keys for kv_group in range(len(self.reaches))):
            self._host.remove(key)
            for connector in self._connectors:
                connector.remove(key)
            for cache in self._caches:
                block_id = cache.find(key)
                if block_id is not None and block_id not in pinned:
                    self.remove_block(block_id)
                    self.num_cached -= self.pool.is_free(block_id)
            if self.states is not None and not any(cache.find(key) for cache in self._caches):
                self.states.remove(key)
        sequence.kv.leave_cache()

    def remove_block(self, block_id: int) -> None:
        """Remove a block that its sequence is about to overwrite from the cache."""
        key = self._caches[self.pool.get_rank(block_id)].remove(block_id)
        if self.states is not None and key is not None:
            self.states.remove(key)

    def reset(self, *, keeps_stores: bool = False) -> int:
        """Remove all unreferenced prefixes, in lower tiers too; return the number of their blocks.

        Blocks that sequences or pins reference stay cached.

        Args:
            keeps_stores: tiers below host memory keep theirs.
        """
        free = [block_id for block_id in self._cached_ids() if self.pool.is_free(block_id)]
        for block_id in free:
            self.remove_block(block_id)
        self.num_cached -= len(free)
        if self.states is not None:
            self.states.reset()
        stores = () if keeps_stores else self._connectors
        return len(free) + self._host.reset() + sum(connector.reset() for connector in stores)

    def set_weights(self, digest: bytes) -> None:
        """Set the digest of the weights that write blocks from now on."""
        self.weights = digest

    def has_prefix(self, key: BlockHash) -> bool:
        """Return True if a block with this key is on the device or in host memory. Any thread may ask.

        The two dict look-ups are atomic under the GIL while the engine thread writes. A stale answer costs a hit, never
        correctness. A plain block hash is the key of the first KV group, see `group_block_hash`.
        """
        return any(cache.find(key) is not None for cache in self._caches) or key in self._host

    def num_cacheable_blocks(self, num_prompt_tokens: int) -> int:
        """Return the number of full blocks of a prompt that may be cached. Any thread may ask."""
        return 0 if num_prompt_tokens > self.max_tokens else num_prompt_tokens // self._block_size

    # --- pinning ------------------------------------------------------------------------------------------------------

    def pin(self, name: Hashable, sequence: TokenSequence) -> int:
        """Pin the full blocks of a computed prompt under a name until `unpin`; return the number of pinned tokens.

        If another block holds the same tokens, that cached block is pinned instead.

        Raises:
            InvalidArgument: the recurrent state at the end of the prefix finds no slot.
        """
        sequence.kv.registered(0)
        self.register_full_blocks(sequence)
        keys = _keys(self._block_size, sequence, self.num_cacheable_blocks(sequence.num_prompt_tokens))
        if self.states is not None:
            self.checkpoint_state(sequence)
            if not self.states.pin(keys[-1]):
                raise InvalidArgument(
                    "token_ids", f"no slot for recurrent state can be pinned; {self.states.num_pinned} are pinned"
                )
            self._pinned_keys[name] = keys[-1]
        table = BlockTable(len(self.reaches) * len(keys))
        for kv_group, reach in enumerate(self.reaches):
            for index in reach.seen(len(keys)):
                block_id = self._caches[sequence.kv.rank].find(group_block_hash(keys[index], kv_group))
                assert block_id is not None
                self.num_cached -= self.pool.acquire(block_id)
                table.extend([block_id])
        self._pinned[name] = table
        return len(keys) * self._block_size

    def unpin(self, name: Hashable) -> None:
        """Release the blocks of a name; no-op after `unpin_all`."""
        if (table := self._pinned.pop(name, None)) is None:
            return
        self.pool.release(table)
        if self.states is not None:
            self.states.unpin(self._pinned_keys.pop(name))

    def unpin_all(self) -> None:
        """Release the blocks of all names."""
        for name in tuple(self._pinned):
            self.unpin(name)

    @property
    def pinned_blocks(self) -> set[int]:
        """Return the ids of all pinned blocks."""
        return {block_id for table in self._pinned.values() for block_id in table.block_ids()}

    def pinned_tables(self) -> Iterable[BlockTable]:
        return self._pinned.values()

    def check(self) -> None:
        """Check the counts of cached blocks.

        Raises:
            InternalError: the counts differ.
        """
        num_cached = sum(self.pool.is_free(block_id) for block_id in self._cached_ids())
        if num_cached != self.num_cached:
            raise InternalError(f"{num_cached} free blocks are cached, but {self.num_cached} were counted")
        if self._ranked is not None:
            self._ranked.check(set(self._cached_ids()), self.pool.is_free)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _cached_ids(self) -> Iterable[int]:
        return chain.from_iterable(cache.block_ids() for cache in self._caches)

    def _freed(self, block_ids: list[int]) -> None:
        self.num_cached += sum(map(self.marks.__getitem__, block_ids))

    def _evict(self, block_id: int) -> None:
        """Copy the content of a free block to host memory before the block is reissued, and remove it from the cache.

        The copy is published before the removal, so that event subscribers do not drop the block in between.
        """
        cache = self._caches[self.pool.get_rank(block_id)]
        key = cache.get_key(block_id)
        if key is not None:
            self.num_cached -= 1
            self._host.keep(key, block_id, None if self._ranked is None else self._ranked.evicted(block_id))
            for connector in self._connectors:
                connector.on_block_stored(key)
            cache.evict(block_id)
            if self.states is not None and key not in self._host:
                self.states.remove(key)

    def _share(self, kv: SequenceBlocks, match: PrefixMatch) -> None:
        """Assign the blocks of a match to an empty sequence."""
        block_ids = [*chain.from_iterable(match.block_ids)]
        self.num_cached -= self.pool.acquire_all(block_ids)
        if self._ranked is not None:
            self._ranked.found(block_ids)
        for reach, table, of_group in zip(self.reaches, kv.tables, match.block_ids, strict=True):
            table.fill(of_group, reach.first_block(match.num_blocks), reach.num_sinks)

    def _take(self, leader: TokenSequence, num_blocks: int) -> None:
        """Assign the blocks visible after num_blocks blocks to an empty sequence; load those in host memory."""
        keys, kv = _keys(self._block_size, leader, num_blocks), leader.kv
        cache, wanted = self._caches[kv.rank], keys_seen(keys, num_blocks, self.reaches)
        found = {key: block_id for key in wanted if (block_id := cache.find(key)) is not None}
        self.num_cached -= self.pool.acquire_all(found.values())
        if self._ranked is not None:
            self._ranked.found([*found.values()])
        away = [key for key in wanted if key not in found]
        seen = {key: self._host.times_seen(key) + 1 for key in away}
        brought = dict(zip(away, self._host.load(away, self.pool), strict=True)) if away else {}
        for kv_group, (reach, table) in enumerate(zip(self.reaches, kv.tables, strict=True)):
            block_ids = []
            for i in reach.seen(num_blocks):
                key = group_block_hash(keys[i], kv_group)
                if key in brought:
                    cache.insert_in_group(leader, i, brought[key], keys[i], kv_group, times_seen=seen[key])
                block_ids.append(found[key] if key in found else brought[key])
            table.fill(block_ids, reach.first_block(num_blocks), reach.num_sinks)
        self._ops.counts.brought_back(self._block_size * len(brought) // len(self.reaches))


def _num_cacheable(prefixes: PrefixCacheManager, sequence: TokenSequence) -> int:
    """Return the number of blocks of a sequence that may be cached."""
    if sequence.kv.root is None or sequence.rope_len > prefixes.max_tokens:
        return 0
    return min(prefixes.max_tokens, len(sequence.token_ids)) // prefixes.pool.block_size


def _num_in_both(prefixes: PrefixCacheManager, keys: list[BlockHash], num_matched: int) -> int:
    """Return the length of the longest prefix in both tiers that the pool has room for."""
    end, pool = len(keys), prefixes.pool
    while (num_blocks := prefixes.num_loadable(keys[:end])) > num_matched:
        wanted = [prefixes.cache.find(key) for key in keys_seen(keys, num_blocks, prefixes.reaches)]
        if pool.can_allocate(sum(block_id is None or pool.is_free(block_id) for block_id in wanted)):
            return num_blocks
        end = num_blocks - 1
    return num_matched


class PinnedForRead:
    """Cached blocks pinned for external readers, independent of sequences and pinned prefixes."""

    def __init__(self, prefixes: PrefixCacheManager) -> None:
        self._prefixes = prefixes
        self._tables: dict[BlockTable, None] = {}

    def find(self, key: BlockHash) -> int | None:
        """Return the device block with this key, or None."""
        return self._prefixes.cache.find(key)

    def hold(self, keys: Iterable[BlockHash]) -> BlockTable:
        """Pin the blocks of these keys; the table has them in the order of the keys.

        Raises:
            InternalError: one of them is not on the device.
        """
        prefixes, block_ids = self._prefixes, []
        for key in keys:
            block_id = prefixes.cache.find(key)
            if block_id is None:
                raise InternalError(f"no block on the device has the hash {key.hex()}")
            prefixes.num_cached -= prefixes.pool.acquire(block_id)
            block_ids.append(block_id)
        table = BlockTable(len(block_ids))
        table.extend(block_ids)
        self._tables[table] = None
        return table

    def release(self, table: BlockTable) -> None:
        """Unpin a table; its blocks stay cached until they are reissued.

        Raises:
            InternalError: the table is not pinned.
        """
        if table not in self._tables:
            raise InternalError(f"blocks {table.block_ids()[:8]} are released but not held")
        del self._tables[table]
        self._prefixes.pool.release(table)

    @property
    def num_blocks(self) -> int:
        """Return the number of pinned blocks; a block pinned twice counts twice."""
        return sum(table.num_blocks for table in self._tables)

    def tables(self) -> Iterable[BlockTable]:
        """Return the pinned tables."""
        return self._tables.keys()


def _num_leading_tokens(group: SequenceGroup) -> int:
    """Return the number of tokens that only the leader runs: the prompt before a fork, all of them otherwise.

    If prompt logprobs are pending it ends at the first such position: the last of these tokens always runs.
    """
    leader = group.live[0]
    num_tokens = len(leader.token_ids) if group.is_forked else leader.num_prompt_tokens
    return (
        min(num_tokens, leader.prompt_logprobs_start + 1)
        if leader.prompt_logprobs_start < leader.prompt_logprobs_end
        else num_tokens
    )


def _keys(block_size: int, sequence: TokenSequence, num_blocks: int) -> list[BlockHash]:
    return sequence.kv.keys(sequence.token_ids, num_blocks, block_size)


def _copy_partial(kv: SequenceBlocks, block_ids: list[int], pool: BlockPool, ops: BlockCopyPlan) -> None:
    """Assign copies of blocks, one per KV group, to a sequence; a block that was free may become its own copy."""
    copies = pool.allocate(len(block_ids), kv.rank)
    others = [copy for copy in copies if copy not in block_ids]
    for block_id, table in zip(block_ids, kv.tables, strict=True):
        copy = block_id if block_id in copies else others.pop()
        if copy != block_id:
            ops.add(Move.COPY, block_id, copy)
        table.extend([copy])
