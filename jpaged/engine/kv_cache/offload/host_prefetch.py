"""Prefetch of a waiting prompt's host blocks over several steps, so that no running step is delayed by the whole copy.

step 0    [h0 h1 h2]                    the group waits; copied blocks are cached and free, like those of past requests
step 1              [h3 h4 h5]
step 2                        [h6 h7]   few enough for one step: the group is admitted, which copies them
"""

from __future__ import annotations

from jpaged.engine.kv_cache.blocks import BlockCopyPlan, BlockTable, group_block_hash
from jpaged.engine.kv_cache.offload.host import HostTier
from jpaged.engine.kv_cache.prefix_cache import PrefixCacheManager, keys_seen
from jpaged.engine.sequence import SequenceGroup

MAX_BYTES = 64 << 20
"""Maximum bytes copied per step next to running rows: some milliseconds of copying."""


class HostPrefetcher:
    """Prefetcher for prompts that are next to be admitted and have room. Only the engine thread calls it.

    Args:
        bytes_per_block: size of a device block.
    """

    def __init__(self, prefixes: PrefixCacheManager, host: HostTier, ops: BlockCopyPlan, bytes_per_block: int) -> None:
        self._prefixes = prefixes
        self._host = host
        self._ops = ops
        self._bytes_per_block = bytes_per_block
        self._step = self._num_in_step = 0
        self._group: SequenceGroup | None = None
        self._num_steps_left = 0

    def brings(self, group: SequenceGroup) -> bool:
        """Copy a part of a group's host blocks; return False if the rest is small enough to copy at admission.

        A group whose blocks are evicted as fast as they are copied waits at most one step per part.
        """
        if not self._host.blocks:
            return False
        most = max(1, MAX_BYTES // self._bytes_per_block)
        if self._step != self._ops.num_taken:
            self._step, self._num_in_step = self._ops.num_taken, 0
        prefixes = self._prefixes
        chain = prefixes.lookup_keys(group)
        num_blocks = prefixes.num_loadable(chain)
        seen = keys_seen(chain, num_blocks, prefixes.reaches)
        num_away = sum(prefixes.cache.find(key) is None for key in seen)
        if self._group is not group:
            self._group, self._num_steps_left = group, -(-num_away // most)
        if self._num_in_step + num_away <= most or self._num_steps_left == 0:
            self._group = None
            self._num_in_step += num_away
            return False
        room = most - self._num_in_step
        if room > 0:
            self._num_steps_left -= 1
            self._num_in_step = most
            prefixes.touch(seen)
            self._bring(group, num_blocks, room)
        return True

    def _bring(self, group: SequenceGroup, num_blocks: int, room: int) -> None:
        """Copy the first `room` blocks that are not on the device, in prompt order."""
        prefixes, leader, chain = self._prefixes, group.live[0], self._prefixes.lookup_keys(group)
        places = sorted(
            (index, kv_group)
            for kv_group, reach in enumerate(prefixes.reaches)
            for index in reach.seen(num_blocks)
            if prefixes.cache.find(group_block_hash(chain[index], kv_group)) is None
        )[:room]
        keys = [group_block_hash(chain[index], kv_group) for index, kv_group in places]
        seen = [self._host.times_seen(key) for key in keys]  # admission will find them on the device
        table = BlockTable(len(keys))
        table.extend(self._host.load(keys, prefixes.pool))
        for (index, kv_group), block_id, times_seen in zip(places, table.block_ids(), seen, strict=True):
            prefixes.cache.insert_in_group(leader, index, block_id, chain[index], kv_group, times_seen=times_seen)
        prefixes.pool.release(table)
        self._ops.counts.brought_back(prefixes.pool.block_size * len(keys) // len(prefixes.reaches))
