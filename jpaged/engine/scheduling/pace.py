"""How many tokens of prompts a step may hold, so that the streams in it get their next token in time.

    tokens of a step     8    16    32    64   128       of which 4 rows decode; the bound is 20 ms:
    takes                5     5     7    12    30 ms    60 tokens of prompts
                                          ^

A step is padded to a bucket, so that any number of tokens in between costs the same, and a bucket is filled. What one
takes is what the device was timed at when it started, times what steps of that size have taken of it lately.
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
"""Tokens of prompts that a step may hold however long it takes."""
LEAST_SHARE = 0.5
"""What prompts may always add to a step: so much of what it takes without them."""
_NUM_KEPT = 32
_ONE_IN = 8
_NUM_STEPS_TRUSTED = 256
_SHORTEST_S = 1e-9


class RanStep(NamedTuple):
    """What a step was, and what it took.

    Attributes:
        num_padded: its tokens, padded to a bucket.
        query_starts, kv_lens: see `StepInputs`; of the rows in use.
        begin_s: when the first thing was done for it.
        seconds: from the end of the step before, where that overlapped with it, to its own.
        num_steps: of its dispatch, each of which takes so long.
    """

    num_padded: int
    query_starts: I32
    kv_lens: I32
    begin_s: float
    seconds: float = 0.0
    num_steps: int = 1

    @property
    def num_pairs(self) -> int:
        """See `StepInputs.num_pairs`: counted where it is asked for, as few steps are."""
        return num_pairs(self.query_starts, self.kv_lens)


_MAX_RECENT_STEPS = 64


class RecentSteps:
    """The steps that ran lately, until somebody takes them to learn from them; the oldest are dropped.

    Attributes:
        buckets: the sizes that steps are padded to by now.
    """

    def __init__(self, buckets: BucketTable) -> None:
        self.buckets = buckets
        self._under_way: deque[RanStep] = deque()
        self._ran: deque[RanStep] = deque(maxlen=_MAX_RECENT_STEPS)
        self._last_end_s = 0.0

    def began(self, inputs: StepInputs, buckets: BucketTable, begin_s: float, num_steps: int = 1) -> None:
        """A dispatch of some steps is on its way, for which the first thing was done at begin_s."""
        self.buckets = buckets
        query_starts = inputs.query_starts_s1[: inputs.num_rows + 1].copy()
        kv_lens = inputs.kv_lens_s[: inputs.num_rows].copy()
        self._under_way.append(RanStep(len(inputs.token_ids_t), query_starts, kv_lens, begin_s, num_steps=num_steps))

    def cut_short(self, num_steps: int) -> None:
        """The newest dispatch that is on its way has no more than so many steps."""
        self._under_way[-1] = self._under_way[-1]._replace(num_steps=num_steps)

    def ended(self, now_s: float) -> None:
        """The oldest step that is on its way is here."""
        step = self._under_way.popleft()
        self._ran.append(step._replace(seconds=(now_s - max(step.begin_s, self._last_end_s)) / step.num_steps))
        self._last_end_s = now_s

    def take(self) -> list[RanStep]:
        """Those that nobody has taken, in their order."""
        ran = list(self._ran)
        self._ran.clear()
        return ran


class _Seen:
    """What steps of one bucket took of what it was timed at; at first as much as is expected.

    Attributes:
        share: what all but one in eight of them stay below.
        at: when the last of them ran, as the number of all steps.
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
    """What a step of a size takes, in seconds; steps that ran correct what the device was timed at.

        took / timed at     1.1  0.9  1.0  7.3  1.0  1.2  1.0  1.1        of those of a bucket, the last 32 are kept;
                                           ^ one in eight does not count: somebody else had the processor

    A bucket begins as if it were like the nearest that was seen. One that was not seen for long is forgotten, as what
    made it slow may be over: it is tried again, and the first step says how it goes on.
    """

    def __init__(self, rates: DeviceRates) -> None:
        self._tokens = [num_tokens for num_tokens, _ in rates.forward_s]
        self._seconds = [max(seconds, _SHORTEST_S) for _, seconds in rates.forward_s]
        self._pair_s = rates.pair_s
        self._seen: dict[int, _Seen] = {}
        self._forgotten: set[int] = set()
        self._num_seen = 0

    def seconds(self, num_padded: int, num_pairs: float) -> float:
        """What a step takes.

        Args:
            num_padded: its tokens, padded to a bucket.
            num_pairs: (query, key) pairs that attention looks at, over all rows, in one head of one layer.
        """
        return self._share(num_padded) * self._timed_at(num_padded, num_pairs)

    def observe(self, num_padded: int, num_pairs: float, seconds: float) -> None:
        """Notes what a step took; one that took no time, as where no clock runs, says nothing."""
        if seconds <= 0:
            return
        share = seconds / self._timed_at(num_padded, num_pairs)
        if num_padded not in self._seen:  # who is tried again has to do so well at once
            self._seen[num_padded] = _Seen(share if num_padded in self._forgotten else self._share(num_padded))
        self._num_seen += 1
        self._seen[num_padded].add(share, self._num_seen)
        for known in [known for known, seen in self._seen.items() if seen.at < self._num_seen - _NUM_STEPS_TRUSTED]:
            del self._seen[known]
            self._forgotten.add(known)

    def _timed_at(self, num_padded: int, num_pairs: float) -> float:
        """By the device's start: straight lines between the sizes that were timed; beyond them in proportion."""
        nearest = min(max(num_padded, self._tokens[0]), self._tokens[-1])
        seconds = float(np.interp(nearest, self._tokens, self._seconds)) * num_padded / nearest
        return seconds + self._pair_s * num_pairs

    def _share(self, num_padded: int) -> float:
        """Took / timed at, of this bucket or else the nearest; the smaller of two that are as near."""
        if not self._seen:
            return 1.0
        return self._seen[min(self._seen, key=lambda known: max(known, num_padded) / min(known, num_padded))].share


