"""Counters and times of the engine: written by its thread once per step, read by other threads as one snapshot.

`StepTimer` measures each dispatch once. Features that depend on the times get them with the results.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jpaged.engine.executor import Executor, ExpertStats, Geometry, StepInputs
from jpaged.engine.kv_cache.interface import KVCacheManager
from jpaged.engine.observers import StepTiming
from jpaged.engine.scheduler.output import SchedulerOutput
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequence import SequenceGroup
from jpaged.server_load import DISTRIBUTIONS, EngineLoad, SpeculationLoad
from jpaged.types import FinishReason


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Observations up to each bound, cumulative as in Prometheus; the last count is of all observations."""

    bounds: tuple[float, ...]
    cumulative_counts: tuple[int, ...]
    sum: float

    @classmethod
    def total(cls, snapshots: Sequence[HistogramSnapshot]) -> HistogramSnapshot:
        """Return the sum of histograms with the same bounds."""
        counts = zip(*(snapshot.cumulative_counts for snapshot in snapshots), strict=True)
        return cls(snapshots[0].bounds, tuple(map(sum, counts)), math.fsum(snapshot.sum for snapshot in snapshots))


class SpeculationStats:
    """Counters of drafts and their acceptance, written by one thread; any thread may take a snapshot.

    Args:
        num_speculative_tokens: maximum number of draft tokens per row, and of positions counted separately.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._ends = [0] * (num_speculative_tokens + 1)  # drafts by number of accepted tokens
        self._load = SpeculationLoad(num_accepted_tokens_per_pos=(0,) * num_speculative_tokens)

    def count(self, num_proposals: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Count the rows of a step and update the snapshot; rows without draft tokens are ignored."""
        for proposed, accepted in zip(num_proposals, num_accepted, strict=True):
            if proposed:
                self._num_drafts += 1
                self._num_draft_tokens += proposed
                self._ends[accepted] += 1
        at_least, per_position = 0, []
        for ends in reversed(self._ends[1:]):
            at_least += ends
            per_position.append(at_least)
        self._load = SpeculationLoad(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(per_position),
            num_accepted_tokens_per_pos=tuple(reversed(per_position)),
        )

    def snapshot(self) -> SpeculationLoad:
        return self._load


