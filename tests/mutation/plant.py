"""Plants faults into the engine, and sees that its quick tests turn red.

python -m tests.mutation.plant
"""

from __future__ import annotations

import sys

from tests.mutation.planting import Bed, Fault

LIVES = ("test_lives.py",)
ROOM = ("test_room.py",)

FAULTS = (
    Fault(
        "a fork's reference is not counted",
        "block_pool.py",
        "            self.acquire(block_id)\n        child.extend(block_ids)",
        "            pass\n        child.extend(block_ids)",
        ("test_sharing.py",),
    ),
    Fault(
        "a copy is made after the write",
        "engine.py",
        "        for moves in schedule.ops.batches():\n            self._executor.move_blocks(moves)\n"
        "        if not schedule.rows:\n            return None\n"
        "        inputs = build_step_inputs(schedule, self.geometry, self._eos_token_ids)\n"
        "        return schedule, self._executor.dispatch(inputs)\n",
        "        handle = None\n        if schedule.rows:\n"
        "            inputs = build_step_inputs(schedule, self.geometry, self._eos_token_ids)\n"
        "            handle = self._executor.dispatch(inputs)\n"
        "        for moves in schedule.ops.batches():\n            self._executor.move_blocks(moves)\n"
        "        return (schedule, handle) if schedule.rows else None\n",
        ("test_sharing.py",),
    ),
    Fault(
        "the salt has no part in the key",
        "prefix_cache.py",
        'b"jpaged/prefix/1\\0" + salt.encode()',
        'b"jpaged/prefix/1\\0"',
        ("test_prefix_cache.py",),
    ),
    Fault(
        "a shared block is freed with its first holder",
        "block_pool.py",
        "            if count == 1:\n                self._free[block_id] = None",
        "            if count >= 1:\n                self._free[block_id] = None",
        ("test_sharing.py",),
    ),
    Fault(
        "a released block is released again",
        "paged_memory.py",
        "        self._num_cached += sum(block_id in self._cache for block_id in self._pool.release(table))",
        "        twin = BlockTable(table.num_blocks)\n        twin.extend(table.block_ids())\n"
        "        self._num_cached += sum(block_id in self._cache for block_id in self._pool.release(table))\n"
        "        self._pool.release(twin)",
        ("test_engine.py",),
    ),
    Fault(
        "a block is swapped in to another's place",
        "paged_memory.py",
        "        for source, destination in homes.items():\n"
        "            self._ops.add(Move.SWAP_IN, source, destination)",
        "        for source, destination in zip(homes, reversed(homes.values()), strict=True):\n"
        "            self._ops.add(Move.SWAP_IN, source, destination)",
        ("test_swap.py",),
    ),
    Fault(
        "moves wait for a step that has rows",
        "engine.py",
        "        for moves in schedule.ops.batches():\n            self._executor.move_blocks(moves)\n"
        "        if not schedule.rows:\n            return None\n",
        "        if not schedule.rows:\n            return None\n"
        "        for moves in schedule.ops.batches():\n            self._executor.move_blocks(moves)\n",
        ("test_swap.py",),
    ),
    Fault(
        "the block that was freed last is reissued first",
        "block_pool.py",
        "self._free.popitem(last=False)",
        "self._free.popitem(last=True)",
        ("test_prefix_cache.py",),
    ),
    Fault(
        "a chain is freed from its head",
        "block_pool.py",
        "for block_id in reversed(table.clear()):",
        "for block_id in table.clear():",
        ("test_prefix_cache.py",),
    ),
    Fault(
        "a partial hit counts one token too many",
        "paged_memory.py",
        "            num_tokens += match.num_partial_tokens",
        "            num_tokens += match.num_partial_tokens + 1",
        ("test_prefix_cache.py",),
    ),
    Fault(
        "a partial hit is shared and not copied",
        "paged_memory.py",
        "        (destination,) = self._pool.allocate(1)\n        if destination != source:",
        "        (destination,) = self._pool.allocate(1)\n        if destination == source:",
        ("test_prefix_cache.py",),
    ),
    Fault(
        "a forked region is copied before it is written",
        "reserved_memory.py",
        "        self._visitors.add(child)\n",
        "        self._visitors.add(child)\n        self.settle(child)\n",
        ("test_reserved.py",),
    ),
    Fault(
        "beams are ranked when some of them have drawn",
        "scheduler.py",
        "    if group.request.sampling.beam_width and parts != wanted:",
        "    if group.request.sampling.beam_width is False and parts != wanted:",
        ("test_beam.py",),
    ),
    Fault(
        "a key stays known in host memory when its block is given away",
        "paged_memory.py",
        "            del self._host_blocks[key]\n",
        "            pass\n",
        LIVES,
    ),
    Fault(
        "a block in host memory is not held while it is brought back",
        "paged_memory.py",
        "            self._host_pool.acquire(source)\n            held.extend([source])\n",
        "",
        LIVES,
    ),
    Fault(
        "the salt has no part in the keys of several samples",
        "sequence.py",
        "root_key(sampling.cache_salt, request.cache_tenant) if",
        'root_key(sampling.cache_salt if num_sequences == 1 else "", request.cache_tenant) if',
        ("test_prefix_cache.py",),
    ),
    Fault(
        "the salt has no part in the keys of beams",
        "sequence.py",
        "root_key(sampling.cache_salt, request.cache_tenant) if",
        'root_key("" if sampling.beam_width else sampling.cache_salt, request.cache_tenant) if',
        ("test_prefix_cache.py",),
    ),
    Fault(
        "the next in order makes room and not the last",
        "scheduler.py",
        "                self._preempt(self._running[-1], schedule)",
        "                self._preempt(self._running[min(position + 1, len(self._running) - 1)], schedule)",
        ROOM,
    ),
    Fault(
        "the first in order makes room for an urgent one",
        "scheduler.py",
        "            self._preempt(self._running[-1], schedule)\n\n    def _share",
        "            self._preempt(self._running[0], schedule)\n\n    def _share",
        ROOM,
    ),
    Fault(
        "a group comes back without room for its copies",
        "paged_memory.py",
        "        needed += self._num_copies(list(zip(group.live, tables, strict=True)), self._host_pool)\n",
        "",
        ROOM,
    ),
    Fault(
        "a group comes back into spare blocks",
        "paged_memory.py",
        "can_allocate(needed + num_spare_blocks)",
        "can_allocate(needed)",
        ROOM,
    ),
    Fault(
        "a preempted group keeps its rows",
        "scheduler.py",
        "        self._num_rows -= group.num_rows\n        group.num_preemptions += 1",
        "        group.num_preemptions += 1",
        LIVES,
    ),
    Fault(
        "a static batch is open",
        "scheduler.py",
        'is_batch_open = self._limits.batching == "continuous" or not self._running',
        "is_batch_open = True",
        ROOM,
    ),
    Fault(
        "a shared block costs a swap for each holder",
        "preemption.py",
        "{block_id for sequence in group.live for block_id in sequence.block_table.block_ids()}",
        "[block_id for sequence in group.live for block_id in sequence.block_table.block_ids()]",
        ROOM,
    ),
    Fault(
        "a group is admitted into spare blocks",
        "paged_memory.py",
        "self.num_promised(group) - shared + num_spare_blocks",
        "self.num_promised(group) - shared",
        ROOM,
    ),
    Fault(
        "what running groups were promised is given away",
        "scheduler.py",
        "sum(self._memory.num_promised(group) for group in self._running)",
        "0",
        ROOM,
    ),
    Fault(
        "what the last to be admitted was promised is given away",
        "scheduler.py",
        "            promised += self._memory.num_promised(group)\n",
        "",
        ROOM,
    ),
    Fault(
        "there is no low-water mark",
        "scheduler.py",
        "max(1, memory.num_blocks // 100)",
        "0",
        ROOM,
    ),
    Fault(
        "a prefix that was swapped in is not found",
        "paged_memory.py",
        "            sequence.num_registered_blocks = 0\n        for source, destination in homes.items():\n",
        "        for source, destination in homes.items():\n",
        ROOM,
    ),
    Fault(
        "a block that was filled last is not found",
        "paged_memory.py",
        "        self.settle(sequence)\n        self._free(sequence.block_table)\n        self._host",
        "        self._free(sequence.block_table)\n        self._host",
        ("test_prefix_cache.py",),
    ),
    Fault(
        "a block that comes back is found in another place",
        "paged_memory.py",
        'parent = keys[index - 1] if index else leader.root_key or b""',
        'parent = leader.root_key or b""',
        ("test_prefix_cache.py",),
    ),
    Fault(
        "samples write down their keys in one list",
        "paged_memory.py",
        "child.block_keys = list(parent.block_keys)",
        "child.block_keys = parent.block_keys",
        ("test_prefix_cache.py",),
    ),
    Fault(
        "a duplicate cannot be pinned",
        "paged_memory.py",
        "        sequence.num_registered_blocks = 0\n        self.settle(sequence)\n        keys",
        "        self.settle(sequence)\n        keys",
        ("test_pins.py",),
    ),
    Fault(
        "what is swapped out is not found meanwhile",
        "paged_memory.py",
        "            self.settle(sequence)\n            self._move",
        "            self._move",
        ROOM,
    ),
    Fault(
        "a shared block takes room in host memory for each holder",
        "paged_memory.py",
        "        blocks = {block_id for sequence in group.live for block_id in sequence.block_table.block_ids()}\n"
        "        return self._host",
        "        blocks = [block_id for sequence in group.live for block_id in sequence.block_table.block_ids()]\n"
        "        return self._host",
        ROOM,
    ),
    Fault(
        "a swapped group comes before an earlier one that is computed again",
        "scheduler.py",
        "return waiting if is_earlier or self._order",
        "return waiting if self._order",
        ROOM,
    ),
    Fault(
        "a swapped group comes before an urgent one",
        "scheduler.py",
        "return waiting if is_earlier or self._order.yields_to(swapped, waiting) else swapped",
        "return waiting if is_earlier else swapped",
        ROOM,
    ),
    Fault(
        "who leaves a static batch keeps what its ended samples held",
        "scheduler.py",
        "            if not sequence.is_live:  # of a static batch\n                self._memory.release(sequence)\n",
        "            pass\n",
        ROOM,
    ),
    Fault(
        "an urgent one counts on what others were promised",
        "scheduler.py",
        "            if self._has_room(group, self._num_promised()):\n                return\n            self",
        "            if self._has_room(group, 0):\n                return\n            self",
        ROOM,
    ),
    Fault(
        "a step lets somebody in for whom another had to leave",
        "scheduler.py",
        "if schedule.num_preempted == num_yielded:",
        "if True:",
        ROOM,
    ),
    Fault(
        "a beam that is forked in host memory has no blocks",
        "paged_memory.py",
        "        self._host_pool.fork(parent.host_table, child.host_table)\n",
        "",
        ("test_beam.py",),
    ),
    Fault(
        "beams that left do not share their prompt again",
        "beam_rows.py",
        "            group.is_forked = len(chosen) == 1",
        "            pass",
        ("test_beam.py",),
    ),
    Fault(
        "those who were overtaken too often are still ranked",
        "admission.py",
        "return (not is_late, 0 if is_late else group.request.sampling.priority, group.arrival)",
        "return (not is_late, group.request.sampling.priority, group.arrival)",
        ("test_policies.py",),
    ),
    Fault(
        "beams count as one row to the router",
        "routing.py",
        "num_rows = sampling.beam_width or sampling.num_samples",
        "num_rows = sampling.num_samples",
        ("test_routing.py",),
    ),
    Fault(
        "one full replica is a full house",
        "replicas.py",
        "all(engine.is_full",
        "any(engine.is_full",
        ("test_replicas.py",),
    ),
    Fault(
        "the least likely of several are returned",
        "publisher.py",
        "key=lambda piece: -piece.cumulative_logprob",
        "key=lambda piece: piece.cumulative_logprob",
        LIVES,
    ),
    Fault(
        "a prefix is pinned that has lost its blocks",
        "engine.py",
        "if not group.has_prompt_blocks:",
        "if group.status is None:",
        ("test_pins.py",),
    ),
    Fault(
        "a sample that ends while its static batch is out keeps its blocks",
        "scheduler.py",
        " or group.status is not Status.RUNNING:",
        ":",
        ROOM,
    ),
)

NO_FAULT = Fault(
    "nothing is planted",
    "block_pool.py",
    "class BlockPool:",
    "class BlockPool:",
    tuple(sorted({name for fault in FAULTS for name in fault.tests})),
)

BED = Bed(
    sources="jpaged/engine",
    tests="tests/engine",
    left_out=("device", "models", "kernels"),
    words=lambda fault: [f"tests/engine/{name}" for name in fault.tests],
)


if __name__ == "__main__":
    sys.exit(BED.plant_all(FAULTS))
