"""Who knows what comes: a policy that looks ahead, and the most that anybody could have saved.

The policy (Belady's): of the free blocks the one goes that is needed again last, of those never needed again, and of
one chain, the deepest. It is a run of the engine like any other.

The bound: requests are admitted in order of arrival. Between two requests that need a block, it either stays, and
takes one of N places at each admission between them, or is computed again. A request holds its whole prompt when its
last token runs.

    maximise    sum over s of x_s * seconds(s)           s: blocks that two requests, i < j, need one after the other
    subject to  sum over s with i < t < j of x_s * blocks(s) <= N - blocks of prompt t         at each admission t
                0 <= x_s <= 1

It is a linear program (HiGHS). Neighbours in a chain that the same two requests need are one s, each worth their mean:
they are of use from the front, where they cost least. Left out are that running requests hold blocks besides, that one
s is of no use without the one in front of it, and that blocks are whole. So no policy of this scheduler, whatever it
knows, saves more, while requests are admitted in order of arrival.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.eviction.traces import BLOCK_SIZE, Coming
from jpaged.engine.kv_cache.blocks import block_key, root_block_hash
from jpaged.engine.kv_cache.eviction.free_list import BlockHash, CachedBlock, EvictionPolicy

_NEVER = 1 << 60


def chain(request: Coming) -> list[BlockHash]:
    """The keys of all blocks that a request fills, its answer's too."""
    token_ids = request.prompt_token_ids + (0,) * (request.output_tokens - 1)
    keys, parent = [], root_block_hash("", request.tenant)
    for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
        parent = block_key(parent, token_ids[end - BLOCK_SIZE : end])
        keys.append(parent)
    return keys


class Foreknowledge:
    """Which requests need each block.

    Args:
        num_admitted: how many requests were admitted so far.
    """

    def __init__(self, trace: Sequence[Coming], num_admitted: Callable[[], int]) -> None:
        self._num_admitted = num_admitted
        self._uses: dict[BlockHash, list[int]] = defaultdict(list)  # the next is the last
        for index in range(len(trace) - 1, -1, -1):
            for key in chain(trace[index])[: trace[index].num_matchable_blocks]:
                self._uses[key].append(index)

    def next_use(self, key: BlockHash) -> int:
        uses, now = self._uses[key], self._num_admitted()
        while uses and uses[-1] < now:
            uses.pop()
        return uses[-1] if uses else _NEVER

    def policy(self) -> EvictionPolicy:
        return _Furthest(self)


class _Furthest:
    """Implements `jpaged.engine.kv_cache.eviction.free_list.EvictionPolicy`."""

    def __init__(self, knowledge: Foreknowledge) -> None:
        self._knowledge = knowledge
        self._entries: dict[int, CachedBlock] = {}
        self._free: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []

    def on_insert(self, place: int, entry: CachedBlock) -> None:
        self._entries[place] = entry

    def on_hit(self, places: Sequence[int]) -> None:
        """What is found was known to be."""

    def times_seen(self, place: int) -> int:
        return self._entries[place].times_seen

    def on_free(self, place: int) -> None:
        entry = self._entries[place]
        self._free[place] = rank = -self._knowledge.next_use(entry.key), -entry.index
        heapq.heappush(self._heap, (rank, place))

    def on_acquire(self, place: int) -> None:
        del self._free[place]

    def victim(self) -> int:
        while True:
            rank, place = heapq.heappop(self._heap)
            if self._free.get(place) != rank:
                continue
            del self._free[place]
            if -rank[0] == self._knowledge.next_use(self._entries[place].key):
                return place
            self.on_free(place)  # its time came while nobody could use it

    def on_remove(self, place: int, *, is_evicted: bool) -> CachedBlock:
        return self._entries.pop(place)

    def candidates(self) -> set[int]:
        return set(self._free)


@dataclass(slots=True)
class _Segment:
    """Blocks that two requests need one after the other, and nobody between them; neighbours in one chain."""

    first: int
    last: int
    num_blocks: int
    value: float


def bound(trace: Sequence[Coming], num_blocks: int, value: Callable[[int], float]) -> float:
    """The most that any policy could have saved.

    Args:
        num_blocks: of the pool.
        value: what a hit of the block with so many in front of it saves.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    segments = list(_segments(trace, value))
    if not segments:
        return 0.0
    # y_t, the blocks that stay at admission t, follows from y_(t-1): rows of differences have two numbers a segment.
    num_segments, num_steps = len(segments), len(trace)
    rows, columns, numbers = [], [], []
    for place, segment in enumerate(segments):
        for row, sign in ((segment.first + 1, -1.0), (segment.last, 1.0)):
            rows.append(row)
            columns.append(place)
            numbers.append(sign * segment.num_blocks)
    for step in range(num_steps):
        rows += [step] if step + 1 == num_steps else [step, step + 1]
        columns += [num_segments + step] if step + 1 == num_steps else [num_segments + step] * 2
        numbers += [1.0] if step + 1 == num_steps else [1.0, -1.0]
    prompts = [-(-len(request.prompt_token_ids) // BLOCK_SIZE) for request in trace]
    result = linprog(
        np.array([-segment.value for segment in segments] + [0.0] * num_steps),
        A_eq=coo_array((numbers, (rows, columns)), shape=(num_steps, num_segments + num_steps)).tocsr(),
        b_eq=np.zeros(num_steps),
        bounds=[(0.0, 1.0)] * num_segments + [(0.0, float(num_blocks - own)) for own in prompts],
        method="highs",
    )
    if not result.success:
        raise RuntimeError(f"the bound was not found: {result.message}")
    return float(-result.fun)


def _segments(trace: Sequence[Coming], value: Callable[[int], float]) -> Iterator[_Segment]:
    last_use: dict[BlockHash, int] = {}
    for now, request in enumerate(trace):
        keys = chain(request)
        segment: _Segment | None = None
        for index, key in enumerate(keys[: request.num_matchable_blocks]):
            before = last_use.get(key)
            if segment is not None and segment.first != before:
                yield segment
                segment = None
            if before is not None:
                segment = segment or _Segment(before, now, 0, 0.0)
                segment.num_blocks += 1
                segment.value += value(index)
        if segment is not None:
            yield segment
        last_use.update(dict.fromkeys(keys, now))
