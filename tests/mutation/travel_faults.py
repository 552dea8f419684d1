"""Faults of prefixes that travel: who holds their blocks, and what is entered of them."""

from __future__ import annotations

from tests.mutation.planting import Fault

TRAVELS = ("kv_cache/test_travels.py",)
NEARING = ("kv_cache/offload/test_nearing.py",)
PLACES = ("data_parallel/test_places.py",)

TRAVEL_FAULTS = (
    Fault(
        "a block is freed while it travels",
        "kv_cache/prefix_cache.py",
        "            prefixes.num_cached -= prefixes.pool.acquire(block_id)\n            block_ids",
        "            block_ids",
        TRAVELS,
    ),
    Fault(
        "blocks of the device are held until they are read",
        "kv_cache/offload/transfer.py",
        "        self._tiers.held.release(part.at_device)\n        part.at_device = None\n        self._num_staged",
        "        self._num_staged",
        TRAVELS,
    ),
    Fault(
        "a prefix is read before it has come to host memory",
        "kv_cache/offload/transfer.py",
        "        self._tiers.host.on_transfers_done(homes, lambda: self._staged(part))",
        "        self._staged(part)",
        TRAVELS,
    ),
    Fault(
        "a reader that goes away keeps what it was given",
        "kv_cache/offload/transfer.py",
        "        for part in self._parts:\n            self._let_go(part)",
        "        for part in self._parts[:1]:\n            self._let_go(part)",
        TRAVELS,
    ),
    Fault(
        "what was read is held for good",
        "kv_cache/offload/transfer.py",
        "            if table is not None:\n                self._tiers.host.release(table)",
        "            if table is not None and table is part.staged:\n                self._tiers.host.release(table)",
        TRAVELS,
    ),
    Fault(
        "blocks of host memory are taken for those of the device",
        "kv_cache/offload/transfer.py",
        "part.homes = [home or next(free) for home in part.homes]",
        "part.homes = [next(free, home) for home in part.homes]",
        TRAVELS,
    ),
    Fault(
        "all of a prefix moves in one step",
        "kv_cache/offload/transfer.py",
        "max(1, min(MAX_STAGED_BLOCKS, MAX_STAGED_BYTES // self.blocks.bytes_per_block))",
        "1 << 20",
        TRAVELS,
    ),
    Fault(
        "a window's last block but one stays",
        "kv_cache/offload/transfer.py",
        "before = reach.first_block(max(0, num_blocks - 1))",
        "before = reach.first_block(num_blocks)",
        TRAVELS,
    ),
    Fault(
        "what is here is evicted for the rest of the prefix",
        "kv_cache/offload/transfer.py",
        "                self._tables.append(host.hold(self._kept()))",
        "                pass",
        TRAVELS,
    ),
    Fault(
        "a block is entered under its neighbour's key",
        "kv_cache/offload/transfer.py",
        "return group_block_hash(self.keys[place.index], place.kv_group)",
        "return group_block_hash(self.keys[max(0, place.index - 1)], place.kv_group)",
        TRAVELS,
    ),
    Fault(
        "whoever is late writes a block of somebody else",
        "kv_cache/offload/transfer.py",
        "        with self._lock:\n            if self._is_closed:\n"
        '                raise Cancelled("the incoming prefix was canceled")\n            if block_id',
        "        with self._lock:\n            if block_id",
        TRAVELS,
    ),
    Fault(
        "a block that is entered may still be written",
        "kv_cache/offload/transfer.py",
        "            self._reserved.difference_update(block_ids)\n",
        "",
        TRAVELS,
    ),
    Fault(
        "what leaves beside others takes the whole pool",
        "kv_cache/offload/transfer.py",
        "return max(0, limit // 2 - num_held) if num_held else limit",
        "return limit",
        TRAVELS,
    ),
    Fault(
        "what is on the device is evicted while the rest comes",
        "kv_cache/offload/transfer.py",
        "                self._tiers.prefixes.touch(self._keys())\n",
        "",
        TRAVELS,
    ),
    Fault(
        "what somebody waits for goes as slowly as anything",
        "kv_cache/offload/transfer.py",
        "tiers.num_blocks_at_once * (HURRIED if is_hurried else 1)",
        "tiers.num_blocks_at_once",
        TRAVELS,
    ),
    Fault(
        "what comes later takes all of host memory",
        "kv_cache/offload/transfer.py",
        "host.pool.num_blocks // 2 if is_early else 0",
        "0",
        TRAVELS,
    ),
    Fault(
        "all that host memory has comes in one step",
        "kv_cache/offload/host_prefetch.py",
        "most = max(1, MAX_BYTES // self._bytes_per_block)",
        "most = 1 << 20",
        NEARING,
    ),
    Fault(
        "each who is admitted has a step of its own",
        "kv_cache/offload/host_prefetch.py",
        "            self._num_in_step += num_away\n",
        "",
        NEARING,
    ),
    Fault(
        "who loses what comes waits for ever",
        "kv_cache/offload/host_prefetch.py",
        "            self._num_steps_left -= 1\n",
        "",
        NEARING,
    ),
    Fault(
        "what comes is known by its neighbour's key",
        "kv_cache/offload/host_prefetch.py",
        "block_id, chain[index], kv_group, ",
        "block_id, chain[max(0, index - 1)], kv_group, ",
        NEARING,
    ),
    Fault(
        "what comes is never given back",
        "kv_cache/offload/host_prefetch.py",
        "        prefixes.pool.release(table)\n",
        "",
        NEARING,
    ),
    Fault(
        "blocks arrive at another replica than their request",
        "data_parallel.py",
        "return self._engines[route.replica].travels",
        "return self._engines[0].travels",
        PLACES,
    ),
    Fault(
        "a request runs elsewhere than where its place was kept",
        "data_parallel.py",
        "self._engines[kept.replica].submit",
        "self._engines[-1].submit",
        PLACES,
    ),
    Fault(
        "a place that is dropped is kept",
        "data_parallel.py",
        "            self._kept.pop(request_id, None)\n",
        "",
        PLACES,
    ),
    Fault(
        "a replica that has nothing of a prefix is asked for it",
        "kv_cache/offload/transfer.py",
        "return max(self.each, key=lambda one: one.tiers.num_known(chain)).leave(chain, num_skipped, is_hurried)",
        "return self.each[-1].leave(chain, num_skipped, is_hurried)",
        TRAVELS,
    ),
)
