"""Number of decode steps in the next dispatch (`--num-scheduler-steps`).

    one step a dispatch       | host | step | host | step | host | step |       the host's overhead of a dispatch
    several of them           | host | step   step   step |                     is paid once

A new request waits for the steps already dispatched. Unless a number of steps is configured, the duration of a dispatch
is bounded, so steps of a large model, for which the host's overhead is negligible, are dispatched one by one:

    rows are free    requests keep arriving, few rows run      a tenth of the recent prefill times, 0.003 to 0.02 s:
                                                               a first token waits for half of it
                     the same, and they end a dispatch         twice that
                     otherwise                                 0.02 s
    all are taken    some row may end early                    0.05 s     a new request waits for a row anyway
                     none may: no step is wasted               0.1 s      tokens wait this long for their message

There is no bound if no row may end and no request arrives later (`NO_NEWCOMERS`).

On a CPU an arrival can end a dispatch after the current step (`Executor.decode_interruptibly`):

    one step a dispatch       | host | step | host | step | host | prefill
    interruptible steps       | host | step   step   step | host | prefill        tokens cost less, and so does the wait
                                                ^ arrival

The number of steps is then known only at the end, so that no step overlaps with such a dispatch. If steps overlap, it
is used only while arrivals are expected.

Limit of the prefill tokens in a step, so that streams in it keep their inter-token latency.

    tokens of a step     8    16    32    64   128       4 rows of them decode; the bound is 20 ms:
    takes                5     5     7    12    30 ms    60 prefill tokens
                                          ^

Steps are padded to buckets, so every size within a bucket costs the same, and a bucket is filled. The estimated time of
a step is the one measured at start-up, times the recent ratio of actual to measured time for steps of that size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import chain
from statistics import median
from typing import NamedTuple

import numpy as np

from jpaged.engine.executor import I32, BucketTable, DeviceRates, Geometry, StepOutputs, num_pairs
from jpaged.engine.observers import StepTiming
from jpaged.engine.scheduler.output import SchedulerOutput
from jpaged.engine.sequence import SequenceGroup

NO_NEWCOMERS = -1
"""Number of steps: chosen by time if rows may end early, the maximum if none may."""
_LONGEST_S = 0.02
"""Maximum seconds of a dispatch of several steps; tokens that arrive this close together are read as one."""
_LONGEST_BEFORE_ARRIVAL_S = 0.003
"""The same if another request is likely to arrive soon and prompts are short."""
_SHARE_OF_PREFILL = 0.1
"""The same for longer prompts, as a share of the recent prefill times: a first token waits for half of it."""
_LONGEST_WITHOUT_ROOM_S, _LONGEST_WITHOUT_ENDS_S = 0.05, 0.1
"""The same if no row is free for a new request, and if in addition none may end early."""
_BURST_S = 0.02
"""Requests that arrive this close together count as one arrival."""
_INTERRUPTIBLE_FACTOR = 2
"""How much longer a dispatch may be that an arrival ends: its executed steps are still processed first."""
_NUM_ARRIVALS, _MIN_ARRIVALS = 8, 3
_MAX_GAP_S = 2.0
"""Mean seconds between arrivals above which the next one is not expected."""
_FEW_ROWS_SHARE = 0.25
"""Share of all rows up to which arrivals shorten a dispatch; with more, throughput matters more."""
_NUM_GAPS = 8
"""Mean gaps since the last arrival after which no further one is expected; one gap in 3,000 of Poisson arrivals."""
_NUM_KEPT = 5
_JUMPING_SHARE, _JUMPING_SHARE_OF_FED = 0.125, 0.5
"""Share of grammar rows with one allowed token above which jumps save more than multi-step dispatches.

