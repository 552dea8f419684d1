"""How many tokens of prompts a step may hold, so that the streams in it get their next token in time.

    tokens of a step     8    16    32    64   128       of which 4 rows decode; the bound is 20 ms:
    takes                5     5     7    12    30 ms    60 tokens of prompts
                                          ^

A step is padded to a bucket, so that any number of tokens in between costs the same, and a bucket is filled. What one
takes is what the device was timed at when it started, times what steps of that size have taken of it lately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from jpaged.engine.executor import BucketTable, DeviceRates, StepInputs
from jpaged.engine.sequence import Group

LEAST_TOKENS = 16
"""Tokens of prompts that a step may hold however long it takes."""
LEAST_SHARE = 0.25
"""What prompts may always add to a step: so much of what it takes without them."""
_NUM_KEPT = 32
_NUM_FIRST = 7
_ONE_IN = 8
_NUM_STEPS_TRUSTED = 2048
_SHORTEST_S = 1e-9


class StepTimes:
    """What a step of a size takes, in seconds; steps that ran correct what the device was timed at.

        took / timed at     1.1  0.9  1.0  7.3  1.0  1.2  1.0  1.1        of those of a bucket, the last 32 are kept;
                                           ^ one in eight does not count: somebody else had the processor

    A bucket that is seen for the first time begins as if it were like the nearest; one that was not seen for long is
    forgotten, since the machine may have changed meanwhile.
    """

    def __init__(self, rates: DeviceRates) -> None:
        self._tokens = [num_tokens for num_tokens, _ in rates.forward_s]
        self._seconds = [max(seconds, _SHORTEST_S) for _, seconds in rates.forward_s]
        self._pair_s = rates.pair_s
        self._kept: dict[int, deque[float]] = {}
        self._shares: dict[int, float] = {}
        self._seen_at: dict[int, int] = {}
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
        if num_padded not in self._kept:
            self._kept[num_padded] = deque([self._share(num_padded)] * _NUM_FIRST, _NUM_KEPT)
        kept = self._kept[num_padded]
        kept.append(seconds / self._timed_at(num_padded, num_pairs))
        self._shares[num_padded] = sorted(kept)[len(kept) - 1 - len(kept) // _ONE_IN]
        self._num_seen += 1
        self._seen_at[num_padded] = self._num_seen
        for known in [known for known, at in self._seen_at.items() if at < self._num_seen - _NUM_STEPS_TRUSTED]:
            del self._kept[known], self._shares[known], self._seen_at[known]

    def _timed_at(self, num_padded: int, num_pairs: float) -> float:
        """By the device's start: straight lines between the sizes that were timed; beyond them in proportion."""
        nearest = min(max(num_padded, self._tokens[0]), self._tokens[-1])
        seconds = float(np.interp(nearest, self._tokens, self._seconds)) * num_padded / nearest
        return seconds + self._pair_s * num_pairs

    def _share(self, num_padded: int) -> float:
        """Took / timed at, of this bucket or else the nearest; the smaller of two that are as near."""
        if num_padded in self._shares or not self._shares:
            return self._shares.get(num_padded, 1.0)
        return self._shares[min(self._shares, key=lambda known: max(known, num_padded) / min(known, num_padded))]


class Pace:
    """Chooses the tokens of prompts in a step beside streams, under a bound of the time between two tokens.

    The bound holds where the device can keep it: prompts always get a least part, so that they come to their end.
    """

    def __init__(self, bound_s: float, rates: DeviceRates, buckets: BucketTable) -> None:
        self._bound_s = bound_s
        self._times = StepTimes(rates)
        self._buckets = buckets
        self._running: deque[tuple[int, float, float]] = deque()
        self._last_end_s = 0.0

    def dispatched(self, inputs: StepInputs, buckets: BucketTable, begin_s: float) -> None:
        """A step is on its way.

        Args:
            buckets: that are compiled by now.
            begin_s: before anything was done for it.
        """
        self._buckets = buckets
        self._running.append((len(inputs.token_ids_t), inputs.num_pairs, begin_s))

    def collected(self, now_s: float) -> None:
        """The oldest step that is on its way is here. It took what streams have waited for it since the one before."""
        num_padded, num_pairs, begin_s = self._running.popleft()
        self._times.observe(num_padded, num_pairs, now_s - max(begin_s, self._last_end_s))
        self._last_end_s = now_s

    def within(self, budget: int, context_lens: Sequence[int], prefilling: Sequence[Group]) -> int:
        """Tokens of prompts that fit beside the rows that decode.

        Args:
            budget: how many the step has room for.
            context_lens: tokens of each row that decodes.
            prefilling: the groups that compute their prompts, the next one first.
        """
        num_decoding, num_decoding_pairs = len(context_lens), sum(context_lens)
        start = prefilling[0].live[0].num_computed_tokens if prefilling else 0

        def seconds(num_tokens: int) -> float:
            num_pairs = num_decoding_pairs + num_tokens * (start + (num_tokens + 1) / 2)
            return self._times.seconds(self._buckets.num_tokens(num_decoding + num_tokens), num_pairs)

        sizes = self._sizes(budget, num_decoding)
        for bound_s in (self._bound_s, (1 + LEAST_SHARE) * seconds(0)):
            for size in sizes:
                if seconds(size) <= bound_s:
                    return size
        return sizes[-1]

    def _sizes(self, budget: int, num_decoding: int) -> list[int]:
        """Tokens of prompts that fill a bucket, descending from the budget; none is below the least."""
        filling = [size - num_decoding for size in reversed(self._buckets.tokens)]
        return [budget, *(size for size in filling if LEAST_TOKENS <= size < budget)]
