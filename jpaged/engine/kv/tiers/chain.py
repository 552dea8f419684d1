"""The full blocks of a prompt, and what they are known by: what a prefix is called that travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.engine.kv.blocks import Key, block_key, key_in_group
from jpaged.engine.kv.eviction.policy import Entry
from jpaged.engine.reach import Reach


@dataclass(frozen=True, slots=True)
class Chain:
    """Full blocks from the first on.

    Attributes:
        root: the parent of the first.
        token_ids: of all of them, and no more.
        keys: of each.
    """

    root: Key
    token_ids: tuple[int, ...]
    keys: tuple[Key, ...]

    @classmethod
    def of(cls, root: Key, token_ids: Sequence[int], block_size: int, num_blocks: int | None = None) -> Chain:
        """The chain of the full blocks of some tokens, or of the first of them; a microsecond or three each."""
        most = len(token_ids) // block_size
        num_blocks = most if num_blocks is None else min(num_blocks, most)
        keys, parent = [], root
        for start in range(0, num_blocks * block_size, block_size):
            parent = block_key(parent, token_ids[start : start + block_size])
            keys.append(parent)
        return cls(root, tuple(token_ids[: num_blocks * block_size]), tuple(keys))

    def key(self, place: Place) -> Key:
        """What a block is known by."""
        return key_in_group(self.keys[place.index], place.kv_group)

    def entry(self, place: Place, reaches: Sequence[Reach]) -> Entry:
        """What eviction knows of a block; of a window nobody needs what is in front of it but first tokens."""
        needed = reaches[place.kv_group].above(place.index)
        above = None if needed is None else key_in_group(self.keys[needed], place.kv_group)
        return Entry(self.key(place), above, place.index, self.root)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Which block it is: the index-th of a chain, of one KV group."""

    index: int
    kv_group: int