The second is for masked multi-step dispatches, which cost less (`python -m benchmarks.structured.jumps`).
"""
_NEWEST_SHARE = 0.02
"""Weight of the newest step in that share."""
_SPARE_SHARE = 0.65
"""Share of a dispatch during which the next one is not decided yet; the rest is for preparing it."""


class ArrivalTimes:
    """Recent times at which requests arrived while others were running.

    Only these requests wait for a dispatch. A client that sends one request after another never does.
    """

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_NUM_ARRIVALS)

    def add(self, now_s: float) -> None:
        """Record an arrival."""
        times_s = self._times_s
        if times_s and now_s - times_s[-1] > _NUM_GAPS * _MAX_GAP_S:
            times_s.clear()
        if not times_s or now_s - times_s[-1] >= _BURST_S:
            times_s.append(now_s)

    def is_next_expected(self, now_s: float) -> bool:
        """Return True if requests keep arriving, so that another one is likely to arrive soon."""
        times_s = self._times_s
        if len(times_s) < _MIN_ARRIVALS:
            return False
        gap_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
        return gap_s <= _MAX_GAP_S and now_s - times_s[-1] <= _NUM_GAPS * gap_s


class MultiStepPolicy:
    """Chooses the number of steps, from the times measured at start-up and the recent durations of dispatches.

    Attributes:
        arrivals: arrivals next to running requests.

    Args:
        num_steps: fixed maximum, independent of time; 0 chooses by time, and NO_NEWCOMERS may.
        bound_s: bound of the inter-token latency of streams; 0 for no bound.
        has_overlap: the next step is scheduled while one runs.
    """

    def __init__(
        self, num_steps: int, bound_s: float, rates: DeviceRates, geometry: Geometry, *, has_overlap: bool = True
    ) -> None:
        self._chosen = num_steps
        self._bound_s = bound_s or math.inf
        self._has_overlap = has_overlap
        self._now_s = 0.0
        self.arrivals = ArrivalTimes()
        self.set_programs(geometry)
        self._forward_s = rates.forward_s
        self._seen_s: dict[int, deque[float]] = {}
        self._prefills_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._forced_share = 0.0
        self._jumping_share = _JUMPING_SHARE_OF_FED if geometry.has_fed_steps else _JUMPING_SHARE

    def begin_step(self, now_s: float, geometry: Geometry) -> None:
        """Update the time, and the available sizes and step counts of compiled programs."""
        self._now_s = now_s
        self.set_programs(geometry)

    def set_programs(self, geometry: Geometry) -> None:
        """Update the available sizes and step counts of compiled programs."""
        chosen, most = self._chosen, geometry.max_num_steps
        self._most = min(chosen, most) if chosen > 0 else most
        self._buckets = geometry.buckets
        self._max_num_rows = geometry.max_num_seqs
        # The draft model must know which tokens the model computes when a step is dispatched.
        self._can_interrupt = geometry.has_fed_steps and not geometry.num_speculative_tokens

    def num_steps(
        self,
        num_rows: int,
        least_left: int,
        *,
        may_end: bool = True,
        has_room: bool = True,
        are_bound: bool = False,
    ) -> int:
        """Return the steps of a dispatch of `num_rows` rows, each of which can make at least least_left steps.

        Args:
            may_end: some row may end earlier.
            has_room: rows are free for other requests.
            are_bound: some rows follow grammars: the dispatch stops when a row ends, and has no jumps.
        """
        if are_bound:
            if self._forced_share > self._jumping_share:
                return 1
            may_end = False
        most = min(self._most, least_left)
        size = self._buckets.num_decode_rows(num_rows)
        if size is None or most <= 1:
            return 1
        if self._chosen > 0 or (self._chosen == NO_NEWCOMERS and not may_end):
            return most
        seen_s = self._seen_s.get(size)
        step_s = median(seen_s) if seen_s else self._timed_s(size)
        longest_s = self.longest_s(num_rows, may_end=may_end, has_room=has_room)
        return most if step_s * most <= longest_s else max(1, int(longest_s / step_s))

    def has_program(self, num_rows: int) -> bool:
        """Return True if the program of several decode steps is available for these rows."""
        return self._most > 1 and self._buckets.num_decode_rows(num_rows) is not None

    def longest_s(self, num_rows: int, *, may_end: bool, has_room: bool) -> float:
        """Return the maximum seconds of a dispatch whose number of steps is chosen by time."""
        if not has_room:
            longest_s = _LONGEST_WITHOUT_ROOM_S if may_end else _LONGEST_WITHOUT_ENDS_S
        elif num_rows <= _FEW_ROWS_SHARE * self._max_num_rows and self._expects_arrival:
            longest_s = self._longest_before_arrival_s
        else:
            longest_s = _LONGEST_S
        return min(longest_s, self._bound_s)

    @property
    def is_interruptible(self) -> bool:
        """True if a request that arrives ends a dispatch of several steps, given a free row."""
        if not self._can_interrupt or self._chosen == NO_NEWCOMERS:
            return False
        return not self._has_overlap or self._expects_arrival

    @property
    def _expects_arrival(self) -> bool:
        """True if a request is likely to arrive soon that has to wait for the dispatch in flight."""
        return self._chosen != NO_NEWCOMERS and self.arrivals.is_next_expected(self._now_s)

    @property
    def _longest_before_arrival_s(self) -> float:
        """Maximum seconds of a dispatch for which an arrival waits, or whose tokens are processed before it runs."""
        prefill_s = median(self._prefills_s) if self._prefills_s else 0.0
        longest_s = max(_LONGEST_BEFORE_ARRIVAL_S, _SHARE_OF_PREFILL * prefill_s)
        return min(_INTERRUPTIBLE_FACTOR * longest_s if self.is_interruptible else longest_s, _LONGEST_S)

    def observe_forced_share(self, num_rows: int, num_forced: int) -> None:
        """Record the number of rows with grammars in a step, and how many of them had one allowed token."""
        self._forced_share += _NEWEST_SHARE * (num_forced / num_rows - self._forced_share)

    def on_results(self, schedule: SchedulerOutput, outputs: StepOutputs, timing: StepTiming) -> None:
        """Record the duration of a dispatch in which all rows decode, and of the prefills that end with this one."""
        for row in schedule.rows:
            started_s = row.group.first_scheduled_s
            if row.num_tokens > 1 and row.samples_token and row.output_index == 0 and started_s is not None:
                self._prefills_s.append(timing.end_s - started_s)
        if schedule.rows or schedule.decodes.num_rounds:
            return
        size = self._buckets.num_decode_rows(len(schedule.decodes))
        if size is not None:
            self._seen_s.setdefault(size, deque(maxlen=_NUM_KEPT)).append(timing.seconds / timing.num_steps)

    def spare_s(self, schedule: SchedulerOutput, start_s: float, now_s: float) -> float:
        """Return the seconds until the host must decide the step after the dispatch in flight; 0 or less is now.

        A request that arrives in this time runs right after that dispatch. With masks between the steps, the next step
        is decided with the last one.

        Args:
            start_s: when the device could start the dispatch.
        """
        num_steps, decodes = schedule.num_steps, schedule.decodes
        size = self._buckets.num_decode_rows(len(decodes)) if num_steps > 1 and not decodes.are_masked else None
        seen_s = self._seen_s.get(size) if size is not None else None
        if not seen_s:
            return 0.0
        return start_s + _SPARE_SHARE * num_steps * median(seen_s) - now_s

    def _timed_s(self, size: int) -> float:
        """Return the step time measured at start-up; below the least size in proportion."""
        sizes, seconds = zip(*self._forward_s, strict=True)
        return float(np.interp(size, sizes, seconds)) * min(1.0, size / sizes[0])


LEAST_TOKENS = 16
"""Prefill tokens that a step may always hold."""
LEAST_SHARE = 0.5
"""Prefill may always add this share of the time that the step takes without it."""
_NUM_KEPT_STEPS = 32
_ONE_IN = 8
_NUM_STEPS_TRUSTED = 256
_SHORTEST_S = 1e-9


class RanStep(NamedTuple):
    """Size and duration of an executed step.

    Attributes:
        num_padded: its tokens, padded to a bucket.
        query_starts, kv_lens: see `StepInputs`; of the rows in use.
        seconds: its duration; if it is one of several steps of a dispatch, its share.
    """

    num_padded: int
    query_starts: I32
    kv_lens: I32
    seconds: float

    @property
    def num_pairs(self) -> int:
        """See `StepInputs.num_pairs`. Computed on access, because few steps need it."""
        return num_pairs(self.query_starts, self.kv_lens)


_MAX_RECENT_STEPS = 8


class RecentSteps:
    """Recent steps that have not been read by `take`: the newest of each size.

    An arrival reads them before its first step, so they are few.

    Attributes:
        buckets: the current sizes that steps are padded to.
    """

    def __init__(self, buckets: BucketTable) -> None:
        self.buckets = buckets
        self._ran: dict[int, deque[RanStep]] = {}

    def set_buckets(self, buckets: BucketTable) -> None:
        """Set the current sizes."""
        self.buckets = buckets

    def on_results(self, schedule: SchedulerOutput, outputs: StepOutputs, timing: StepTiming) -> None:
        """Record a dispatch, unless a draft model ran in it."""
        if schedule.decodes.num_rounds:
            return
        inputs = timing.inputs
        query_starts = inputs.query_starts_s1[: inputs.num_rows + 1].copy()
        kv_lens = inputs.kv_lens_s[: inputs.num_rows].copy()
        step = RanStep(timing.num_padded, query_starts, kv_lens, timing.seconds / timing.num_steps)
        self._ran.setdefault(timing.num_padded, deque(maxlen=_MAX_RECENT_STEPS)).append(step)

    def take(self) -> list[RanStep]:
        """Return and clear the recorded steps, in order within each size."""
        ran = list(chain.from_iterable(self._ran.values()))
        self._ran.clear()
        return ran


class _ObservedTime:
    """Ratios of actual to measured time for steps of one bucket; initially the expected ratio.

    Attributes:
        share: the ratio that seven of eight steps do not exceed.
        at: the number of the last observed step.
    """

    def __init__(self, expected: float) -> None:
        self.share = expected
        self.at = 0
        self._expected = [expected] * _ONE_IN
        self._shares: deque[float] = deque(maxlen=_NUM_KEPT_STEPS)

    def add(self, share: float, at: int) -> None:
        self._shares.append(share)
        self.at = at
        del self._expected[-1:]
        shares = sorted([*self._expected, *self._shares])
        self.share = shares[len(shares) - 1 - len(shares) // _ONE_IN]


class StepTimeEstimator:
    """Estimates the duration of a step by its size, in seconds; executed steps correct the times from start-up.

        actual / measured   1.1  0.9  1.0  7.3  1.0  1.2  1.0  1.1        the last 32 ratios of a bucket are kept;
                                           ^ one in eight is ignored: another process had the processor

    A bucket starts with the ratio of the nearest observed one. A bucket that has not been observed for long is
    dropped, because the cause of slow steps may be gone: it is tried again, and its first step sets the ratio.
    """

    def __init__(self, rates: DeviceRates) -> None:
        self._tokens = [num_tokens for num_tokens, _ in rates.forward_s]
        self._seconds = [max(seconds, _SHORTEST_S) for _, seconds in rates.forward_s]
        self._pair_s = rates.pair_s
        self._seen: dict[int, _ObservedTime] = {}
        self._dropped: set[int] = set()
        self._num_seen = 0

    def seconds(self, num_padded: int, num_pairs: float) -> float:
        """Return the estimated duration of a step.

        Args:
            num_padded: its tokens, padded to a bucket.
            num_pairs: (query, key) pairs that attention computes, over all rows, in one head of one layer.
        """
        return self._share(num_padded) * self._timed_at(num_padded, num_pairs)

    def observe(self, num_padded: int, num_pairs: float, seconds: float) -> None:
        """Record the duration of a step; durations of 0, as without a running clock, are ignored."""
        if seconds <= 0:
            return
        share = seconds / self._timed_at(num_padded, num_pairs)
        if num_padded not in self._seen:  # a bucket that is tried again starts with this ratio
            self._seen[num_padded] = _ObservedTime(share if num_padded in self._dropped else self._share(num_padded))
        self._num_seen += 1
        self._seen[num_padded].add(share, self._num_seen)
        for known in [known for known, seen in self._seen.items() if seen.at < self._num_seen - _NUM_STEPS_TRUSTED]:
            del self._seen[known]
            self._dropped.add(known)

    def _timed_at(self, num_padded: int, num_pairs: float) -> float:
        """Interpolate the times measured at start-up linearly; beyond the measured sizes, scale in proportion."""
        nearest = min(max(num_padded, self._tokens[0]), self._tokens[-1])
        seconds = float(np.interp(nearest, self._tokens, self._seconds)) * num_padded / nearest
        return seconds + self._pair_s * num_pairs

    def _share(self, num_padded: int) -> float:
        """Return the ratio of this bucket or the nearest observed one; the smaller of two equally near ones."""
        if not self._seen:
            return 1.0
        return self._seen[min(self._seen, key=lambda known: max(known, num_padded) / min(known, num_padded))].share


_NUM_TOGETHER = 8
_LEAST_SIZE = 8


class StepTimeFloor:
    """Lower bounds of step durations, in seconds, by number of tokens.

        dispatches     64  64  64  64  64  64  64  64 │ 512 512 ...      eight consecutive ones of a size are averaged:
        took            2   2   9   0   2   2   2   2 │                  a late observation makes the next look short

    A size that was not observed takes at least as long as smaller ones, and at least its proportional part of larger
    ones. Before eight consecutive dispatches of one size have run, the bound is 0.

    Args:
        max_num_tokens: maximum tokens of a step.
    """

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self._least_s: dict[int, float] = {}
        self._size = self._num_dispatches = self._num_steps = 0
        self._seconds = self._token_s = self._step_s = 0.0

    def on_results(self, schedule: SchedulerOutput, outputs: StepOutputs, timing: StepTiming) -> None:
        """Record a dispatch, unless a draft model ran in it."""
        if not schedule.decodes.num_rounds:
            self.observe(timing.num_tokens, timing.num_steps, timing.seconds)

    def observe(self, num_tokens: int, num_steps: int, seconds: float) -> None:
        """Record the size and the seconds of a dispatch; see `StepTiming`."""
        size = max(_LEAST_SIZE, 1 << (num_tokens - 1).bit_length())
        if size != self._size:
            self._size, self._num_dispatches, self._num_steps, self._seconds = size, 0, 0, 0.0
        self._num_dispatches += 1
        self._num_steps += num_steps
        self._seconds += seconds
        if self._num_dispatches == _NUM_TOGETHER:
            mean_s = self._seconds / self._num_steps
            self._size = 0
            if mean_s < self._least_s.get(size, math.inf):
                self._least_s[size] = mean_s
                self._token_s = min(one_s / one for one, one_s in self._least_s.items())
                self._step_s = self._token_s * _LEAST_SIZE
                if _LEAST_SIZE in self._least_s:
                    self._step_s = self._least_s[_LEAST_SIZE]
                if max(self._least_s) < self._max_num_tokens:
                    self._token_s = min(self._token_s, max(self._least_s.values()) / self._max_num_tokens)

    def seconds(self, num_tokens: int, num_steps: int) -> float:
        """Return the minimum time of `num_tokens` prefill tokens and then `num_steps` steps; 0 if unknown."""
        return num_tokens * self._token_s + num_steps * self._step_s


_FIXED_PARTS = 20
"""Default bound in fixed parts of a step, so that larger steps take at most a twentieth less time for a token."""
_LEAST_DEFAULT_S, _MOST_DEFAULT_S = 0.1, 1.0
"""Range of the default: a message of a stream may wait for the first anyway (`jpaged.service.calls`)."""


def choose_bound_s(rates: DeviceRates) -> float:
    """Return the default bound of the inter-token latency of streams, from the times measured at start-up.

        seconds  fixed + slope * tokens          reading the weights is the fixed part, and is paid by every step:
                 └─ 0.002 ─> 0.1                 a model of 16 million parameters
                 └─ 0.03  ─> 0.6                 one of 390 million: steps of 0.1 s would be weights for a third

    Without a bound, streams would wait for the largest step. Rounded to milliseconds.
    """
    (few, few_s), (many, many_s) = rates.forward_s[0], rates.forward_s[-1]
    slope_s = (many_s - few_s) / (many - few) if many > few else 0.0
    fixed_s = few_s - slope_s * few
    return round(min(max(_FIXED_PARTS * fixed_s, _LEAST_DEFAULT_S), _MOST_DEFAULT_S), 3)


class PrefillBudget:
    """Chooses the prefill tokens of a step under a bound of the inter-token latency of streams.

    The bound is kept if the device is fast enough: prefill always gets a minimum share, so that prompts finish.

    Attributes:
        steps: records the steps; they are evaluated when `within` is called.
        bound_s: the bound in seconds.
    """

    def __init__(self, bound_s: float, rates: DeviceRates, buckets: BucketTable) -> None:
        self.steps = RecentSteps(buckets)
        self.bound_s = bound_s
        self._times = StepTimeEstimator(rates)

    def within(
        self,
        budget: int,
        context_lens: Sequence[int],
        running: Sequence[SequenceGroup],
        prefilling: Sequence[SequenceGroup],
    ) -> int:
        """Return the prefill tokens that fit next to the decoding rows; the whole budget if none of these is streamed.

        Args:
            budget: tokens that the step has room for.
            context_lens: tokens of each decoding row.
            running: every running group.
            prefilling: groups that compute their prompts, the next one first.
        """
        if not any(group.is_streamed and group not in prefilling for group in running):
            return budget
        for step in self.steps.take():
            self._times.observe(step.num_padded, step.num_pairs, step.seconds)
        num_decoding, num_decoding_pairs = len(context_lens), sum(context_lens)
        start = prefilling[0].live[0].num_computed_tokens if prefilling else 0

        def seconds(num_tokens: int) -> float:
            num_pairs = num_decoding_pairs + num_tokens * (start + (num_tokens + 1) / 2)
            return self._times.seconds(self.steps.buckets.num_tokens(num_decoding + num_tokens), num_pairs)

        sizes = self._sizes(budget, num_decoding)
        most_s = max(self.bound_s, (1 + LEAST_SHARE) * seconds(0))
        return next((size for size in sizes if seconds(size) <= most_s), sizes[-1])

    def _sizes(self, budget: int, num_decoding: int) -> list[int]:
        """Return numbers of prefill tokens that fill a bucket, descending from the budget, at least LEAST_TOKENS."""
        filling = [size - num_decoding for size in reversed(self.steps.buckets.tokens)]
        return [budget, *(size for size in filling if LEAST_TOKENS <= size < budget)]
