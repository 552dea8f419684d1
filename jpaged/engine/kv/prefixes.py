"""Finds the blocks that already hold a prefix, by a SHA-256 chain over full blocks.

    key(0) = H(root(tenant, salt), tokens of block 0)      key(i) = H(key(i - 1), tokens of block i)

A key names a block's content together with everything before it, so a match of the last key is a match of all. Blocks
keep their key when they are released; the pool's free list, in order of last use, is the cache's LRU, and a key dies
when its block is reissued. Two tenants, and two salts of one, have different roots and never share.

    cached     [ a b c d ] [ e f g h ]
    prompt     [ a b c d ] [ e f x y ]       one full block is shared; of the second, "e f" is used by copying the
                 match       2 tokens        block and overwriting its tail

    device pool   cached prefixes in the free list, and pinned ones
    host pool     cached prefixes that the device pool had to give up (second tier)

Who holds a block is the pool's to know.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from jpaged.engine.executor import BEYOND_TOKENS, Move
from jpaged.engine.kv.blocks import BlockPool, BlockTable, Key, MemoryOps
from jpaged.engine.sequence import Group
from jpaged.engine.sequence import Sequence as TokenSequence
from jpaged.errors import InternalError

_MAX_SIBLINGS = 32
"""Blocks with one parent that are compared for a partial match, the newest first: the root may have thousands."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What is known of a prompt.

    Attributes:
        block_ids: full blocks that can be shared as they are.
        partial_block_id: a block whose first num_partial_tokens continue the match; to be copied, not shared.
    """

    block_ids: list[int]
    partial_block_id: int | None = None
    num_partial_tokens: int = 0


class PrefixCache:
    """Key -> block, and what is needed to forget a block and to find partial matches."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._parents: dict[int, Key] = {}
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._children: dict[Key, dict[int, None]] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._keys

    def find(self, key: Key) -> int | None:
        """The block that holds what the key names; None where it is not known."""
        return self._blocks.get(key)

    def block_ids(self) -> Iterable[int]:
        return self._keys.keys()

    def match(self, root: Key, keys: Sequence[Key], token_ids: Sequence[int]) -> PrefixMatch:
        """The longest known prefix, always short of the last token: that one must run to sample the next.

        Args:
            keys: the chain of all full blocks of token_ids.
        """
        block_ids: list[int] = []
        for key in keys[: (len(token_ids) - 1) // self._block_size]:
            block_id = self._blocks.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        start = len(block_ids) * self._block_size
        parent = keys[len(block_ids) - 1] if block_ids else root
        return self._with_partial(
            block_ids, parent, token_ids[start : min(start + self._block_size, len(token_ids) - 1)]
        )

    def insert(self, block_id: int, parent: Key, key: Key, token_ids: Sequence[int]) -> None:
        """Makes a full, written block known. The first block of a key stays; a duplicate is not entered."""
        if key in self._blocks or block_id in self._keys:
            return
        self._blocks[key] = block_id
        self._keys[block_id] = key
        self._parents[block_id] = parent
        self._tokens[block_id] = tuple(token_ids)
        self._children.setdefault(parent, {})[block_id] = None

    def insert_of(self, sequence: TokenSequence, index: int, block_id: int, key: Key) -> None:
        """Makes the full block at an index of a sequence known."""
        tokens = sequence.token_ids[index * self._block_size : (index + 1) * self._block_size]
        self.insert(block_id, sequence.kv.parent(index), key, tokens)

    def forget(self, block_id: int) -> Key | None:
        """Drops what is known of a block; its key, if it had one."""
        key = self._keys.pop(block_id, None)
        if key is None:
            return None
        del self._blocks[key], self._tokens[block_id]
        parent = self._parents.pop(block_id)
        siblings = self._children[parent]
        del siblings[block_id]
        if not siblings:
            del self._children[parent]
        return key

    def _with_partial(self, block_ids: list[int], parent: Key, rest: Sequence[int]) -> PrefixMatch:
        best_id, best_len = None, 0
        siblings = self._children.get(parent, {})
        for block_id in islice(reversed(siblings), _MAX_SIBLINGS):
            length = _common_length(self._tokens[block_id], rest)
            if length > best_len:
                best_id, best_len = block_id, length
        return PrefixMatch(block_ids, best_id, best_len)


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


class HostTier:
    """Cached prefixes that the device pool had to give up, in the free blocks of host memory."""

    def __init__(self, num_blocks: int, block_size: int, ops: MemoryOps) -> None:
        self.pool = BlockPool(num_blocks=num_blocks, block_size=block_size, on_reissue=self._evict)
        self._ops = ops
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def keep(self, key: Key, block_id: int) -> None:
        """Takes what a device block holds, while there is room; the block is about to be written."""
        if key in self._blocks or not self.pool.can_allocate(1):
            return
        (home,) = self.pool.allocate(1)
        self._blocks[key], self._keys[home] = home, key
        self._ops.add(Move.SWAP_OUT, block_id, home)
        self._hand_back(home)

    def bring_back(self, key: Key, pool: BlockPool) -> int:
        """Copies a kept block into a block of the device pool, which has a free one; the new block."""
        source = self._blocks[key]
        self.pool.acquire(source)  # while it is read: allocating may evict another block to host memory
        (destination,) = pool.allocate(1)
        self._ops.add(Move.SWAP_IN, source, destination)
        self._hand_back(source)
        return destination

    def forget(self, key: Key) -> None:
        """Drops what is kept under a key, if anything is."""
        if key in self._blocks:
            del self._keys[self._blocks.pop(key)]

    def reset(self) -> int:
        """Drops everything that is kept; the number of blocks."""
        num_kept = len(self._blocks)
        self._blocks.clear()
        self._keys.clear()
        return num_kept

    def _hand_back(self, home: int) -> None:
        table = BlockTable(1)
        table.extend([home])
        self.pool.release(table)

    def _evict(self, home: int) -> None:
        key = self._keys.pop(home, None)
        if key is not None:
            del self._blocks[key]


class Prefixes:
    """Prefixes in paged memory: found for who is admitted, registered as blocks fill, evicted, pinned.

    Attributes:
        pool: the blocks of the device; a free one may still hold a prefix.
        num_cached: how many of the free ones do.

    Args:
        num_blocks: of the device.
        host: where evicted ones go.
        max_tokens: positions from here on are never cached, nor is anything of a longer prompt: with position
            embeddings that depend on the prompt's length, equal tokens have unequal keys there. None is no limit.
    """

    def __init__(self, num_blocks: int, host: HostTier, ops: MemoryOps, *, max_tokens: int | None) -> None:
        self.max_tokens = BEYOND_TOKENS if max_tokens is None else max_tokens
        self.num_cached = 0
        self._block_size = host.pool.block_size
        self.pool = BlockPool(
            num_blocks=num_blocks, block_size=self._block_size, on_reissue=self._evict, on_release=self._freed
        )
        self._host = host
        self._ops = ops
        self._cache = PrefixCache(self._block_size)
        self._pinned: dict[Hashable, BlockTable] = {}

    # --- who is admitted --------------------------------------------------------------------------------------------

    def match(self, group: Group) -> PrefixMatch:
        """Finds the cached blocks of the tokens that a group's leader has to run."""
        leader = group.live[0]
        if leader.kv.root is None:
            return PrefixMatch([])
        limit = _num_leading_tokens(group)
        # One more than can be cached: the last token of what is matched always runs.
        limit = min(limit, self.max_tokens + 1 if leader.num_prompt_tokens <= self.max_tokens else 0)
        keys = self._keys(leader, limit // self._block_size)
        return self._cache.match(leader.kv.root, keys, leader.token_ids[:limit])

    def admit(self, group: Group) -> int:
        """Gives a group's leader every block that is known of its prompt; the tokens that need not run."""
        leader = group.runnable[0]
        match = self.match(group)
        for block_id in match.block_ids:
            self.num_cached -= self.pool.acquire(block_id)
        leader.kv.table.extend(match.block_ids)
        num_restored = self._restore(group, len(match.block_ids))
        num_tokens = (len(match.block_ids) + num_restored) * self._block_size
        if match.partial_block_id is not None and not num_restored:
            (copy,) = self.pool.allocate(1)
            if copy != match.partial_block_id:
                self._ops.add(Move.COPY, match.partial_block_id, copy)
            leader.kv.table.extend([copy])
            num_tokens += match.num_partial_tokens
        leader.kv.registered(num_tokens // self._block_size)
        if leader.kv.root is not None and group.num_cached_tokens is None:
            self._ops.counts.looked_up(leader.num_prompt_tokens, num_tokens)
        return num_tokens

    def is_being_computed(self, group: Group, running: Iterable[Group]) -> bool:
        """A running group is about to compute the next block of this waiting group's prompt: it is worth waiting."""
        leader = group.runnable[0]
        position = len(self.match(group).block_ids)
        if position >= min(self._num_cacheable(leader), (leader.num_prompt_tokens - 1) // self._block_size):
            return False
        key = self._keys(leader, position + 1)[position]
        for other in running:
            first = other.live[0]
            begin, end = first.kv.num_registered_blocks, first.num_prompt_tokens // self._block_size
            if begin < end and key in self._keys(first, min(self._num_cacheable(first), end))[begin:end]:
                return True
        return False

    # --- what is known ----------------------------------------------------------------------------------------------

    def register_full_blocks(self, sequence: TokenSequence) -> None:
        """Makes known the blocks that a sequence has filled since the last time."""
        kv = sequence.kv
        first = kv.num_registered_blocks
        if sequence.num_computed_tokens < (first + 1) * self._block_size:
            return
        num_known = min(sequence.num_computed_tokens, len(sequence.token_ids))
        # A sequence that was swapped out has learnt tokens since, of a dispatch of several steps, and has no blocks.
        num_full = min(num_known // self._block_size, self._num_cacheable(sequence), kv.table.num_blocks)
        if first >= num_full:
            return
        keys = self._keys(sequence, num_full)
        for i in range(first, num_full):
            self._cache.insert_of(sequence, i, kv.table.block_id(i), keys[i])
        kv.registered(num_full)

    def forget(self, sequence: TokenSequence) -> None:
        """Sees to it that nobody finds a sequence's prefix, what it was given included, nor what it fills from here on.

        Pinned blocks, whoever pinned them, stay.
        """
        pinned = self.pinned_blocks
        for key in self._keys(sequence, len(sequence.token_ids) // self._block_size):
            self._host.forget(key)
            block_id = self._cache.find(key)
            if block_id is not None and block_id not in pinned:
                self._cache.forget(block_id)
                self.num_cached -= self.pool.is_free(block_id)
        sequence.kv.leave_cache()

    def forget_block(self, block_id: int) -> None:
        """Sees to it that nobody finds a block that somebody holds, and is about to write again."""
        self._cache.forget(block_id)

    def reset(self) -> int:
        """Forgets every prefix that nobody holds, in host memory too; the number of blocks that held one.

        Blocks that sequences or pins hold stay known.
        """
        free = [block_id for block_id in self._cache.block_ids() if self.pool.is_free(block_id)]
        for block_id in free:
            self._cache.forget(block_id)
        self.num_cached -= len(free)
        return len(free) + self._host.reset()

    def has_prefix(self, key: Key) -> bool:
        """A block with this key is here, on the device or in host memory. Any thread may ask.

        It is two look-ups in dicts that the engine's thread writes, each of which is whole under the interpreter's
        lock; an answer that is out of date costs a hit, never a token.
        """
        return self._cache.find(key) is not None or key in self._host

    def num_cacheable_blocks(self, num_prompt_tokens: int) -> int:
        """Full blocks of a prompt that may be cached. Any thread may ask."""
        return 0 if num_prompt_tokens > self.max_tokens else num_prompt_tokens // self._block_size

    # --- what is pinned ---------------------------------------------------------------------------------------------

    def pin(self, name: Hashable, sequence: TokenSequence) -> int:
        """Keeps the full blocks of a computed prompt under a name until `unpin`; the number of tokens kept.

        Where another block holds the same tokens it is that one which is found by its key, and pinned.
        """
        sequence.kv.registered(0)
        self.register_full_blocks(sequence)
        keys = self._keys(sequence, self.num_cacheable_blocks(sequence.num_prompt_tokens))
        table = BlockTable(len(keys))
        for key in keys:
            block_id = self._cache.find(key)
            assert block_id is not None
            self.num_cached -= self.pool.acquire(block_id)
            table.extend([block_id])
        self._pinned[name] = table
        return len(keys) * self._block_size

    def unpin(self, name: Hashable) -> None:
        self.pool.release(self._pinned.pop(name))

    @property
    def pinned_blocks(self) -> set[int]:
        """The blocks that are pinned, under whatever names."""
        return {block_id for table in self._pinned.values() for block_id in table.block_ids()}

    def pinned_tables(self) -> Iterable[BlockTable]:
        return self._pinned.values()

    def check(self) -> None:
        """Raises InternalError when the cached blocks are miscounted."""
        num_cached = sum(self.pool.is_free(block_id) for block_id in self._cache.block_ids())
        if num_cached != self.num_cached:
            raise InternalError(f"{num_cached} free blocks are cached, {self.num_cached} were counted")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _freed(self, block_ids: list[int]) -> None:
        self.num_cached += sum(block_id in self._cache for block_id in block_ids)

    def _evict(self, block_id: int) -> None:
        """Gives up what a free block holds, which is about to be reissued: it moves to host memory."""
        key = self._cache.forget(block_id)
        if key is not None:
            self.num_cached -= 1
            self._host.keep(key, block_id)

    def _num_cacheable(self, sequence: TokenSequence) -> int:
        """Blocks of a sequence that may be cached."""
        if sequence.kv.root is None or sequence.num_prompt_tokens > self.max_tokens:
            return 0
        return min(self.max_tokens, len(sequence.token_ids)) // self._block_size

    def _keys(self, sequence: TokenSequence, num_blocks: int) -> list[Key]:
        return sequence.kv.keys(sequence.token_ids, num_blocks, self._block_size)

    def _restore(self, group: Group, num_matched: int) -> int:
        """Brings back the blocks from the second tier that continue a match; how many."""
        leader = group.live[0]
        end = min(self._num_cacheable(leader), (_num_leading_tokens(group) - 1) // self._block_size)
        keys = self._keys(leader, end)
        index = num_matched
        while index < end and keys[index] in self._host and self.pool.can_allocate(1):
            block_id = self._host.bring_back(keys[index], self.pool)
            leader.kv.table.extend([block_id])
            self._cache.insert_of(leader, index, block_id, keys[index])
            index += 1
        return index - num_matched


def _num_leading_tokens(group: Group) -> int:
    """Tokens that the leader runs alone: the prompt before a fork, everything it has where there is none."""
    leader = group.live[0]
    return len(leader.token_ids) if group.is_forked else leader.num_prompt_tokens
