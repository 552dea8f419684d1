"""Full blocks of a prompt and their hashes: the identity of a prefix that is transferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.engine.kv.blocks import Key, block_key, key_in_group
from jpaged.engine.kv.eviction.policy import Entry
from jpaged.engine.reach import Reach


@dataclass(frozen=True, slots=True)
class Chain:
    """Leading full blocks of a prompt.

    Attributes:
        root: parent hash of the first block.
        token_ids: tokens of exactly these blocks.
        keys: hash of each block.
    """

    root: Key
    token_ids: tuple[int, ...]
    keys: tuple[Key, ...]

    @classmethod
    def of(cls, root: Key, token_ids: Sequence[int], block_size: int, num_blocks: int | None = None) -> Chain:
        """Return the chain of the first full blocks of some tokens; takes 1 to 3 microseconds per block."""
        most = len(token_ids) // block_size
        num_blocks = most if num_blocks is None else min(num_blocks, most)
        keys, parent = [], root
        for start in range(0, num_blocks * block_size, block_size):
            parent = block_key(parent, token_ids[start : start + block_size])
            keys.append(parent)
        return cls(root, tuple(token_ids[: num_blocks * block_size]), tuple(keys))

    def key(self, place: Place) -> Key:
        """Return the cache key of a block."""
        return key_in_group(self.keys[place.index], place.kv_group)

    def entry(self, place: Place, reaches: Sequence[Reach]) -> Entry:
        """Return the eviction entry of a block; in a sliding window its only parents are attention sinks."""
        needed = reaches[place.kv_group].above(place.index)
        above = None if needed is None else key_in_group(self.keys[needed], place.kv_group)
        return Entry(self.key(place), above, place.index, self.root)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Position of a block: index in a chain, and KV group."""

    index: int
    kv_group: int
