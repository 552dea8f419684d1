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
        "a fork's reference is not counted",
        "kv_cache/blocks.py",
        "            self.acquire(block_id)\n        child.fill(",
        "            pass\n        child.fill(",
        ("kv_cache/test_sharing.py",),
    ),
    Fault(
        "the salt has no part in the key",
        "kv_cache/blocks.py",
        'b"jpaged/prefix/1\\0" + salt.encode()',
        'b"jpaged/prefix/1\\0"',
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a shared block is freed with its first holder",
        "kv_cache/blocks.py",
        "            if count == 1:\n                self._free[block_id] = None",
        "            if count >= 1:\n                self._free[block_id] = None",
        ("kv_cache/test_sharing.py",),
    ),
    Fault(
        "a released block is released again",
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
        "a block is swapped in to another's place",
        "kv_cache/swapper.py",
        "        for source, destination in homes.items():\n"
        "            self._ops.add(Move.SWAP_IN, source, destination)",
        "        for source, destination in zip(homes, reversed(homes.values()), strict=True):\n"
        "            self._ops.add(Move.SWAP_IN, source, destination)",
        ("kv_cache/test_swap.py",),
    ),
    Fault(
        "the block that was freed last is reissued first",
        "kv_cache/blocks.py",
        "self._free.popitem(last=False)",
        "self._free.popitem(last=True)",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a chain is freed from its head",
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
        "a partial hit is shared and not copied",
        "kv_cache/prefix_cache.py",
        "        if copy != block_id:",
        "        if copy == block_id:",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a forked region is copied before it is written",
        "kv_cache/contiguous.py",
        "        self._visitors.add(child)\n",
        "        self._visitors.add(child)\n        self.register_full_blocks(child)\n",
        RESERVED,
    ),
    Fault(
        "a key stays known in host memory when its block is given away",
        "kv_cache/offload/host.py",
        "            del self.blocks[key]\n",
        "            pass\n",
        LIVES,
    ),
    Fault(
        "a block in host memory is not held while it is brought back",
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
        "a group comes back without room for its copies",
        "kv_cache/swapper.py",
        "        needed += self._host_pool.num_copies(writers)\n",
        "",
        ROOM,
    ),
    Fault(
        "a group comes back into spare blocks",
        "kv_cache/swapper.py",
        "can_allocate(needed + num_spare_blocks)",
        "can_allocate(needed)",
        ROOM,
    ),
    Fault(
        "a group is admitted into spare blocks",
        "kv_cache/paged.py",
        "self._needs.to_admit(group, match) + num_spare_blocks",
        "self._needs.to_admit(group, match)",
        ROOM,
    ),
    Fault(
        "a prefix that was swapped in is not found",
        "kv_cache/swapper.py",
        "            sequence.kv.registered(0)\n        for source, destination in homes.items():\n",
        "        for source, destination in homes.items():\n",
        ROOM,
    ),
    Fault(
        "a block that was filled last is not found",
        "kv_cache/paged.py",
        "            self.prefixes.register_full_blocks(sequence)\n        self._pool.release(*sequence.kv.tables)\n",
        "            pass\n        self._pool.release(*sequence.kv.tables)\n",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a block that comes back is found in another place",
        "kv_cache/blocks.py",
        'return self._keys[index - 1] if index else self.root or b""',
        'return self.root or b""',
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "samples write down their keys in one list",
        "kv_cache/blocks.py",
        "self._keys = parent._keys[:num_full]",
        "self._keys = parent._keys",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a sample takes the keys of another's tokens for its own",
        "kv_cache/blocks.py",
        "self._keys = parent._keys[:num_full]",
        "self._keys = list(parent._keys)",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a duplicate cannot be pinned",
        "kv_cache/prefix_cache.py",
        "        sequence.kv.registered(0)\n        self.register_full_blocks(sequence)\n        keys",
        "        self.register_full_blocks(sequence)\n        keys",
        ("kv_cache/test_pinned.py",),
    ),
    Fault(
        "what is swapped out is not found meanwhile",
        "kv_cache/swapper.py",
        "                self._prefixes.register_full_blocks(sequence)\n",
        "                pass\n",
        ROOM,
    ),
    Fault(
        "a shared block takes room in host memory for each holder",
        "kv_cache/swapper.py",
        "        blocks = {block_id for sequence in group.live for block_id in sequence.kv.block_ids()}\n"
        "        return self._host",
        "        blocks = [block_id for sequence in group.live for block_id in sequence.kv.block_ids()]\n"
        "        return self._host",
        ROOM,
    ),
    Fault(
        "a beam that is forked in host memory has no blocks",
        "kv_cache/paged.py",
        "            self._host.pool.fork(table, of_child)\n",
        "            pass\n",
        ("output/test_beam.py",),
    ),
    Fault(
        "tokens that are counted as blocks leave no room for a copy",
        "kv_cache/paged.py",
        "2 * len(shares)",
        "len(shares)",
        ROOM,
    ),
    Fault(
        "a writer keeps a block that another holder does not write to",
        "kv_cache/blocks.py",
        "min(count, self._ref_counts[block_id] - 1)",
        "count - 1",
        ROOM,
    ),
    Fault(
        "only the first of several samples is promised blocks",
        "executor/io.py",
        "return num_shared + sum(own)",
        "return num_shared + own[0]",
        ROOM,
    ),
    Fault(
        "a block that was begun as a copy is not found",
        "kv_cache/prefix_cache.py",
        "leader.kv.registered(num_tokens // self._block_size)",
        "leader.kv.registered(-(-num_tokens // self._block_size))",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "the first of those who run is waited for alone",
        "kv_cache/prefix_cache.py",
        "        for other in running:\n            first",
        "        for other in list(running)[:1]:\n            first",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a prompt that is too long to be cached is",
        "kv_cache/prefix_cache.py",
        "if sequence.kv.root is None or sequence.rope_len > prefixes.max_tokens:",
        "if sequence.kv.root is None:",
        ("kv_cache/test_prefixes.py",),
    ),
    Fault(
        "a partial hit is counted beside what came back",
        "kv_cache/prefix_cache.py",
        "if match.partial_block_ids is not None and num_blocks == match.num_blocks:",
        "if match.partial_block_ids is not None:",
        LIVES,
    ),
    Fault(
        "what samples have sampled is matched for their leader",
        "kv_cache/prefix_cache.py",
        "num_tokens = len(leader.token_ids) if group.is_forked else leader.num_prompt_tokens",
        "num_tokens = len(leader.token_ids)",
        LIVES,
    ),
    Fault(
        "a prefix is taken to host memory twice",
        "kv_cache/offload/host.py",
        "if key in self.blocks or not self.pool.can_allocate(1):",
        "if not self.pool.can_allocate(1):",
        LIVES,
    ),
    Fault(
        "a window ends a block too early",
        "executor/io.py",
        "max(0, num_full - self.num_seen)",
        "max(0, num_full - self.num_seen + 1)",
        WINDOWS,
    ),
    Fault(
        "what no query sees is kept",
        "kv_cache/swapper.py",
        "                self._pool.drop(table, first, reach.num_sinks)\n",
        "                pass\n",
        WINDOWS,
    ),
    Fault(
        "a gap in a window ends no prefix",
        "kv_cache/prefix_cache.py",
        "            num_blocks = place\n    return",
        "            pass\n    return",
        WINDOWS,
    ),
    Fault(
        "groups of layers find each other's blocks",
        "kv_cache/blocks.py",
        "return key + bytes([kv_group]) if kv_group else key",
        "return key",
        WINDOWS,
    ),
    Fault(
        "a part of a block is copied over another that is still to be copied",
        "kv_cache/prefix_cache.py",
        "copy = block_id if block_id in copies else others.pop()",
        "copy = copies.pop()",
        WINDOWS,
    ),
    Fault(
        "a fork remembers what its parent gave up",
        "kv_cache/blocks.py",
        "child.fill(block_ids, parent.num_dropped, parent.num_sinks)",
        "child.extend(block_ids)",
        WINDOWS,
    ),
    Fault(
        "first tokens that are seen are given up",
        "kv_cache/swapper.py",
        "self._pool.drop(table, first, reach.num_sinks)",
        "self._pool.drop(table, first)",
        STREAMING,
    ),
    Fault(
        "first tokens are left behind when a sequence leaves its blocks",
        "kv_cache/blocks.py",
        "block_ids = self._ids[num_blocks : self.num_sinks] + self._ids[max(num_blocks, self.num_dropped) :]",
        "block_ids = self._ids[max(num_blocks, self.num_dropped) :]",
        STREAMING,
    ),
    Fault(
        "first tokens are swapped in where the window begins",
        "kv_cache/swapper.py",
        "source.num_dropped, source.num_sinks)",
        "source.num_dropped)",
        STREAMING,
    ),
    Fault(
        "a prefix is found of which the first tokens are gone",
        "kv_cache/prefix_cache.py",
        "range(num_blocks if reach.num_seen is None else min(num_blocks, reach.num_sinks))",
        "range(num_blocks if reach.num_seen is None else 0)",
        STREAMING,
    ),
    Fault(
        "first tokens are not promised",
        "executor/io.py",
        "return self.num_sinks + self.num_seen + (",
        "return self.num_seen + (",
        STREAMING,
    ),
    Fault(
        "a window's blocks are promised for a whole prompt's",
        "kv_cache/paged.py",
        "min(most, all_in_all - match.num_blocks + num_free_matched)",
        "all_in_all - match.num_blocks + num_free_matched",
        WINDOWS,
    ),
    Fault(
        "a prefix is unpinned while it is computed",
        "kv_cache/pinned.py",
        "is_pinned = pin in self._pinned",
        "is_pinned = pin in self._num_blocks",
        ("kv_cache/test_pinned.py",),
    ),
    Fault(
        "a region is cut from the largest hole",
        "kv_cache/contiguous.py",
        "k = min(fitting)",
        "k = max(fitting)",
        RESERVED,
    ),
    Fault(
        "a power of two is doubled",
        "kv_cache/contiguous.py",
        "1 << (max_tokens - 1).bit_length()",
        "1 << max_tokens.bit_length()",
        RESERVED,
    ),
    Fault(
        "a region is longer than any sequence",
        "kv_cache/contiguous.py",
        "min(self._max_model_len, num_prompt_tokens + (1 << (max_tokens - 1).bit_length()))",
        "num_prompt_tokens + (1 << (max_tokens - 1).bit_length())",
        RESERVED,
    ),
    Fault(
        "what is asked for counts as reserved",
        "kv_cache/contiguous.py",
        "sum(1 << _order(num_blocks) for _, num_blocks in self._reserved())",
        "sum(num_blocks for _, num_blocks in self._reserved())",
        RESERVED,
    ),
    Fault(
        "what ended sequences keep is not stored",
        "kv_cache/contiguous.py",
        "num_tokens = sum(sequence.num_computed_tokens for sequence in sequences)",
        "num_tokens = sum(sequence.num_computed_tokens for sequence in sequences if sequence.is_live)",
        RESERVED,
    ),
    Fault(
        "a sequence that left is still a visitor",
        "kv_cache/contiguous.py",
        "        self._visitors.discard(sequence)\n",
        "",
        RESERVED,
    ),
    Fault(
        "a group fits where one of its rows does",
        "kv_cache/contiguous.py",
        "BuddyAllocator(self.num_blocks).num_holes(self._num_group_blocks(group)) >= group.num_rows",
        "BuddyAllocator(self.num_blocks).num_holes(self._num_group_blocks(group)) >= 1",
        RESERVED,
    ),
)
