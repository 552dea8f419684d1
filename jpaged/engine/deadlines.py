"""Deadline heap of groups in flight, and attribution of cancellations to deadlines.

Lower bound of the time that a new request will take, from the work ahead of it and the fastest observed steps.

    running  [ 300 tokens of a prompt left ]
    waiting  [ 1000 new | 200 new, 800 shared | ... ]  ──>  tokens that must run before the first one of the request
    request  [ 500 new ] then the decode steps that it needs at least

The bound excludes everything that may shrink: prompts with an earlier deadline, blocks that are cached or shared by
several prompts, and tokens after a possible end of sequence. So no request is refused that could have been served in
time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import islice

from jpaged.engine.executor import Geometry
from jpaged.engine.kv_cache.blocks import BlockHash
from jpaged.engine.kv_cache.interface import KVCacheManager
from jpaged.engine.scheduler.multi_step import StepTimeFloor
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequence import SequenceGroup
from jpaged.errors import DeadlineExceeded
from jpaged.types import Request

_EARLY_SHARE, _EARLY_S = 0.02, 0.25
"""Tolerance for a client's timer that expires before the server's deadline.

gRPC rounds the timeout up on the wire, by at most a hundredth, and transmission takes time.
"""


class Deadlines:
    """Deadlines of groups in flight, as a heap.

        heap   [ 3.0 | 4.5 | 7.2 | 9.9 ]     finished groups stay in it until they are half of it
        open   { 4.5, 9.9 }

    Its size is bounded by the number of groups in flight, no matter how late the deadlines of finished groups are.

    Attributes:
        next_s: earliest time at which a deadline may have passed; cheap to read in every step.
    """

    def __init__(self) -> None:
        self.next_s = math.inf
        self._heap: list[tuple[float, int]] = []
        self._open: dict[int, tuple[float, SequenceGroup]] = {}

    def add(self, group: SequenceGroup, deadline_s: float) -> None:
        """Watch a group until it is discarded."""
        self._open[group.arrival] = deadline_s, group
        heapq.heappush(self._heap, (deadline_s, group.arrival))
        self.next_s = self._heap[0][0]

    def discard(self, group: SequenceGroup) -> None:
        """Stop watching a group; no-op if it is not watched."""
        self._open.pop(group.arrival, None)
        if len(self._heap) > 2 * len(self._open):
            self._heap = [(deadline_s, arrival) for arrival, (deadline_s, _) in self._open.items()]
            heapq.heapify(self._heap)
            self.next_s = self._heap[0][0] if self._heap else math.inf

    def expired(self, now_s: float) -> Iterator[SequenceGroup]:
        """Yield groups whose deadline has passed; discard each before advancing the iterator."""
        while self._heap and self._heap[0][0] <= now_s:
            _, arrival = heapq.heappop(self._heap)
            if arrival in self._open:
                yield self._open[arrival][1]
        self.next_s = self._heap[0][0] if self._heap else math.inf


def is_over(request: Request, arrival_s: float, now_s: float) -> bool:
    """Return True if a client that disconnects now did so because of the deadline.

    gRPC cancels a call in the same way for a deadline and for a disconnect. A cancellation in the last fiftieth of the
    time, or in the last quarter of a second, but not in the first half, counts as past the deadline.
    """
    if request.deadline_s is None:
        return False
    total_s = request.deadline_s - arrival_s
    return request.deadline_s - now_s <= min(total_s / 2, max(_EARLY_S, _EARLY_SHARE * total_s))


_MAX_GROUPS = 256
"""Waiting groups that are examined, to bound the engine thread's work per arrival."""
_MAX_BLOCKS = 4096
"""Blocks of prompts that are compared."""
_SHARE = 0.5
"""Share of the lower bound that counts: contexts may be shorter, and the machine less busy, than measured."""


