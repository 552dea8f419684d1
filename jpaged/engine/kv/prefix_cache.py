"""Finds the blocks that already hold a prefix, by a SHA-256 chain over full blocks.

    key(0) = H(root(tenant, salt), tokens of block 0)      key(i) = H(key(i - 1), tokens of block i)

A key names a block's content together with everything before it, so a match of the last key is a match of all. Blocks
keep their key when they are released; the pool's free list, in order of last use, is the cache's LRU, and a key dies
when its block is reissued. Two tenants, and two salts of one, have different roots and never share.

    cached     [ a b c d ] [ e f g h ]
    prompt     [ a b c d ] [ e f x y ]       one full block is shared; of the second, "e f" is used by copying the
                 match       2 tokens        block and overwriting its tail

Owns keys, no references: who holds a block is the pool's to know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

Key = bytes
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


def root_key(salt: str, tenant: str = "") -> Key:
    """The parent of a sequence's first block; no two pairs of salt and tenant have the same."""
    if not tenant:
        return hashlib.sha256(b"jpaged/prefix/1\0" + salt.encode()).digest()
    named = tenant.encode()
    return hashlib.sha256(b"jpaged/prefix/2\0" + len(named).to_bytes(4, "big") + named + salt.encode()).digest()


def block_key(parent: Key, token_ids: Sequence[int]) -> Key:
    """The key of a full block that comes after `parent`."""
    return hashlib.sha256(parent + np.asarray(token_ids, np.int32).tobytes()).digest()


class PrefixCache:
    """Key -> block, and what is needed to forget a block and to find partial matches."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._parents: dict[int, Key] = {}
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._children: dict[Key, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._keys

    def find(self, key: Key) -> int:
        """The block of a key that is known."""
        return self._blocks[key]

    def has_key(self, key: Key) -> bool:
        """Whether some block holds what the key names."""
        return key in self._blocks

    def block_ids(self) -> Iterable[int]:
        """Every block with a key."""
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
