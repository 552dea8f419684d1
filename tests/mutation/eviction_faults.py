"""Faults of eviction: what goes first, and what a policy is told."""

from __future__ import annotations

from tests.mutation.planting import Fault

POLICIES = ("kv_cache/eviction/test_policies.py",)
MEMORY = ("kv_cache/eviction/test_memory.py",)
DISK = ("kv_cache/offload/test_disk.py",)
REUSE = ("kv_cache/eviction/test_reuse.py",)

EVICTION_FAULTS = (
    Fault(
        "blocks that hold nothing go when no others are left",
        "kv_cache/eviction/free_list.py",
        "        if self._blank:\n            return",
        "        if self._blank and not self._ranked:\n            return",
        MEMORY,
    ),
    Fault(
        "a place that may not be found stays ranked",
        "kv_cache/eviction/free_list.py",
        "        if place in self._ranked:\n            self._ranked.remove(place)\n"
        "            self._policy.on_acquire(place)\n            self._blank[place] = None\n",
        "",
        POLICIES,
    ),
    Fault(
        "a block goes before those that follow it",
        "kv_cache/eviction/cost_aware.py",
        "                if self._blocks[place].entry.key not in self._num_followers:\n",
        "                if place in self._blocks:\n",
        POLICIES,
    ),
    Fault(
        "a block that was passed over is never looked at again",
        "kv_cache/eviction/cost_aware.py",
        "            heapq.heappush(self.ripe, (self.passed[place], place))",
        "            pass",
        POLICIES,
    ),
    Fault(
        "old lots lose blocks when they are put together",
        "kv_cache/eviction/cost_aware.py",
        "            self.passed[place] = freed_at\n            moved",
        "            moved",
        POLICIES,
    ),
    Fault(
        "old lots are put together at once, however many blocks they hold",
        "kv_cache/eviction/cost_aware.py",
        "                moved, num_left = older.take_in(lot, num_left)\n",
        "                moved, _ = older.take_in(lot, len(self._lot_of) * 2)\n",
        POLICIES,
    ),
    Fault(
        "an evicted block that is needed again teaches nothing",
        "kv_cache/eviction/cost_aware.py",
        "            self._was_needed(gone)\n",
        "",
        POLICIES,
    ),
    Fault(
        "evicted blocks are remembered for ever",
        "kv_cache/eviction/cost_aware.py",
        "            if len(self._gone) > self._num_places:\n",
        "            if not self._gone:\n",
        POLICIES,
    ),
    Fault(
        "a block that host memory keeps is as dear as any",
        "kv_cache/eviction/cost_aware.py",
        "            seconds = min(seconds, fetch_s)\n",
        "            pass\n",
        MEMORY,
    ),
    Fault(
        "nobody asks what host memory keeps",
        "kv_cache/paged.py",
        "        if self._eviction is not None and key in self._host:\n",
        "        if self._eviction is None:\n",
        MEMORY,
    ),
    Fault(
        "nobody asks what disk keeps",
        "kv_cache/paged.py",
        "(s for connector in self.connectors if (s := connector.block_s(key)) is not None)",
        "iter(())",
        DISK,
    ),
    Fault(
        "a policy is not told that a place is held again",
        "kv_cache/eviction/free_list.py",
        "            self._policy.on_acquire(place)\n        else:\n",
        "        else:\n",
        MEMORY,
    ),
    Fault(
        "lots that hold nothing are kept until something goes",
        "kv_cache/eviction/cost_aware.py",
        "            self._drop_empty(key[2])\n",
        "",
        POLICIES,
    ),
    Fault(
        "times seen that no place has are kept until something goes",
        "kv_cache/eviction/policies.py",
        "            del self._free[count]\n",
        "            pass\n",
        POLICIES,
    ),
    Fault(
        "all owners are alike",
        "kv_cache/eviction/cost_aware.py",
        "        of_owner = (share >= _SHARES[0]) + (share >= _SHARES[1])",
        "        of_owner = 1",
        POLICIES,
    ),
    Fault(
        "attention costs nothing",
        "kv_cache/eviction/cost_aware.py",
        "        return self.first_s + index * self.further_s",
        "        return self.first_s",
        REUSE,
    ),
    Fault(
        "blocks that are still kept do not count",
        "kv_cache/eviction/cost_aware.py",
        "        ends_ca = self._found_ca + self._ended_ca + alive_ca\n",
        "        ends_ca = self._found_ca + self._ended_ca\n",
        REUSE,
    ),
    Fault(
        "of equals the one that was used last goes",
        "kv_cache/eviction/policies.py",
        "next(iter(self._free",
        "next(reversed(self._free",
        POLICIES,
    ),
    Fault(
        "what comes back after it was evicted is new",
        "kv_cache/eviction/policies.py",
        "            self._ghosts[entry.key] = count\n",
        "            self._ghosts[entry.key] = 0\n",
        POLICIES,
    ),
    Fault(
        "a policy is not told of hits",
        "kv_cache/prefix_cache.py",
        "            self._ranked.found([*found.values()])\n",
        "            pass\n",
        MEMORY,
    ),
    Fault(
        "host memory does not say what it gives up",
        "kv_cache/offload/host.py",
        "                self._ranked.evicted(home)\n",
        "                pass\n",
        MEMORY,
    ),
    Fault(
        "host memory keeps blocks that its policy has not seen",
        "kv_cache/offload/host.py",
        "            self._ranked.enter(home, entry)\n",
        "            pass\n",
        MEMORY,
    ),
)
