"""Counts of what the engine did: written by its thread once a step, read by others as one snapshot."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from jpaged.engine.executor import Geometry
from jpaged.engine.paged_memory import PagedMemory
from jpaged.engine.reserved_memory import ReservedMemory
from jpaged.engine.schedule import Schedule
from jpaged.engine.scheduler import Scheduler
from jpaged.engine.sequence import Group

_RECENT_ENDS = 64


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is, and what it has done since it started.

    Attributes:
        num_running: requests with rows in the current step.
        num_waiting: requests that wait for rows or blocks, preempted ones included.
        num_swapped: those of them that are in host memory.
        num_blocks_free: free blocks, cached ones included.
        num_blocks_cached: free blocks that still hold a prefix.
        num_prefix_query_tokens, num_prefix_hit_tokens: prompt tokens looked up in the prefix cache, and found there.
        slot_use: share of the reserved slots that held a token, averaged over all steps so far; 0 before the first.
        time_to_first_token_s: mean over the requests that got one.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_blocks_free: int = 0
    num_blocks_cached: int = 0
    num_blocks_used: int = 0
    peak_blocks_used: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_copies_on_write: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_requests_ended: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    slot_use: float = 0.0
    time_to_first_token_s: float = 0.0
    num_compiles_after_warm_up: int = 0


class StepStats:
    """Gathers the counts; the engine's thread calls everything but `snapshot` and `seconds_per_request`."""

    def __init__(self, geometry: Geometry, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._load = EngineLoad(
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            max_num_seqs=geometry.max_num_seqs,
            num_blocks_free=geometry.num_blocks,
        )
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0
        self._num_requests_ended = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._peak_blocks_used = 0
        self._sum_stored_tokens = 0
        self._sum_reserved_slots = 0
        self._sum_first_token_s = 0.0
        self._num_first_tokens = 0
        self._recent_ends_s: deque[float] = deque(maxlen=_RECENT_ENDS)

    def count_step(self, schedule: Schedule) -> None:
        self._num_steps += bool(schedule.rows)
        self._num_preemptions += schedule.num_preempted
        self._num_recomputed_tokens += schedule.num_recomputed_tokens
        for group in schedule.admitted:
            if group.num_preemptions == 0:
                self._num_prompt_tokens += len(group.request.prompt_token_ids)

    def count_token(self, group: Group, now_s: float) -> None:
        self._num_generation_tokens += 1
        if group.first_token_s is None:
            group.first_token_s = now_s
            self._sum_first_token_s += now_s - group.arrival_s
            self._num_first_tokens += 1

    def count_end(self) -> None:
        self._num_requests_ended += 1
        self._recent_ends_s.append(self._clock())

    def end_step(self, memory: PagedMemory | ReservedMemory, scheduler: Scheduler) -> None:
        """Takes the gauges and makes the step visible to `snapshot`."""
        use = memory.use()
        self._peak_blocks_used = max(self._peak_blocks_used, use.num_referenced)
        self._sum_stored_tokens += memory.num_stored_tokens(scheduler.holders)
        self._sum_reserved_slots += memory.num_reserved_slots()
        self._load = replace(
            self._load,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_swapped,
            num_blocks_free=use.num_free + use.num_cached,
            num_blocks_cached=use.num_cached,
            num_blocks_used=use.num_referenced,
            peak_blocks_used=self._peak_blocks_used,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_copies_on_write=memory.counts.num_copies_on_write,
            num_blocks_swapped_out=memory.counts.num_swapped_out,
            num_blocks_swapped_in=memory.counts.num_swapped_in,
            num_prefix_query_tokens=memory.counts.num_prefix_query_tokens,
            num_prefix_hit_tokens=memory.counts.num_prefix_hit_tokens,
            num_requests_ended=self._num_requests_ended,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            slot_use=self._sum_stored_tokens / self._sum_reserved_slots if self._sum_reserved_slots else 0.0,
            time_to_first_token_s=self._sum_first_token_s / self._num_first_tokens if self._num_first_tokens else 0.0,
        )

    def snapshot(self, num_compiles_after_warm_up: int) -> EngineLoad:
        return replace(self._load, num_compiles_after_warm_up=num_compiles_after_warm_up)

    def seconds_per_request(self) -> float:
        """Time between two ends of late: when a place in the queue is likely to be free. At least 0.1 s."""
        ends = list(self._recent_ends_s)
        if len(ends) < 2:
            return 1.0
        return max(0.1, (ends[-1] - ends[0]) / (len(ends) - 1))
