"""What a policy takes of the engine's thread: the turn of one block, from being chosen to being free again.

A pool that is full of cached prefixes is given chains of eight blocks, four in five of them new, the others found
again: each new block is chosen, given up, filled, entered and freed. CPU time of the thread, the least of several
rounds; the longest choice is of all rounds together.
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass

from jpaged.engine.kv_cache.blocks import BlockPool, BlockTable
from jpaged.engine.kv_cache.eviction.cost_aware import BlockCosts
from jpaged.engine.kv_cache.eviction.free_list import CachedBlock, RankedFreeList
from jpaged.engine.kv_cache.eviction.policies import Eviction

_CHAIN = 8
_NUM_ROUNDS = 3
_COSTS = BlockCosts(first_s=1e-3, further_s=1e-6, fetch_s=1e-4)


@dataclass(frozen=True, slots=True)
class Decisions:
    """Microseconds of a policy in a pool of so many blocks.

    Attributes:
        turn_us: all that is done for one block from being chosen to being free again.
        choice_us, longest_us: the mean and the longest of taking one block off the free list.
    """

    policy: str
    num_blocks: int
    turn_us: float
    choice_us: float
    longest_us: float


class _Turns:
    """A pool, and the chains that are in it."""

    def __init__(self, policy: str, num_blocks: int) -> None:
        self._random = random.Random(num_blocks)
        self._ranked: RankedFreeList | None = Eviction(policy, _COSTS).free_list(num_blocks)
        self._pool = BlockPool(num_blocks=num_blocks, block_size=16, free=self._ranked, on_reissue=self._evict)
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        self._chains: list[list[bytes]] = []
        self._num_chains = num_blocks // _CHAIN
        self.choices: list[float] = []

    def turn(self) -> int:
        """One chain comes and goes; the blocks that were chosen for it."""
        if self._chains and self._random.random() < 0.2:
            keys = self._random.choice(self._chains)
        else:
            number = self._random.getrandbits(128)
            keys = [number.to_bytes(16, "big") + bytes([place]) for place in range(_CHAIN)]
            self._chains = [*self._chains[-self._num_chains :], keys] if self._random.random() < 0.1 else self._chains
        known = [self._blocks[key] for key in keys if key in self._blocks]
        for block_id in known:
            self._pool.acquire(block_id)
        if self._ranked is not None:
            self._ranked.found(known)
        table = BlockTable(_CHAIN)
        table.extend(known)
        for place in range(len(known), _CHAIN):
            begin = time.thread_time()
            (block_id,) = self._pool.allocate(1)
            self.choices.append(time.thread_time() - begin)
            table.extend([block_id])
            self._keys[block_id], self._blocks[keys[place]] = keys[place], block_id
            if self._ranked is not None:
                self._ranked.enter(block_id, CachedBlock(keys[place], keys[place - 1] if place else None, place, b""))
        self._pool.release(table)
        return _CHAIN - len(known)

    def _evict(self, block_id: int) -> None:
        key = self._keys.pop(block_id, None)
        if key is not None:
            del self._blocks[key]
            if self._ranked is not None:
                self._ranked.evicted(block_id)


def measure(policy: str, num_blocks: int, num_turns: int = 4000) -> Decisions:
    """Times a policy in a pool that is full."""
    turns, num_filled = _Turns(policy, num_blocks), 0
    while num_filled < 2 * num_blocks:
        num_filled += turns.turn()
    turns.choices.clear()
    rounds = []
    gc.disable()  # as the engine's loop does
    for _ in range(_NUM_ROUNDS):
        begin, num_chosen = time.thread_time(), 0
        for _ in range(num_turns // _CHAIN):
            num_chosen += turns.turn()
        rounds.append((time.thread_time() - begin) / num_chosen)
    gc.enable()
    choices = turns.choices
    return Decisions(policy, num_blocks, 1e6 * min(rounds), 1e6 * sum(choices) / len(choices), 1e6 * max(choices))
