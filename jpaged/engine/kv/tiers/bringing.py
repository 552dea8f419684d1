"""Missing prefix blocks of a waiting group, and their insertion into the prefix cache.

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
    """Block at an index of a prompt in one KV group, with its cache key."""

    index: int
    kv_group: int
    key: Key


class Bringing:
    """Loader of device blocks for waiting prompts. Loaded blocks are cached and free, without a reference."""

    def __init__(self, prefixes: Prefixes, ops: MemoryOps) -> None:
        self._prefixes = prefixes
        self._ops = ops

    def missing(self, group: Group, is_below: Callable[[Key], bool]) -> list[Place]:
        """Return the blocks that memory misses of the longest prefix there or below, in prompt order.

        If the pool has too little room for the prefix, it is shortened. Blocks on the device or in host memory that the
        prompt hits also take free blocks. The prefix's device blocks move to the end of the eviction order, so that
        loading does not evict them.
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
        """Return True if a hit on the key takes a free block of the pool: the cached block, or one to copy it to."""
        block_id = self._prefixes.cache.find(key)
        return block_id is None or self._prefixes.pool.is_free(block_id)

    def bring_in(self, group: Group, place: Place, home: int) -> bool:
        """Insert a block that a reserved host block holds into the cache; return False if the pool has no room."""
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