class Histogram:
    """Histogram of seconds or counts, with these ascending upper bounds and one bucket for everything above.

    One thread observes; any thread may take a snapshot, which may lack the observation in progress.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def snapshot(self) -> HistogramSnapshot:
        total, cumulative = 0, []
        for count in list(self._counts):
            total += count
            cumulative.append(total)
        return HistogramSnapshot(self._bounds, tuple(cumulative), self._sum)


_RECENT_ENDS = 64
ERROR, DEADLINE = "error", "deadline"
"""End reasons of requests without a finish reason: an error, or an expired deadline."""


class StepStats:
    """Collects the counters. Only the engine thread calls the methods, except the readers at the end of the class."""

    def __init__(self, geometry: Geometry, clock: Callable[[], float], num_speculative_tokens: int = 0) -> None:
        self._clock = clock
        self._drafts = SpeculationStats(num_speculative_tokens) if num_speculative_tokens else None
        self._load = EngineLoad(
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            max_num_seqs=geometry.max_num_seqs,
            num_blocks_free=geometry.num_blocks,
            num_blocks_empty=geometry.num_blocks,
        )
        # The values of the next EngineLoad, while they are counted.
        self._counts = asdict(self._load) | {"speculation": self._load.speculation}
        self._has_adapters = geometry.max_loras > 0
        self._sum_stored_tokens = 0
        self._sum_first_token_s = 0.0
        self._recent_ends_s: deque[float] = deque(maxlen=_RECENT_ENDS)
        self._histograms = {name: Histogram(one.bounds) for name, one in DISTRIBUTIONS.items()}
        # Sequences that run together have the same gap, so a step has few different ones.
        self._token_gaps_s: dict[float, int] = {}
        of_engine = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT  # tool calls: set later
        self._num_ended = dict.fromkeys([*(reason.value for reason in of_engine), DEADLINE, ERROR], 0)

    def count_schedule(self, schedule: SchedulerOutput) -> None:
        self._counts["num_preemptions"] += len(schedule.preempted)
        for group in schedule.preempted:
            group.absences.begin(self._clock())
        self._counts["num_recomputed_tokens"] += schedule.num_recomputed_tokens
        for group in schedule.admitted:
            if group.first_scheduled_s is None:
                now_s = self._clock()
                group.scheduled(now_s)
                self._histograms["queue_time"].observe(now_s - group.arrival_s)
                self._counts["num_prompt_tokens"] += len(group.request.prompt_token_ids)
            else:
                group.absences.end(self._clock())

    def count_steps(self, schedule: SchedulerOutput) -> None:
        """Count the steps of a schedule with rows, all of which are dispatched."""
        self._counts["num_steps"] += schedule.num_steps
        if schedule.runs:
            self._counts["num_cascade_steps"] += schedule.num_steps
            self._counts["num_cascade_tokens"] += schedule.num_tokens_shared * schedule.num_steps

    def discard_steps(self, schedule: SchedulerOutput, num_steps: int) -> None:
        """Subtract steps that `count_steps` has counted and that were not executed."""
        self._counts["num_steps"] -= num_steps
        if schedule.runs:
            self._counts["num_cascade_steps"] -= num_steps
            self._counts["num_cascade_tokens"] -= schedule.num_tokens_shared * num_steps

    def count_tokens(self, groups: Sequence[SequenceGroup], now_s: float, num_steps: int = 1) -> None:
        """Count one token for each of these groups, in one of `num_steps` steps that end now.

        A group of several sequences occurs once for each. Tokens of one dispatch count as if evenly spaced in time.
        """
        self._counts["num_generation_tokens"] += len(groups)
        gaps_s = self._token_gaps_s
        for group in groups:
            if group.last_token_s != now_s:  # the first of the step
                group.collected(now_s, num_steps)
                if group.token_gap_s is None:
                    self._sum_first_token_s += now_s - group.arrival_s
                    self._counts["num_first_tokens"] += 1
                    self._histograms["time_to_first_token"].observe(now_s - group.arrival_s)
            gap_s = group.token_gap_s
            if gap_s is not None:
                gaps_s[gap_s] = gaps_s.get(gap_s, 0) + 1

    def count_forced(self, num_tokens: int) -> None:
        """Count tokens forced by a grammar, which took no separate step."""
        self._counts["num_generation_tokens"] += num_tokens
        self._counts["num_forced_tokens"] += num_tokens

    def count_drafts(self, num_proposals: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Count the drafts of a step and their accepted tokens."""
        if self._drafts is not None:
            self._drafts.count(num_proposals, num_accepted)

    def count_end(self, group: SequenceGroup) -> None:
        """Count a request by its end reason."""
        now_s = self._clock()
        self._counts["num_requests_ended"] += 1
        self._num_ended[group.ended_by or ERROR] += 1
        self._recent_ends_s.append(now_s)
        if group.ended_by in (FinishReason.STOP.value, FinishReason.LENGTH.value):
            self._histograms["end_to_end"].observe(now_s - group.arrival_s)
            self._observe_request(group)

    def _observe_request(self, group: SequenceGroup) -> None:
        """Record the distributions of a finished request."""
        sampling, observed = group.request.sampling, self._histograms
        num_tokens = group.num_sampled_tokens
        observed["request_prompt_tokens"].observe(len(group.request.prompt_token_ids))
        observed["request_generation_tokens"].observe(num_tokens)
        observed["request_n"].observe(sampling.n)
        observed["request_max_tokens"].observe(sampling.max_num_tokens)
        began_s, first_s, last_s = group.first_scheduled_s, group.first_token_s, group.last_token_s
        if began_s is None or first_s is None or last_s is None:
            return
        observed["prefill_time"].observe(first_s - began_s)
        observed["decode_time"].observe(last_s - first_s)
        observed["inference_time"].observe(last_s - began_s)
        num_sequences = len(group.sequences)
        if num_tokens > num_sequences:
            observed["time_per_token"].observe((last_s - first_s) * num_sequences / (num_tokens - num_sequences))

    def count_not_finite(self) -> None:
        """Count a request with non-finite logits, in addition to `count_end`."""
        self._counts["num_nonfinite_requests"] += 1

    def count_times(self, host_s: float, idle_s: float) -> None:
        """Record the time of a step without the wait for the device, and how long the device was idle before it."""
        self._counts["host_s"] += host_s
        self._histograms["host_step"].observe(host_s)
        self._counts["device_idle_s"] += idle_s

    def end_step(self, memory: KVCacheManager, scheduler: Scheduler) -> None:
        """Read the gauges and make the step visible to `snapshot`."""
        for gap_s, count in self._token_gaps_s.items():
            self._histograms["inter_token"].observe(gap_s, count)
        self._token_gaps_s.clear()
        use, done, now = memory.use(), memory.counts, self._counts
        queues, rows = scheduler.queues, scheduler.rows
        self._sum_stored_tokens += memory.num_stored_tokens(rows.others(queues.holders), rows.lens_s)
        now["sum_reserved_slots"] += memory.num_reserved_slots()
        now["slot_use"] = self._sum_stored_tokens / max(1, now["sum_reserved_slots"])
        now["time_to_first_token_s"] = self._sum_first_token_s / max(1, now["num_first_tokens"])
        now["num_running"] = len(queues.running)
        now["num_waiting"] = queues.num_waiting + len(queues.pending_fetch)
        now["num_swapped"] = len(queues.swapped)
        now["num_blocks_free"] = use.num_free + use.num_cached
        now["num_blocks_empty"] = use.num_free
        now["num_blocks_cached"] = use.num_cached
        now["num_blocks_used"] = use.num_referenced
        now["peak_blocks_used"] = max(now["peak_blocks_used"], use.num_referenced)
        now["num_copies_on_write"] = done.num_copies_on_write
        now["num_blocks_swapped_out"] = done.num_swapped_out
        now["num_blocks_swapped_in"] = done.num_swapped_in
        now["num_host_hit_tokens"] = done.num_host_hit_tokens
        for connector in memory.connectors:
            now.update(connector.load_fields())
        now["num_prefix_query_tokens"] = done.num_prefix_query_tokens
        now["num_prefix_hit_tokens"] = done.num_prefix_hit_tokens
        if memory.prefixes is not None:
            changes = memory.prefixes.changes
            now["num_kv_events"], now["num_kv_events_dropped"] = changes.num_published, changes.num_dropped
            if (states := memory.prefixes.states) is not None:
                now["num_state_slots"], now["num_state_checkpoints"] = states.num_slots, states.num_checkpoints
        if self._has_adapters:
            now["running_adapters"] = _adapter_names(queues.running)
            now["waiting_adapters"] = _adapter_names((*queues.waiting, *queues.swapped))
        if self._drafts is not None:
            now["speculation"] = self._drafts.snapshot()
        self._load = EngineLoad(**now)

    def snapshot(
        self,
        num_compiles_after_warm_up: int,
        stall_detector: StallDetector | None = None,
        experts: ExpertStats | None = None,
    ) -> EngineLoad:
        load = replace(self._load, num_compiles_after_warm_up=num_compiles_after_warm_up)
        if experts is not None:
            load = replace(
                load,
                num_expert_load_reads=experts.num_reads,
                num_expert_rearrangements=experts.num_rearrangements,
                num_experts_moved=experts.num_moved,
                expert_balancedness=experts.balancedness,
                expert_peak_ratio=experts.peak_ratio,
            )
        if stall_detector is None:
            return load
        return replace(
            load, seconds_since_progress=stall_detector.seconds_without, num_stalls=stall_detector.num_stalls
        )

    def seconds_per_request(self) -> float:
        """Return the recent mean time between two ends, at least 0.1 s: how soon a queue place is likely to be free."""
        ends = list(self._recent_ends_s)
        if len(ends) < 2:
            return 1.0
        return max(0.1, (ends[-1] - ends[0]) / (len(ends) - 1))

    def histogram(self, name: str) -> HistogramSnapshot:
        return self._histograms[name].snapshot()

    def num_ended(self) -> dict[str, int]:
        return dict(self._num_ended)


