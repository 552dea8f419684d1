"""Counts of what the engine did: written by its thread once a step, read by others as one snapshot."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from jpaged.engine.executor import Geometry
from jpaged.engine.histogram import Histogram, HistogramSnapshot
from jpaged.engine.kv.contiguous import ReservedMemory
from jpaged.engine.kv.paged import PagedMemory
from jpaged.engine.scheduling.schedule import Schedule
from jpaged.engine.scheduling.scheduler import Scheduler
from jpaged.engine.sequence import Group
from jpaged.types import FinishReason

_RECENT_ENDS = 64
ERROR, DEADLINE = "error", "deadline"
"""How a request ended that has no finish reason: it failed, or its time was over."""

_FIRST_TOKEN_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
BOUNDS_S: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "time_to_first_token": _FIRST_TOKEN_BOUNDS_S,
        "inter_token": _TOKEN_BOUNDS_S,
        "end_to_end": _REQUEST_BOUNDS_S,
        "queue_time": _REQUEST_BOUNDS_S,
        "host_step": (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0),
    }
)
"""Histogram -> upper bounds of its buckets; vLLM's where it has such a histogram, so that both add up in one query."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is, and what it has done since it started.

    Attributes:
        num_running: requests with rows in the current step.
        num_waiting: requests that wait for rows or blocks, preempted ones included.
        num_swapped: those of them that are in host memory.
        num_blocks_free: free blocks, cached ones included.
        num_blocks_empty: free blocks without the cached ones.
        num_blocks_cached: free blocks that still hold a prefix.
        num_prefix_query_tokens, num_prefix_hit_tokens: prompt tokens looked up in the prefix cache, and found there.
        num_cascade_steps: steps in which rows read a prefix together.
        num_cascade_tokens: tokens of context that were not read again by it.
        sum_reserved_slots: slots that were reserved, added up over all steps so far.
        slot_use: share of them that held a token; 0 before the first step.
        num_nonfinite_requests: requests that ended because the model's logits were not finite.
        num_first_tokens: requests that got one.
        time_to_first_token_s: mean over them.
        host_s: what the host spent deciding, packing and publishing steps.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_blocks_free: int = 0
    num_blocks_empty: int = 0
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
    num_cascade_steps: int = 0
    num_cascade_tokens: int = 0
    num_requests_ended: int = 0
    num_nonfinite_requests: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    sum_reserved_slots: int = 0
    slot_use: float = 0.0
    num_first_tokens: int = 0
    time_to_first_token_s: float = 0.0
    host_s: float = 0.0
    num_compiles_after_warm_up: int = 0


def total_load(loads: Sequence[EngineLoad]) -> EngineLoad:
    """Of several engines as of one: counts are added, means weighted. The peak is the sum of their peaks, a bound."""
    sums = {field.name: sum(getattr(load, field.name) for load in loads) for field in fields(EngineLoad)}
    held = sum(load.slot_use * load.sum_reserved_slots for load in loads)
    waited_s = sum(load.time_to_first_token_s * load.num_first_tokens for load in loads)
    return replace(
        EngineLoad(**sums),
        block_size=loads[0].block_size,
        slot_use=held / max(1, sums["sum_reserved_slots"]),
        time_to_first_token_s=waited_s / max(1, sums["num_first_tokens"]),
    )


