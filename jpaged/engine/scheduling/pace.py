"""Limit of the prefill tokens in a step, so that streams in it keep their inter-token latency.

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
from typing import NamedTuple

import numpy as np

from jpaged.engine.executor import I32, BucketTable, DeviceRates, StepInputs, num_pairs
from jpaged.engine.sequence import Group

LEAST_TOKENS = 16
"""Prefill tokens that a step may always hold."""
LEAST_SHARE = 0.5
"""Prefill may always add this share of the time that the step takes without it."""
_NUM_KEPT = 32
_ONE_IN = 8
_NUM_STEPS_TRUSTED = 256
_SHORTEST_S = 1e-9


class RanStep(NamedTuple):
    """Size and duration of an executed step.

    Attributes:
        num_padded: its tokens, padded to a bucket.
        query_starts, kv_lens: see `StepInputs`; of the rows in use.
        begin_s: when the host started to prepare it.
        seconds: time from the later of `begin_s` and the end of the previous step to its end, per step.
        num_steps: steps of the dispatch.
    """

    num_padded: int
    query_starts: I32
    kv_lens: I32
    begin_s: float
    seconds: float = 0.0
    num_steps: int = 1

    @property
    def num_pairs(self) -> int:
        """See `StepInputs.num_pairs`. Computed on access, because few steps need it."""
        return num_pairs(self.query_starts, self.kv_lens)


_MAX_RECENT_STEPS = 64


class RecentSteps:
    """Recent steps that have not been read by `take`; the oldest are dropped.

    Attributes:
        buckets: the current sizes that steps are padded to.
    """

    def __init__(self, buckets: BucketTable) -> None:
        self.buckets = buckets
        self._under_way: deque[RanStep] = deque()
        self._ran: deque[RanStep] = deque(maxlen=_MAX_RECENT_STEPS)
        self._last_end_s = 0.0

    def began(self, inputs: StepInputs, buckets: BucketTable, begin_s: float, num_steps: int = 1) -> None:
        """Record a dispatch of `num_steps` steps that the host started to prepare at begin_s."""
        self.buckets = buckets
        query_starts = inputs.query_starts_s1[: inputs.num_rows + 1].copy()
        kv_lens = inputs.kv_lens_s[: inputs.num_rows].copy()
        self._under_way.append(RanStep(len(inputs.token_ids_t), query_starts, kv_lens, begin_s, num_steps=num_steps))

    def cut_short(self, num_steps: int) -> None:
        """Reduce the newest pending dispatch to num_steps steps."""
        self._under_way[-1] = self._under_way[-1]._replace(num_steps=num_steps)

    def ended(self, now_s: float) -> None:
        """Record the end of the oldest pending dispatch."""
        step = self._under_way.popleft()
        self._ran.append(step._replace(seconds=(now_s - max(step.begin_s, self._last_end_s)) / step.num_steps))
        self._last_end_s = now_s

    def take(self) -> list[RanStep]:
        """Return and clear the recorded steps, in order."""
        ran = list(self._ran)
        self._ran.clear()
        return ran


class _Seen:
    """Ratios of actual to measured time for steps of one bucket; initially the expected ratio.

    Attributes:
        share: the ratio that seven of eight steps do not exceed.
        at: the number of the last observed step.
    """

    def __init__(self, expected: float) -> None:
        self.share = expected
        self.at = 0
        self._expected = [expected] * _ONE_IN
        self._shares: deque[float] = deque(maxlen=_NUM_KEPT)

    def add(self, share: float, at: int) -> None:
        self._shares.append(share)
        self.at = at
        del self._expected[-1:]
        shares = sorted([*self._expected, *self._shares])
        self.share = shares[len(shares) - 1 - len(shares) // _ONE_IN]


class StepTimes:
    """Estimates the duration of a step by its size, in seconds; executed steps correct the times from start-up.

        actual / measured   1.1  0.9  1.0  7.3  1.0  1.2  1.0  1.1        the last 32 ratios of a bucket are kept;
                                           ^ one in eight is ignored: another process had the processor

    A bucket starts with the ratio of the nearest observed one. A bucket that has not been observed for long is
    forgotten, because the cause of slow steps may be gone: it is tried again, and its first step sets the ratio.
    """

    def __init__(self, rates: DeviceRates) -> None:
        self._tokens = [num_tokens for num_tokens, _ in rates.forward_s]
        self._seconds = [max(seconds, _SHORTEST_S) for _, seconds in rates.forward_s]
        self._pair_s = rates.pair_s
        self._seen: dict[int, _Seen] = {}
        self._forgotten: set[int] = set()
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
            self._seen[num_padded] = _Seen(share if num_padded in self._forgotten else self._share(num_padded))
        self._num_seen += 1
        self._seen[num_padded].add(share, self._num_seen)
        for known in [known for known, seen in self._seen.items() if seen.at < self._num_seen - _NUM_STEPS_TRUSTED]:
            del self._seen[known]
            self._forgotten.add(known)

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


class LeastTimes:
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

    def observe(self, num_tokens: int, num_steps: int, seconds: float) -> None:
        """Record a dispatch; `seconds` starts at the end of the previous one if they overlapped."""
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


class Pace:
    """Chooses the prefill tokens of a step under a bound of the inter-token latency of streams.

    The bound is kept if the device is fast enough: prefill always gets a minimum share, so that prompts finish.

    Attributes:
        steps: records the steps; they are evaluated when `within` is called.
    """

    def __init__(self, bound_s: float, rates: DeviceRates, buckets: BucketTable) -> None:
        self.steps = RecentSteps(buckets)
        self._bound_s = bound_s
        self._times = StepTimes(rates)

    def within(
        self, budget: int, context_lens: Sequence[int], running: Sequence[Group], prefilling: Sequence[Group]
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
        most_s = max(self._bound_s, (1 + LEAST_SHARE) * seconds(0))
        return next((size for size in sizes if seconds(size) <= most_s), sizes[-1])

    def _sizes(self, budget: int, num_decoding: int) -> list[int]:
        """Return numbers of prefill tokens that fill a bucket, descending from the budget, at least LEAST_TOKENS."""
        filling = [size - num_decoding for size in reversed(self.steps.buckets.tokens)]
        return [budget, *(size for size in filling if LEAST_TOKENS <= size < budget)]
