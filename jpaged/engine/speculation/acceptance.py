"""How likely proposals are accepted: of a method by position, and of a sequence beside it.

    position            0      1      2          trials of position i are drafts that had a token there and whose
    trials          100.0   62.0   41.0          tokens before it were accepted
    accepted         62.0   41.0   30.0          older ones weigh less
    probability       .62    .66    .73          given that those before it were

    a sequence's        .81    .83    .87        its drafts fail half as often as those of the method would have

A sequence begins as the method does, and goes its own way as it is seen: its failures are counted, and those that were
to be expected of its trials, and each position's failures are scaled by the one to the other. What is not seen any more
fades, so that a sequence that is not asked comes back to what others do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_FIRST_GUESS = 0.6
_ENOUGH_TRIALS = 4.0
"""A guess stands for what is missing to so many trials, and half of one at least."""
_SAME_FAILURES = 2.0
"""Failures that a sequence has in common with the method, whatever was seen of it."""
_KEPT = 0.97
"""What is left of the method's trials after a step in which there were some: half of it after 23 such steps."""
_KEPT_OF_SEQUENCE = 0.95
"""What is left of a sequence's failures after a draft of it."""
_FADING = 0.995
"""What is left of a sequence's failures after any step."""
_LEAST_PLACES = 8


class Acceptance:
    """Counts trials and failures, and tells probabilities.

    Args:
        num_positions: proposals of a row at most (k).
    """

    def __init__(self, num_positions: int) -> None:
        self._trials = [0.0] * num_positions
        self._accepted = [0.0] * num_positions
        self._probabilities = [_FIRST_GUESS] * num_positions
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        self._failed_s = np.zeros(0)
        self._expected_s = np.zeros(0)  # failures

    @property
    def num_sequences(self) -> int:
        return len(self._places)

    def of_method(self) -> list[float]:
        """[k] that a proposal is accepted if those before it are, over all sequences.

        A position that was seldom seen is like the one before it.
        """
        return list(self._probabilities)

    def probabilities(self, sequence_keys: Sequence[int]) -> F64:
        """[R, k] the same for each of the sequences."""
        places = self._places_of(sequence_keys)
        scale_r = (self._failed_s[places] + _SAME_FAILURES) / (self._expected_s[places] + _SAME_FAILURES)
        failing_k = 1.0 - np.array(self._probabilities)
        return np.maximum(0.0, 1.0 - scale_r[:, None] * failing_k)

    def observe(self, sequence_keys: Sequence[int], num_proposals: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Counts what became of the proposals of a step, a row each; rows without proposals say nothing."""
        self._failed_s *= _FADING
        self._expected_s *= _FADING
        if not any(num_proposals):
            return
        accepted_r, proposed_r = np.array(num_accepted), np.array(num_proposals)
        trials_r = np.minimum(proposed_r, accepted_r + 1)
        expected = np.array([0.0, *accumulate(1.0 - probability for probability in self._probabilities)])
        kept_r = np.where(trials_r > 0, _KEPT_OF_SEQUENCE, 1.0)
        places = self._places_of(sequence_keys)
        self._failed_s[places] = self._failed_s[places] * kept_r + (accepted_r < proposed_r)
        self._expected_s[places] = self._expected_s[places] * kept_r + expected[trials_r]
        self._count(self._trials, trials_r)
        self._count(self._accepted, accepted_r)
        self._estimate()

    def doubt(self) -> None:
        """Lets what was seen weigh no more than a guess, so that what is seen next decides."""
        scales = [_ENOUGH_TRIALS / max(trials, _ENOUGH_TRIALS) for trials in self._trials]
        self._trials = [trials * scale for trials, scale in zip(self._trials, scales, strict=True)]
        self._accepted = [accepted * scale for accepted, scale in zip(self._accepted, scales, strict=True)]
        self._failed_s[:] = self._expected_s[:] = 0.0
        self._estimate()

    def forget(self, sequence_key: int) -> None:
        """The sequence has ended; one that was never seen is none."""
        place = self._places.pop(sequence_key, None)
        if place is not None:
            self._free.append(place)

    def _count(self, counts: list[float], reached_r: NDArray[np.int64]) -> None:
        """Adds the rows that reached beyond each position, to what is left of those before."""
        left = len(reached_r)
        for position, ended in enumerate(np.bincount(reached_r, minlength=len(counts) + 1)[:-1].tolist()):
            left -= ended
            counts[position] = counts[position] * _KEPT + left

    def _estimate(self) -> None:
        probability = _FIRST_GUESS
        for position, (trials, accepted) in enumerate(zip(self._trials, self._accepted, strict=True)):
            weight = max(0.5, _ENOUGH_TRIALS - trials)
            probability = (accepted + weight * probability) / (trials + weight)
            self._probabilities[position] = probability

    def _places_of(self, sequence_keys: Sequence[int]) -> NDArray[np.int64]:
        """Where the arrays have each; those that are seen for the first time get a place."""
        known = self._places
        return np.array([known[key] if key in known else self._begin(key) for key in sequence_keys], np.int64)

    def _begin(self, sequence_key: int) -> int:
        if not self._free:
            num_places = len(self._failed_s)
            more = np.zeros(max(_LEAST_PLACES, num_places))
            self._failed_s = np.concatenate([self._failed_s, more])
            self._expected_s = np.concatenate([self._expected_s, more])
            self._free = list(reversed(range(num_places, len(self._failed_s))))
        place = self._places[sequence_key] = self._free.pop()
        self._failed_s[place] = self._expected_s[place] = 0.0
        return place