def _adapter_names(groups: Iterable[SequenceGroup]) -> tuple[str, ...]:
    """Return the names of the groups' adapters, sorted and without duplicates."""
    loaded = (group.request.adapter for group in groups)
    return tuple(sorted({adapter.name for adapter in loaded if adapter is not None}))


class StallDetector:
    """Stall detector: time since the last progress while requests are pending.

    Written by the engine thread, readable from any thread.

        requests   ├── in flight ───────────────────────────┤
        steps      │ end   end   end              (hangs)      now
                                 └───── seconds_without ──────┘

    Args:
        stall_s: seconds without progress that count as a stall.
    """

    def __init__(self, clock: Callable[[], float], stall_s: float) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._num_stalls = 0
        self._since_s: float | None = None  # None while there is no work
        self._awaited_s: float | None = None  # start of the wait for a step of the device
        self._is_paused = False

    def begin(self) -> None:
        """Record that requests are pending from now on."""
        self._since_s = self._clock()

    def record_progress(self, now_s: float) -> None:
        """Record progress."""
        since_s = self._since_s
        if since_s is not None:
            self._num_stalls += now_s - since_s >= self._stall_s
            self._since_s = now_s

    def rest(self) -> None:
        """Record that no request is pending any more."""
        self.record_progress(self._clock())
        self._since_s = None

    def begin_wait(self, now_s: float) -> None:
        """Record that the host waits for a step: that counts as work, even if its requests were dropped."""
        self._awaited_s = now_s

    def end_wait(self) -> None:
        """Record the end of that wait."""
        self._awaited_s = None

    def set_paused(self, is_paused: bool) -> None:
        """Record that no step is expected until the end of a pause."""
        self._is_paused = is_paused
        if self._since_s is not None:
            self._since_s = self._clock()

    @property
    def seconds_without(self) -> float:
        """Seconds since the last progress; 0 while no request is pending, and during a pause."""
        if self._is_paused:
            return 0.0
        since_s, awaited_s = self._since_s, self._awaited_s
        since_s = awaited_s if since_s is None else since_s
        return 0.0 if since_s is None else max(0.0, self._clock() - since_s)

    @property
    def is_stalled(self) -> bool:
        """True if requests are pending without progress for at least the stall time."""
        return self.seconds_without >= self._stall_s

    @property
    def num_stalls(self) -> int:
        """Number of stalls, including a current one."""
        return self._num_stalls + self.is_stalled


