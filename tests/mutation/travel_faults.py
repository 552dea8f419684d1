"""Faults of prefixes that travel: who holds their blocks, and what is entered of them."""

from __future__ import annotations

from tests.mutation.planting import Fault

TRAVELS = ("kv_cache/test_travels.py",)
NEARING = ("kv_cache/offload/test_nearing.py",)
PLACES = ("data_parallel/test_places.py",)

TRAVEL_FAULTS = (
    Fault(
        "an export does not pin its device blocks",
        "kv_cache/prefix_cache.py",
        "            prefixes.num_cached -= prefixes.pool.acquire(block_id)\n            block_ids",
        "            block_ids",
        TRAVELS,
    ),
    Fault(
        "an export pins device blocks after their copy to host memory",
        "kv_cache/offload/transfer.py",
        "        self._tiers.held.release(part.at_device)\n        part.at_device = None\n        self._num_staged",
        "        self._num_staged",
        TRAVELS,
    ),
    Fault(
        "an export is read before its copy to host memory completes",
        "kv_cache/offload/transfer.py",
        "        self._tiers.host.on_transfers_done(host_block_ids, lambda: self._staged(part))",
        "        self._staged(part)",
        TRAVELS,
    ),
    Fault(
        "a canceled export releases only its first part",
        "kv_cache/offload/transfer.py",
        "        for part in self._parts:\n            self._let_go(part)",
        "        for part in self._parts[:1]:\n            self._let_go(part)",
        TRAVELS,
    ),
    Fault(
        "an export never releases host blocks that were cached before",
        "kv_cache/offload/transfer.py",
        "            if table is not None:\n                self._tiers.host.release(table)",
        "            if table is not None and table is part.staged:\n                self._tiers.host.release(table)",
        TRAVELS,
    ),
    Fault(
        "an export reads staged blocks instead of cached host blocks",
        "kv_cache/offload/transfer.py",
        "part.host_block_ids = [host_block_id or next(free) for host_block_id in part.host_block_ids]",
        "part.host_block_ids = [next(free, host_block_id) for host_block_id in part.host_block_ids]",
        TRAVELS,
    ),
    Fault(
        "an export copies a whole prefix in one step",
        "kv_cache/offload/transfer.py",
        "max(1, min(MAX_STAGED_BLOCKS, MAX_STAGED_BYTES // self.blocks.bytes_per_block))",
        "1 << 20",
        TRAVELS,
    ),
    Fault(
        "an export omits a block that the prompt's last token sees",
        "kv_cache/offload/transfer.py",
        "before = reach.first_block(max(0, num_blocks - 1))",
        "before = reach.first_block(num_blocks)",
        TRAVELS,
    ),
    Fault(
        "an import does not pin the host blocks that it needs",
        "kv_cache/offload/transfer.py",
        "                self._tables.append(host.hold(self._kept()))",
        "                pass",
        TRAVELS,
    ),
    Fault(
        "an import inserts a block under its neighbor's key",
        "kv_cache/offload/transfer.py",
        "return group_block_hash(self.keys[position.index], position.kv_group)",
        "return group_block_hash(self.keys[max(0, position.index - 1)], position.kv_group)",
        TRAVELS,
    ),
    Fault(
        "a canceled import still writes to its host blocks",
        "kv_cache/offload/transfer.py",
        "        with self._lock:\n            if self._is_closed:\n"
        '                raise Cancelled("the incoming prefix was canceled")\n            if block_id',
        "        with self._lock:\n            if block_id",
        TRAVELS,
    ),
    Fault(
        "an import writes to blocks that it has inserted",
        "kv_cache/offload/transfer.py",
        "            self._reserved.difference_update(block_ids)\n",
        "",
        TRAVELS,
    ),
    Fault(
        "a second export may pin the whole pool",
        "kv_cache/offload/transfer.py",
        "return max(0, limit // 2 - num_held) if num_held else limit",
        "return limit",
        TRAVELS,
    ),
    Fault(
        "an import does not mark its device blocks as recently used",
        "kv_cache/offload/transfer.py",
        "                self._tiers.prefixes.touch(self._keys())\n",
        "",
        TRAVELS,
    ),
    Fault(
        "an export that a client waits for is not faster",
        "kv_cache/offload/transfer.py",
        "tiers.num_blocks_at_once * (HURRIED if is_hurried else 1)",
        "tiers.num_blocks_at_once",
        TRAVELS,
    ),
    Fault(
        "an early import reserves all of host memory",
        "kv_cache/offload/transfer.py",
        "host.pool.num_blocks // 2 if is_early else 0",
        "0",
        TRAVELS,
    ),
    Fault(
        "a host prefetch copies all blocks in one step",
        "kv_cache/swapper.py",
        "most = max(1, MAX_PREFETCH_BYTES // self._bytes_per_block)",
        "most = 1 << 20",
        NEARING,
    ),
    Fault(
        "blocks loaded at admission do not count toward the step's limit",
        "kv_cache/swapper.py",
        "            self._num_in_step += num_away\n",
        "",
        NEARING,
    ),
    Fault(
        "a group whose prefetched blocks are evicted waits without a limit",
        "kv_cache/swapper.py",
        "            self._num_steps_left -= 1\n",
        "",
        NEARING,
    ),
    Fault(
        "a host prefetch inserts a block under its neighbor's key",
        "kv_cache/swapper.py",
        "block_id, chain[index], kv_group, ",
        "block_id, chain[max(0, index - 1)], kv_group, ",
        NEARING,
    ),
    Fault(
        "a host prefetch does not release its device blocks",
        "kv_cache/swapper.py",
        "        prefixes.pool.release(table)\n",
        "",
        NEARING,
    ),
    Fault(
        "an import goes to another replica than its request",
        "data_parallel.py",
        "return self._engines[route.replica].kv_transfer",
        "return self._engines[0].kv_transfer",
        PLACES,
    ),
    Fault(
        "a request runs on another replica than its reservation",
        "data_parallel.py",
        "self._engines[kept.replica].submit",
        "self._engines[-1].submit",
        PLACES,
    ),
    Fault(
        "a dropped reservation is kept",
        "data_parallel.py",
        "            self._kept.pop(request_id, None)\n",
        "",
        PLACES,
    ),
    Fault(
        "an export starts on a replica that lacks the prefix",
        "kv_cache/offload/transfer.py",
        "return max(self.each, key=lambda one: one.tiers.num_known(chain)).leave(chain, num_skipped, is_hurried)",
        "return self.each[-1].leave(chain, num_skipped, is_hurried)",
        TRAVELS,
    ),
)
