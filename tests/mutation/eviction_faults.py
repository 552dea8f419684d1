"""Faults of eviction: what goes first, and what a policy is told."""

from __future__ import annotations

from tests.mutation.planting import Fault

POLICIES = ("kv_cache/eviction/test_policies.py",)
MEMORY = ("kv_cache/eviction/test_memory.py",)
DISK = ("kv_cache/offload/test_disk.py",)
REUSE = ("kv_cache/eviction/test_reuse.py",)

EVICTION_FAULTS = (
    Fault(
        "cached blocks are evicted before empty blocks are used",
        "kv_cache/eviction/free_list.py",
        "        if self._blank:\n            return",
        "        if self._blank and not self._ranked:\n            return",
        MEMORY,
    ),
    Fault(
        "a forgotten free block stays an eviction candidate",
        "kv_cache/eviction/free_list.py",
        "        if slot in self._ranked:\n            self._ranked.remove(slot)\n"
        "            self._policy.on_acquire(slot)\n            self._blank[slot] = None\n",
        "",
        POLICIES,
    ),
    Fault(
        "a block is evicted before its children",
        "kv_cache/eviction/cost_aware.py",
        "                if self._blocks[slot].entry.key not in self._num_followers:\n",
        "                if slot in self._blocks:\n",
        POLICIES,
    ),
    Fault(
        "a skipped block is never a candidate again",
        "kv_cache/eviction/cost_aware.py",
        "            heapq.heappush(self.ripe, (self.passed[slot], slot))",
        "            pass",
        POLICIES,
    ),
    Fault(
        "a merge of old buckets loses their skipped blocks",
        "kv_cache/eviction/cost_aware.py",
        "            self.passed[slot] = freed_at\n            moved",
        "            moved",
        POLICIES,
    ),
    Fault(
        "a merge of old buckets moves any number of blocks at once",
        "kv_cache/eviction/cost_aware.py",
        "                moved, num_left = older.merge(bucket, num_left)\n",
        "                moved, _ = older.merge(bucket, len(self._bucket_by_slot) * 2)\n",
        POLICIES,
    ),
    Fault(
        "the policy learns nothing when an evicted block is needed again",
        "kv_cache/eviction/cost_aware.py",
        "            self._was_needed(gone)\n",
        "",
        POLICIES,
    ),
    Fault(
        "evicted blocks are remembered without a limit",
        "kv_cache/eviction/cost_aware.py",
        "            if len(self._gone) > self._num_slots:\n",
        "            if not self._gone:\n",
        POLICIES,
    ),
    Fault(
        "a block's cost ignores that a copy can be fetched",
        "kv_cache/eviction/cost_aware.py",
        "            seconds = min(seconds, fetch_s)\n",
        "            pass\n",
        MEMORY,
    ),
    Fault(
        "the eviction policy gets no fetch time of host copies",
        "kv_cache/paged.py",
        "        if self._eviction is not None and key in self._host:\n",
        "        if self._eviction is None:\n",
        MEMORY,
    ),
    Fault(
        "the eviction policy gets no fetch time of disk copies",
        "kv_cache/paged.py",
        "(s for connector in self.connectors if (s := connector.block_s(key)) is not None)",
        "iter(())",
        DISK,
    ),
    Fault(
        "the policy is not notified that a free block is reused",
        "kv_cache/eviction/free_list.py",
        "            self._policy.on_acquire(slot)\n        else:\n",
        "        else:\n",
        MEMORY,
    ),
    Fault(
        "empty buckets are kept until an eviction",
        "kv_cache/eviction/cost_aware.py",
        "            self._drop_empty(key[2])\n",
        "",
        POLICIES,
    ),
    Fault(
        "the empty queue of a use count is not removed",
        "kv_cache/eviction/policies.py",
        "            del self._free[count]\n",
        "            pass\n",
        POLICIES,
    ),
    Fault(
        "the policy ignores how often an owner's blocks are reused",
        "kv_cache/eviction/cost_aware.py",
        "        of_owner = (share >= _SHARES[0]) + (share >= _SHARES[1])",
        "        of_owner = 1",
        POLICIES,
    ),
    Fault(
        "the recompute cost of a block ignores attention",
        "kv_cache/eviction/cost_aware.py",
        "        return self.first_s + index * self.further_s",
        "        return self.first_s",
        REUSE,
    ),
    Fault(
        "reuse rates ignore free blocks that are still cached",
        "kv_cache/eviction/cost_aware.py",
        "        ends_ca = self._found_ca + self._ended_ca + alive_ca\n",
        "        ends_ca = self._found_ca + self._ended_ca\n",
        REUSE,
    ),
    Fault(
        "the newest of equally used blocks is evicted first",
        "kv_cache/eviction/policies.py",
        "next(iter(self._free",
        "next(reversed(self._free",
        POLICIES,
    ),
    Fault(
        "an evicted block that returns loses its use count",
        "kv_cache/eviction/policies.py",
        "            self._ghosts[entry.key] = count\n",
        "            self._ghosts[entry.key] = 0\n",
        POLICIES,
    ),
    Fault(
        "the policy is not notified of prefix cache hits",
        "kv_cache/prefix_cache.py",
        "            self._ranked.found([*found.values()])\n",
        "            pass\n",
        MEMORY,
    ),
    Fault(
        "host memory does not report evictions to its policy",
        "kv_cache/offload/host.py",
        "                self._ranked.evicted(host_block_id)\n",
        "                pass\n",
        MEMORY,
    ),
    Fault(
        "host memory stores blocks that its policy does not know",
        "kv_cache/offload/host.py",
        "            self._ranked.enter(host_block_id, entry)\n",
        "            pass\n",
        MEMORY,
    ),
)