_NUM_TOGETHER = 8
_LEAST_SIZE = 8


class LeastTimes:
    """What steps took at the least, in seconds, by how many tokens they had.

        dispatches     64  64  64  64  64  64  64  64 │ 512 512 ...      eight in turn of one size are taken together:
        took            2   2   9   0   2   2   2   2 │                  one that is seen late makes the next look short

    Steps of sizes that were not seen take no less than smaller ones, and smaller ones no less than their part of larger
    ones. Before eight dispatches of one size have run nothing is known.

    Args:
        max_num_tokens: of a step.
    """

    def __init__(self, max_num_tokens: int) -> None:
        self._max_num_tokens = max_num_tokens
        self._least_s: dict[int, float] = {}
        self._size = self._num_dispatches = self._num_steps = 0
        self._seconds = self._token_s = self._step_s = 0.0

    def observe(self, num_tokens: int, num_steps: int, seconds: float) -> None:
        """Takes what a dispatch of some steps took from the end of the one before, where that ran until then."""
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
        """The least time of so many tokens of prompts, and then so many steps; 0 where nothing is known."""
        return num_tokens * self._token_s + num_steps * self._step_s


class Pace:
    """Chooses the tokens of prompts in a step beside streams, under a bound of the time between two tokens.

    The bound holds where the device can keep it: prompts always get a least part, so that they come to their end.

    Attributes:
        steps: is told of each step; what ran is looked at when somebody asks.
    """

    def __init__(self, bound_s: float, rates: DeviceRates, buckets: BucketTable) -> None:
        self.steps = RecentSteps(buckets)
        self._bound_s = bound_s
        self._times = StepTimes(rates)

    def within(
        self, budget: int, context_lens: Sequence[int], running: Sequence[Group], prefilling: Sequence[Group]
    ) -> int:
        """Tokens of prompts that fit beside the rows that decode; the whole budget where none of these is streamed.

        Args:
            budget: how many the step has room for.
            context_lens: tokens of each row that decodes.
            running: every group that runs.
            prefilling: those that compute their prompts, the next one first.
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
        """Tokens of prompts that fill a bucket, descending from the budget; none is below the least."""
        filling = [size - num_decoding for size in reversed(self.steps.buckets.tokens)]
        return [budget, *(size for size in filling if LEAST_TOKENS <= size < budget)]
