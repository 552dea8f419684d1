"""What a waiting group misses of its prompt, and how that comes to be cached, as if it had been computed by somebody.

prompt   [0][1][2][3][4][5]      0 and 1 are on the device, 2 in host memory, 3 and 4 below: 3 and 4 are missing
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jpaged.engine.executor import Move
from jpaged.engine.kv.blocks import BlockTable, Key, MemoryOps, key_in_group
from jpaged.engine.kv.prefix_cache import num_usable
from jpaged.engine.kv.prefixes import Prefixes
from jpaged.engine.sequence import Group


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The block at an index of a prompt, in one KV group, and what it is known by."""

    index: int
    kv_group: int
    key: Key


class Bringing:
    """Brings blocks into the device's pool for prompts that wait. What it brings is cached and free: nobody's yet."""

    def __init__(self, prefixes: Prefixes, ops: MemoryOps) -> None:
        self._prefixes = prefixes
        self._ops = ops

    def missing(self, group: Group, is_below: Callable[[Key], bool]) -> list[Place]:
        """What memory misses of the longest prefix of a prompt that is there or below, in the order of the prompt.

        Of a pool that has too little room for all of it the beginning: what is on the device already and free, and what
        host memory has, is no room. What is on the device becomes the last to be evicted, so that what is brought in
        does not push it out.
        """
        prefixes, reaches = self._prefixes, self._prefixes.reaches
        keys = prefixes.findable(group)
        num_blocks = len(keys)
        while num_blocks := num_usable(
            keys[:num_blocks], reaches, lambda key: prefixes.has_prefix(key) or is_below(key)
        ):
            seen = [
                Place(i, kv_group, key_in_group(keys[i], kv_group))
                for kv_group, reach in enumerate(reaches)
                for i in reach.seen(num_blocks)
            ]
            places = sorted(place for place in seen if not prefixes.has_prefix(place.key))
            if not places:
                return []
            num_needed = sum(self._takes_room(place.key) for place in seen)
            if prefixes.pool.can_allocate(num_needed):
                prefixes.renew([place.key for place in seen])
                return places
            num_blocks -= max(1, (num_needed - prefixes.pool.num_free) // len(reaches))
        return []

    def _takes_room(self, key: Key) -> bool:
        """Who takes the block takes a free one of the pool: its own, or another that it is copied to."""
        block_id = self._prefixes.cache.find(key)
        return block_id is None or self._prefixes.pool.is_free(block_id)

    def bring_in(self, group: Group, place: Place, home: int) -> bool:
        """Makes a block known that a reserved block of host memory holds; False where the pool has no room for it."""
        prefixes, leader = self._prefixes, group.live[0]
        if prefixes.cache.find(place.key) is not None:
            return True
        if not prefixes.pool.can_allocate(1):
            return False
        table = BlockTable(1)
        table.extend(prefixes.pool.allocate(1))
        self._ops.add(Move.SWAP_IN, home, table.block_id(0), passes=True)
        key = prefixes.findable(group)[place.index]
        prefixes.cache.insert_of(leader, place.index, table.block_id(0), key, place.kv_group)
        prefixes.pool.release(table)
        return True
