"""Index from block hash to block, and lookup of the longest usable prefix.

    cached     [ a b c d ] [ e f g h ]
    prompt     [ a b c d ] [ e f x y ]       one full block is shared; "e f" of the second is reused by copying the
                 match       2 tokens        block and overwriting its tail

Each KV group has a block per hash. A hit requires all blocks of groups with full attention. Groups with a sliding
window require only the blocks visible to the next token, attention sinks included. The longest such prefix is used.

    full       [0][1][2][3][4][5] .       six blocks are cached
    window      .  . [2][3] . [5] .       window of two full blocks: four are a hit, for 4 and 5 are not both cached

The pool tracks references to blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from jpaged.engine.kv.blocks import Key, key_in_group
from jpaged.engine.kv.changes import Changes
from jpaged.engine.kv.eviction.free_list import RankedFreeList
from jpaged.engine.kv.eviction.policy import Entry
from jpaged.engine.reach import Reach
from jpaged.engine.sequence import Sequence as TokenSequence
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
    """

    num_blocks: int
    block_ids: tuple[list[int], ...]
    partial_block_ids: list[int] | None = None
    num_partial_tokens: int = 0


class PrefixCache:
    """Index from cache key to block, with the data to remove blocks and to find partial matches.

    Attributes:
        marks: [N + 1] 1 if the block is cached; a copy of the index for readers of all blocks at once.

    Args:
        reaches: attention window of each KV group.
        num_blocks: number of blocks of the pool.
        ranked: free list of the pool, which is notified of contents; None if it ignores them.
        changes: recorder of KV cache events; None for none.
    """

    def __init__(
        self,
        reaches: Sequence[Reach],
        num_blocks: int,
        ranked: RankedFreeList | None = None,
        changes: Changes | None = None,
    ) -> None:
        self._ranked = ranked
        self._changes = Changes() if changes is None else changes
        self.marks = bytearray(num_blocks + 1)
        self._reaches = reaches
        self._block_size = reaches[0].block_size
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        # Only for the first KV group: the others have blocks of the same tokens.
        self._parents: dict[int, Key] = {}
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._children: dict[Key, dict[int, None]] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._keys

    def find(self, key: Key) -> int | None:
        """Return the block with this key, or None."""
        return self._blocks.get(key)

    def key_of(self, block_id: int) -> Key | None:
        """Return the key of a block, or None if it is not cached."""
        return self._keys.get(block_id)

    def block_ids(self) -> Iterable[int]:
        return self._keys.keys()

    def match(self, root: Key, keys: Sequence[Key], token_ids: Sequence[int]) -> PrefixMatch:
        """Return the longest cached prefix, always without the last token, which must run to sample the next.

        Args:
            keys: block hashes of all full blocks of token_ids.
        """
        before_last = keys[: (len(token_ids) - 1) // self._block_size]
        num_blocks = num_usable(before_last, self._reaches, self._blocks.__contains__)
        block_ids = tuple(
            [self._blocks[key_in_group(keys[place], group)] for place in reach.seen(num_blocks)]
            for group, reach in enumerate(self._reaches)
        )
        start = num_blocks * self._block_size
        parent = keys[num_blocks - 1] if num_blocks else root
        rest = token_ids[start : min(start + self._block_size, len(token_ids) - 1)]
        return PrefixMatch(num_blocks, block_ids, *self._partial(parent, rest))

    def insert(self, block_id: int, parent: Key, key: Key, token_ids: Sequence[int]) -> bool:
        """Insert a full, written block of the first KV group; return True if it was inserted.

        The first block with a key stays; a duplicate is not inserted.
        """
        is_new = self._enter(block_id, key)
        if is_new:
            self._parents[block_id] = parent
            self._tokens[block_id] = tuple(token_ids)
            self._children.setdefault(parent, {})[block_id] = None
        return is_new

    def insert_of(
        self, sequence: TokenSequence, index: int, block_id: int, key: Key, group: int = 0, *, times_seen: int = 1
    ) -> None:
        """Insert the full block at an index of a sequence, for one of the KV groups.

        Args:
            times_seen: requests that computed or hit it, this one included.
        """
        parent = sequence.kv.parent(index)
        if group:
            is_new = self._enter(block_id, key_in_group(key, group))
        else:
            is_new = self.insert(block_id, parent, key, self._tokens_at(sequence, index))
        if is_new and self._changes.is_on:
            tokens = tuple(self._tokens_at(sequence, index))
            self._changes.filled(Stored("device", key, group, parent if index else None, tokens, sequence.kv.owner))
        if is_new and self._ranked is not None:
            # In a sliding window no block needs those before it, except attention sinks.
            place = self._reaches[group].above(index)
            above = None if place is None else key_in_group(sequence.kv.parent(place + 1), group)
            entry = Entry(key_in_group(key, group), above, index, sequence.kv.root or b"", times_seen)
            self._ranked.enter(block_id, entry)

    def _tokens_at(self, sequence: TokenSequence, index: int) -> list[int]:
        return sequence.token_ids[index * self._block_size : (index + 1) * self._block_size]

    def forget(self, block_id: int) -> Key | None:
        """Remove a block from the index and the free list's ranking; return its key, if any."""
        key = self.evict(block_id)
        if key is not None and self._ranked is not None:
            self._ranked.forget(block_id)
        return key

    def evict(self, block_id: int) -> Key | None:
        """Remove a block that is reissued from the index only; the caller notifies the free list."""
        key = self._keys.pop(block_id, None)
        if key is None:
            return None
        self.marks[block_id] = 0
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

    def _enter(self, block_id: int, key: Key) -> bool:
        if key in self._blocks or block_id in self._keys:
            return False
        self._blocks[key] = block_id
        self._keys[block_id] = key
        self.marks[block_id] = 1
        return True

    def _partial(self, parent: Key, rest: Sequence[int]) -> tuple[list[int] | None, int]:
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
            other = self._blocks.get(key_in_group(key, group))
            if other is None:
                return None
            block_ids.append(other)
        return block_ids


def num_usable(keys: Sequence[Key], reaches: Sequence[Reach], is_known: Callable[[Key], bool]) -> int:
    """Return the length of the longest prefix whose blocks visible to the next token are all known."""
    num_blocks, windows = len(keys), []
    for kv_group, reach in enumerate(reaches):
        if reach.num_seen is not None:
            windows.append((kv_group, reach))
        for place in range(num_blocks if reach.num_seen is None else min(num_blocks, reach.num_sinks)):
            if not is_known(key_in_group(keys[place], kv_group)):
                num_blocks = place
                break
    # A gap that is visible from the end of a prefix is visible from every later end too: the prefix ends there.
    for place in range(num_blocks - 1, -1, -1):
        seen = [kv_group for kv_group, reach in windows if reach.first_block(num_blocks) <= place]
        if not seen:
            break
        if not all(is_known(key_in_group(keys[place], kv_group)) for kv_group in seen):
            num_blocks = place
    return num_blocks


def keys_seen(keys: Sequence[Key], num_blocks: int, reaches: Sequence[Reach]) -> list[Key]:
    """Return the keys of the blocks visible after num_blocks blocks, KV group by KV group."""
    return [
        key_in_group(keys[place], kv_group)
        for kv_group, reach in enumerate(reaches)
        for place in reach.seen(num_blocks)
    ]


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))