class StepStats:
    """Gathers the counts; the engine's thread calls everything but what answers questions, at the end."""

    def __init__(self, geometry: Geometry, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._load = EngineLoad(
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            max_num_seqs=geometry.max_num_seqs,
            num_blocks_free=geometry.num_blocks,
            num_blocks_empty=geometry.num_blocks,
        )
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0
        self._num_cascade_steps = 0
        self._num_cascade_tokens = 0
        self._num_requests_ended = 0
        self._num_nonfinite_requests = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._peak_blocks_used = 0
        self._sum_stored_tokens = 0
        self._sum_reserved_slots = 0
        self._sum_first_token_s = 0.0
        self._num_first_tokens = 0
        self._recent_ends_s: deque[float] = deque(maxlen=_RECENT_ENDS)
        self._host_s = 0.0
        self._histograms = {name: Histogram(bounds_s) for name, bounds_s in BOUNDS_S.items()}
        # Sequences that run together have the same gap, so that a step has few different ones.
        self._token_gaps_s: dict[float, int] = {}
        self._num_ended = dict.fromkeys([*(reason.value for reason in FinishReason), DEADLINE, ERROR], 0)

    def count_step(self, schedule: Schedule) -> None:
        self._num_steps += bool(schedule.rows)
        self._num_preemptions += schedule.num_preempted
        self._num_recomputed_tokens += schedule.num_recomputed_tokens
        if schedule.runs:
            self._num_cascade_steps += 1
            self._num_cascade_tokens += schedule.num_tokens_shared
        for group in schedule.admitted:
            if group.first_scheduled_s is None:
                group.first_scheduled_s = self._clock()
                self._histograms["queue_time"].observe(group.first_scheduled_s - group.arrival_s)
                self._num_prompt_tokens += len(group.request.prompt_token_ids)

    def count_token(self, group: Group, now_s: float) -> None:
        self._num_generation_tokens += 1
        if group.last_token_s != now_s:
            self._note_sample(group, now_s)
        if group.token_gap_s is not None:
            self._token_gaps_s[group.token_gap_s] = self._token_gaps_s.get(group.token_gap_s, 0) + 1

    def count_end(self, group: Group) -> None:
        """Counts a request by what ended it."""
        now_s = self._clock()
        self._num_requests_ended += 1
        self._num_ended[group.ended_by or ERROR] += 1
        self._recent_ends_s.append(now_s)
        if group.ended_by in (FinishReason.STOP.value, FinishReason.LENGTH.value):
            self._histograms["end_to_end"].observe(now_s - group.arrival_s)

    def count_not_finite(self) -> None:
        """A request whose logits were not finite, besides `count_end`."""
        self._num_nonfinite_requests += 1

    def count_host(self, seconds: float) -> None:
        """What a step took besides waiting for the device."""
        self._host_s += seconds
        self._histograms["host_step"].observe(seconds)

    def end_step(self, memory: PagedMemory | ReservedMemory, scheduler: Scheduler) -> None:
        """Takes the gauges and makes the step visible to `snapshot`."""
        for gap_s, count in self._token_gaps_s.items():
            self._histograms["inter_token"].observe(gap_s, count)
        self._token_gaps_s.clear()
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
            num_blocks_empty=use.num_free,
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
            num_cascade_steps=self._num_cascade_steps,
            num_cascade_tokens=self._num_cascade_tokens,
            num_requests_ended=self._num_requests_ended,
            num_nonfinite_requests=self._num_nonfinite_requests,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            sum_reserved_slots=self._sum_reserved_slots,
            slot_use=self._sum_stored_tokens / self._sum_reserved_slots if self._sum_reserved_slots else 0.0,
            num_first_tokens=self._num_first_tokens,
            time_to_first_token_s=self._sum_first_token_s / self._num_first_tokens if self._num_first_tokens else 0.0,
            host_s=self._host_s,
        )

    def _note_sample(self, group: Group, now_s: float) -> None:
        """The first token that a step drew for a group."""
        if group.last_token_s is None:
            group.first_token_s = now_s
            self._sum_first_token_s += now_s - group.arrival_s
            self._num_first_tokens += 1
            self._histograms["time_to_first_token"].observe(now_s - group.arrival_s)
        else:
            group.token_gap_s = now_s - group.last_token_s
        group.last_token_s = now_s

    def snapshot(self, num_compiles_after_warm_up: int) -> EngineLoad:
        return replace(self._load, num_compiles_after_warm_up=num_compiles_after_warm_up)

    def seconds_per_request(self) -> float:
        """Time between two ends of late: when a place in the queue is likely to be free. At least 0.1 s."""
        ends = list(self._recent_ends_s)
        if len(ends) < 2:
            return 1.0
        return max(0.1, (ends[-1] - ends[0]) / (len(ends) - 1))

    def histogram(self, name: str) -> HistogramSnapshot:
        """One of BOUNDS_S."""
        return self._histograms[name].snapshot()

    def num_ended(self) -> dict[str, int]:
        """Requests that ended, by finish reason; "deadline" or "error" where they had none."""
        return dict(self._num_ended)