class StepTimer:
    """Timer of one loop's steps. Called by the engine thread alone.

    The device is idle from the time at which the host, which polls between its own work, sees it done:

        dispatch n     device is done     seen done     dispatch n + 1
                                              └──── idle ────┘

    Args:
        stall_detector: gets the waits for the device, and the steps with progress.
    """

    def __init__(self, executor: Executor[Any, Any], clock: Callable[[], float], stall_detector: StallDetector) -> None:
        self._executor = executor
        self._clock = clock
        self._stall_detector = stall_detector
        self._begin_s = 0.0  # of the current step
        self._wait_s = self._idle_s = 0.0  # of the current step
        self._waiting_since_s = 0.0
        self._last_end_s = 0.0  # of a dispatch
        self._idle_since_s: float | None = None
        self._newest: Any = None  # the last dispatch in the device's queue; None once it was seen done

    def begin_step(self) -> float:
        """Begin a step; return the time."""
        self._begin_s = now_s = self._clock()
        self._wait_s = self._idle_s = 0.0
        self._look_at_device(now_s)
        return now_s

    def end_idle(self) -> None:
        """End the idle time of the device: call it right before a dispatch."""
        now_s = self._clock()
        self._look_at_device(now_s)
        if self._idle_since_s is not None:
            self._idle_s += now_s - self._idle_since_s
            self._idle_since_s = None

    def set_newest(self, handle: Any) -> None:
        """Set the last dispatch in the device's queue; None if it cannot be polled."""
        self._newest = handle

    def start_s(self, begin_s: float) -> float:
        """Return when the device could start a dispatch: when it was prepared, and the previous one had ended."""
        return max(begin_s, self._last_end_s)

    def add_wait(self, seconds: float) -> None:
        """Count seconds in which the host waited for the device between `begin_step` and `end_step`."""
        self._wait_s += seconds

    def begin_wait(self) -> None:
        """Begin to wait for the results of a dispatch."""
        self._waiting_since_s = self._clock()
        self._stall_detector.begin_wait(self._waiting_since_s)

    def end_wait(self, schedule: SchedulerOutput, inputs: StepInputs, begin_s: float, handle: Any) -> StepTiming:
        """Return the timing of the dispatch whose results have arrived."""
        self._stall_detector.end_wait()
        end_s = self._clock()
        self._wait_s += end_s - self._waiting_since_s
        if handle is self._newest:
            self._newest = None
            self._note_done(end_s)
        seconds, self._last_end_s = end_s - self.start_s(begin_s), end_s
        num_tokens, num_padded = schedule.num_tokens, len(inputs.token_ids_t)
        return StepTiming(inputs, num_tokens, num_padded, schedule.num_steps, begin_s, end_s, seconds)

    def end_step(self) -> tuple[float, float]:
        """End a step with progress. Return its host time without waits, and the idle time that it ended."""
        now_s = self._clock()
        self._stall_detector.record_progress(now_s)
        return now_s - self._begin_s - self._wait_s, self._idle_s

    def rest(self) -> None:
        """Record that no request waits for the device, which then is not idle."""
        self._newest = self._idle_since_s = None

    def _look_at_device(self, now_s: float) -> None:
        """Check whether the newest dispatch has run: from then on the device is idle."""
        if self._newest is not None and self._executor.is_done(self._newest):
            self._newest = None
            self._note_done(now_s)

    def _note_done(self, now_s: float) -> None:
        if self._idle_since_s is None:
            self._idle_since_s = now_s