class DeadlineEstimator:
    """Refuses arriving requests that cannot meet their deadline.

    Attributes:
        least_times: minimum step times, an observer of the dispatches.

    Args:
        num_tokens_at_once: maximum tokens of a sequence in one step, including draft tokens.
    """

    def __init__(
        self, scheduler: Scheduler, memory: KVCacheManager, geometry: Geometry, num_tokens_at_once: int
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._block_size = geometry.block_size
        self._num_tokens_at_once = num_tokens_at_once
        self.least_times = StepTimeFloor(geometry.max_num_batched_tokens)

    def check(self, group: SequenceGroup, deadline_s: float, now_s: float) -> DeadlineExceeded | None:
        """Return the error of a new group that cannot finish in time; None if it may, or nothing was measured."""
        if group.request.continued:  # another server may have done almost all of it
            return None
        times, left_s = self.least_times, deadline_s - now_s
        num_steps = _least_steps(group.request, self._num_tokens_at_once)
        ahead = self._ahead(deadline_s)
        most_tokens = sum(_num_left(one) for one in ahead) + len(group.request.prompt_token_ids)
        if _SHARE * times.seconds(most_tokens, num_steps) <= left_s:  # even if no block is shared
            return None
        num_tokens = _LeastTokens(self._memory, self._block_size).of([*ahead, group], self._scheduler.queues.running)
        least_s = _SHARE * times.seconds(num_tokens, num_steps)
        if least_s <= left_s:
            return None
        what = f"{num_tokens} prompt tokens and then {num_steps} steps take at least {least_s:.3f} s"
        return DeadlineExceeded(f"the request was not started: {what}, but {left_s:.3f} s are left (refuse_late)")

    def _ahead(self, deadline_s: float) -> list[SequenceGroup]:
        """Return the groups whose prompts are computed before that of a new arrival in any case."""
        queues = self._scheduler.queues
        found = [group for group in queues.running if _num_left(group) > 0]
        if self._scheduler.is_in_order:
            found += [group for group in islice(queues.waiting, _MAX_GROUPS) if not group.num_preemptions]
        return [group for group in found if not _may_leave(group, deadline_s)]


class _LeastTokens:
    """Counts the tokens of several prompts that must be computed: each block once, and cached blocks not at all."""

    def __init__(self, memory: KVCacheManager, block_size: int) -> None:
        self._prefixes = memory.prefixes
        self._block_size = block_size
        self._counted: set[BlockHash] = set()
        self._num_left = _MAX_BLOCKS

    def of(self, groups: list[SequenceGroup], running: list[SequenceGroup]) -> int:
        """Return the sum over the groups, in order, until the limit of compared blocks is reached."""
        total = 0
        if self._prefixes is not None:
            for group in running:
                leader = group.live[0]
                if leader.kv.num_registered_blocks * self._block_size <= leader.num_prompt_tokens - self._block_size:
                    self._counted.update(self._keys(group))  # the group has computed these blocks or will soon
        for group in groups:
            if self._num_left <= 0:
                break
            total += _num_left(group) if group in running else self._new_tokens(group)
        return total

    def _new_tokens(self, group: SequenceGroup) -> int:
        """Return the tokens of a waiting prompt in uncached blocks; one block may be cached in part."""
        if self._prefixes is None or group.live[0].kv.root is None:
            return len(group.request.prompt_token_ids)
        new = {key for key in self._keys(group) if key not in self._counted and not self._prefixes.has_prefix(key)}
        self._counted.update(new)
        return max(1, (len(new) - 1) * self._block_size)

    def _keys(self, group: SequenceGroup) -> list[BlockHash]:
        leader = group.live[0]
        num_blocks = min(leader.num_prompt_tokens // self._block_size, max(0, self._num_left))
        self._num_left -= num_blocks
        return leader.kv.keys(leader.token_ids, num_blocks, self._block_size)


def _num_left(group: SequenceGroup) -> int:
    """Return the number of prompt tokens that have not been dispatched."""
    leader = group.live[0]
    return max(0, leader.num_prompt_tokens - leader.num_computed_tokens)


def _may_leave(group: SequenceGroup, deadline_s: float) -> bool:
    """Return True if a prompt may not be computed before that of a new arrival.

    It has an earlier deadline, its tokens per step are limited by aux outputs, or it was started on another server.
    """
    request = group.request
    is_earlier = request.deadline_s is not None and request.deadline_s < deadline_s
    return is_earlier or len(request.prompt_logprob_positions) > 0 or len(request.continued) > 0


def _least_steps(request: Request, num_tokens_at_once: int) -> int:
    """Return the minimum number of steps after the one that completes the prompt."""
    sampling = request.sampling
    if request.grammar is not None or sampling.beam_width or sampling.stop:
        return 0
    never_ends = sampling.ignore_eos and not sampling.stop_token_ids
    num_tokens = sampling.max_num_tokens if never_ends else sampling.min_tokens
    return max(0, num_tokens - 1) // num_tokens_at_once
