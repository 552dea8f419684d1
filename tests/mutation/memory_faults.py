"""Faults of blocks: who holds them, what is found in them, where they are."""

from __future__ import annotations

from tests.mutation.planting import Fault

LIVES = ("test_lives.py",)
WINDOWS = ("kv_cache/test_windows.py", "test_lives.py")
STREAMING = ("kv_cache/test_streaming.py",)
ROOM = ("scheduler/test_scheduler.py", "kv_cache/test_paged.py")
RESERVED = ("kv_cache/test_contiguous.py",)

MEMORY_FAULTS = (
    Fault(
        "a fork does not count its references to blocks",
        "kv_cache/blocks.py",
        "            self.acquire(block_id)\n        child.fill(",
        "            pass\n        child.fill(",
        ("kv_cache/test_sharing.py",),
    ),
    Fault(
        "the block hash ignores the cache salt",
        "kv_cache/blocks.py",
        'b"jpaged/prefix/1\\0" + salt.encode()',
        'b"jpaged/prefix/1\\0"',
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "the first release of a shared block frees it",
        "kv_cache/blocks.py",
        "            if count == 1:\n                self._free[block_id] = None",
        "            if count >= 1:\n                self._free[block_id] = None",
        ("kv_cache/test_sharing.py",),
    ),
    Fault(
        "a released sequence releases its blocks twice",
        "kv_cache/paged.py",
        "        self._pool.release(*sequence.kv.tables)\n        self._host",
        "        twin = BlockTable(sequence.kv.num_blocks)\n"
        "        twin.extend(sequence.kv.block_ids())\n"
        "        self._pool.release(*sequence.kv.tables)\n"
        "        self._pool.release(twin)\n"
        "        self._host",
        ("test_engine.py",),
    ),
    Fault(
        "a swap-in copies host blocks to the wrong device blocks",
        "kv_cache/swapper.py",
        "        for source, destination in destinations.items():\n"
        "            self._ops.add(Move.SWAP_IN, source, destination)",
        "        for source, destination in zip(destinations, reversed(destinations.values()), strict=True):\n"
        "            self._ops.add(Move.SWAP_IN, source, destination)",
        ("kv_cache/test_swap.py",),
    ),
    Fault(
        "the pool reuses the most recently freed block first",
        "kv_cache/blocks.py",
        "self._free.popitem(last=False)",
        "self._free.popitem(last=True)",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a released chain is freed from its head",
        "kv_cache/blocks.py",
        "self._let_go(reversed(tables[0].truncate(num_kept)))",
        "self._let_go(tables[0].truncate(num_kept))",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a partial hit counts one token too many",
        "kv_cache/prefix_cache.py",
        "            num_tokens += match.num_partial_tokens",
        "            num_tokens += match.num_partial_tokens + 1",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a partial hit does not copy the partial block",
        "kv_cache/prefix_cache.py",
        "        if copy != block_id:",
        "        if copy == block_id:",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a fork copies its parent's region before the step writes it",
        "kv_cache/contiguous.py",
        "        self._visitors.add(child)\n",
        "        self._visitors.add(child)\n        self.register_full_blocks(child)\n",
        RESERVED,
    ),
    Fault(
        "host memory keeps the key of an evicted block",
        "kv_cache/offload/host.py",
        "            del self.blocks[key]\n",
        "            pass\n",
        LIVES,
    ),
    Fault(
        "a load allocates device blocks before it pins its host blocks",
        "kv_cache/offload/host.py",
        "            self.pool.acquire(source)  # while they are read: allocating may evict others to host memory\n"
        "        destinations = pool.allocate(len(sources))\n",
        "            pass\n"
        "        destinations = pool.allocate(len(sources))\n"
        "        for source in sources:\n"
        "            self.pool.acquire(source)\n",
        LIVES,
    ),
    Fault(
        "a swap-in reserves no blocks for copy-on-write",
        "kv_cache/swapper.py",
        "        needed += self._host_pool.num_copies(writers)\n",
        "",
        ROOM,
    ),
    Fault(
        "a swap-in does not leave the spare blocks free",
        "kv_cache/swapper.py",
        "can_allocate(needed + num_spare_blocks)",
        "can_allocate(needed)",
        ROOM,
    ),
    Fault(
        "admission does not leave the spare blocks free",
        "kv_cache/paged.py",
        "self._needs.to_admit(group, match) + num_spare_blocks",
        "self._needs.to_admit(group, match)",
        ROOM,
    ),
    Fault(
        "swapped-in blocks are not offered to the prefix cache",
        "kv_cache/swapper.py",
        "            sequence.kv.registered(0)\n        for source, destination in destinations.items():\n",
        "        for source, destination in destinations.items():\n",
        ROOM,
    ),
    Fault(
        "a released sequence does not cache its last full blocks",
        "kv_cache/paged.py",
        "            self.prefixes.register_full_blocks(sequence)\n        self._pool.release(*sequence.kv.tables)\n",
        "            pass\n        self._pool.release(*sequence.kv.tables)\n",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "every block has the root hash as its parent",
        "kv_cache/blocks.py",
        'return self._keys[index - 1] if index else self.root or b""',
        'return self.root or b""',
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "forked sequences share one list of block hashes",
        "kv_cache/blocks.py",
        "self._keys = parent._keys[:num_full]",
        "self._keys = parent._keys",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a fork copies block hashes of tokens that it does not share",
        "kv_cache/blocks.py",
        "self._keys = parent._keys[:num_full]",
        "self._keys = list(parent._keys)",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a pin does not offer duplicate blocks to the cache again",
        "kv_cache/prefix_cache.py",
        "        sequence.kv.registered(0)\n        self.register_full_blocks(sequence)\n        keys",
        "        self.register_full_blocks(sequence)\n        keys",
        ("kv_cache/test_pinned.py",),
    ),
    Fault(
        "a swap-out does not cache the device blocks that it frees",
        "kv_cache/swapper.py",
        "                self._prefixes.register_full_blocks(sequence)\n",
        "                pass\n",
        ROOM,
    ),
    Fault(
        "the swap-out check counts a shared block once per sequence",
        "kv_cache/swapper.py",
        "        blocks = {block_id for sequence in group.live for block_id in sequence.kv.block_ids()}\n"
        "        return self._host",
        "        blocks = [block_id for sequence in group.live for block_id in sequence.kv.block_ids()]\n"
        "        return self._host",
        ROOM,
    ),
    Fault(
        "a fork of a swapped beam gets no host blocks",
        "kv_cache/paged.py",
        "            self._host.pool.fork(table, of_child)\n",
        "            pass\n",
        ("output/test_beam.py",),
    ),
    Fault(
        "the growth check leaves no room for copy-on-write",
        "kv_cache/paged.py",
        "2 * len(shares)",
        "len(shares)",
        ROOM,
    ),
    Fault(
        "the copy count assumes that every holder of a block writes",
        "kv_cache/blocks.py",
        "min(count, self._ref_counts[block_id] - 1)",
        "count - 1",
        ROOM,
    ),
    Fault(
        "only the first of several samples reserves blocks",
        "executor/io.py",
        "return num_shared + sum(own)",
        "return num_shared + own[0]",
        ROOM,
    ),
    Fault(
        "a partially filled copy counts as a registered block",
        "kv_cache/prefix_cache.py",
        "leader.kv.registered(num_tokens // self._block_size)",
        "leader.kv.registered(-(-num_tokens // self._block_size))",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a waiting group looks for its prefix in one running group only",
        "kv_cache/prefix_cache.py",
        "        for other in running:\n            first",
        "        for other in list(running)[:1]:\n            first",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a prompt beyond the cacheable length is cached",
        "kv_cache/prefix_cache.py",
        "if sequence.kv.root is None or sequence.rope_len > prefixes.max_tokens:",
        "if sequence.kv.root is None:",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a partial hit is used although host memory has more blocks",
        "kv_cache/prefix_cache.py",
        "if match.partial_block_ids is not None and num_blocks == match.num_blocks:",
        "if match.partial_block_ids is not None:",
        LIVES,
    ),
    Fault(
        "an unforked group matches its leader's output tokens, too",
        "kv_cache/prefix_cache.py",
        "num_tokens = len(leader.token_ids) if group.is_forked else leader.num_prompt_tokens",
        "num_tokens = len(leader.token_ids)",
        LIVES,
    ),
    Fault(
        "host memory stores the same block twice",
        "kv_cache/offload/host.py",
        "if key in self.blocks or not self.pool.can_allocate(1):",
        "if not self.pool.can_allocate(1):",
        LIVES,
    ),
    Fault(
        "blocks at the edge of a window are freed too early",
        "executor/io.py",
        "max(0, num_full - self.num_seen)",
        "max(0, num_full - self.num_seen + 1)",
        WINDOWS,
    ),
    Fault(
        "out-of-window blocks are not freed",
        "kv_cache/swapper.py",
        "                self._pool.drop(table, first, reach.num_sinks)\n",
        "                pass\n",
        WINDOWS,
    ),
    Fault(
        "a gap in the window does not end a prefix",
        "kv_cache/prefix_cache.py",
        "            num_blocks = index\n    return",
        "            pass\n    return",
        WINDOWS,
    ),
    Fault(
        "KV groups share the key of a block",
        "kv_cache/blocks.py",
        "return key + bytes([kv_group]) if kv_group else key",
        "return key",
        WINDOWS,
    ),
    Fault(
        "a partial copy overwrites a block that another copy reads",
        "kv_cache/prefix_cache.py",
        "copy = block_id if block_id in copies else others.pop()",
        "copy = copies.pop()",
        WINDOWS,
    ),
    Fault(
        "a fork does not record which blocks its parent dropped",
        "kv_cache/blocks.py",
        "child.fill(block_ids, parent.num_dropped, parent.num_sinks)",
        "child.extend(block_ids)",
        WINDOWS,
    ),
    Fault(
        "sink blocks are freed with the out-of-window blocks",
        "kv_cache/swapper.py",
        "self._pool.drop(table, first, reach.num_sinks)",
        "self._pool.drop(table, first)",
        STREAMING,
    ),
    Fault(
        "a truncated block table does not release its sink blocks",
        "kv_cache/blocks.py",
        "block_ids = self._ids[num_blocks : self.num_sinks] + self._ids[max(num_blocks, self.num_dropped) :]",
        "block_ids = self._ids[max(num_blocks, self.num_dropped) :]",
        STREAMING,
    ),
    Fault(
        "a swap moves sink blocks to the start of the window",
        "kv_cache/swapper.py",
        "source.num_dropped, source.num_sinks)",
        "source.num_dropped)",
        STREAMING,
    ),
    Fault(
        "a prefix is found although its sink blocks are gone",
        "kv_cache/prefix_cache.py",
        "end = num_blocks if reach.num_seen is None else min(num_blocks, reach.num_sinks)",
        "end = num_blocks if reach.num_seen is None else 0",
        STREAMING,
    ),
    Fault(
        "the maximum number of blocks omits the sink blocks",
        "executor/io.py",
        "return self.num_sinks + self.num_seen + (",
        "return self.num_seen + (",
        STREAMING,
    ),
    Fault(
        "a group with a window reserves blocks for its whole prompt",
        "kv_cache/paged.py",
        "min(most, all_in_all - match.num_blocks + num_free_matched)",
        "all_in_all - match.num_blocks + num_free_matched",
        WINDOWS,
    ),
    Fault(
        "a prefix is unpinned while it is still computed",
        "kv_cache/pinned.py",
        "is_pinned = pin in self._pinned",
        "is_pinned = pin in self._num_blocks",
        ("kv_cache/test_pinned.py",),
    ),
    Fault(
        "the buddy allocator splits the largest free region",
        "kv_cache/contiguous.py",
        "k = min(fitting)",
        "k = max(fitting)",
        RESERVED,
    ),
    Fault(
        "reserve-pow2 doubles a max_tokens that is a power of two",
        "kv_cache/contiguous.py",
        "1 << (max_tokens - 1).bit_length()",
        "1 << max_tokens.bit_length()",
        RESERVED,
    ),
    Fault(
        "reserve-pow2 reserves more than the maximum model length",
        "kv_cache/contiguous.py",
        "min(self._max_model_len, num_prompt_tokens + (1 << (max_tokens - 1).bit_length()))",
        "num_prompt_tokens + (1 << (max_tokens - 1).bit_length())",
        RESERVED,
    ),
    Fault(
        "reserved slots count requested blocks instead of whole regions",
        "kv_cache/contiguous.py",
        "sum(1 << _order(num_blocks) for _, num_blocks in self._reserved())",
        "sum(num_blocks for _, num_blocks in self._reserved())",
        RESERVED,
    ),
    Fault(
        "stored tokens exclude those of ended sequences",
        "kv_cache/contiguous.py",
        "num_tokens = sum(sequence.num_computed_tokens for sequence in sequences)",
        "num_tokens = sum(sequence.num_computed_tokens for sequence in sequences if sequence.is_live)",
        RESERVED,
    ),
    Fault(
        "a released fork still counts as a user of the parent's region",
        "kv_cache/contiguous.py",
        "        self._visitors.discard(sequence)\n",
        "",
        RESERVED,
    ),
    Fault(
        "a group is accepted if one of the regions it needs fits",
        "kv_cache/contiguous.py",
        "BuddyAllocator(self.num_blocks).num_holes(self._num_group_blocks(group)) >= group.num_rows",
        "BuddyAllocator(self.num_blocks).num_holes(self._num_group_blocks(group)) >= 1",
        RESERVED,
    ),
)
