"""Acceptance rates of draft tokens: of a method by position, and of each sequence relative to it.

    position            0      1      2          trials of position i are drafts that had a token there and whose
    trials          100.0   62.0   41.0          tokens before it were accepted
    accepted         62.0   41.0   30.0          older ones have less weight
    probability       .62    .66    .73          given that the tokens before were accepted

    one sequence        .81    .83    .87        its drafts fail half as often as the method predicts

A sequence starts with the rates of the method and diverges with data. Its failures and the failures expected from its
trials are counted; their ratio scales the failure probability of each position. Old data fades, so a sequence without
drafts returns to the rates of the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_FIRST_GUESS = 0.6
_ENOUGH_TRIALS = 4.0
"""Number of trials below which the prior fills the rest; its weight is at least half a trial."""
_SAME_FAILURES = 2.0
"""Prior failures, seen and expected, of each sequence."""
_KEPT = 0.97
"""Decay of the method's trials per step with drafts: half of the weight is left after 23 such steps."""
_KEPT_OF_SEQUENCE = 0.95
"""Decay of a sequence's failures per draft of that sequence."""
_FADING = 0.995
"""Decay of a sequence's failures per step."""
_LEAST_PLACES = 8


class Acceptance:
    """Estimator of acceptance probabilities from trials and failures.

    Args:
        num_positions: maximum number of draft tokens per row (k).
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
        """Return [k] the probability that a draft token is accepted if those before it are, over all sequences.

        A position with few trials takes over the probability of the one before it.
        """
        return list(self._probabilities)

    def probabilities(self, sequence_keys: Sequence[int]) -> F64:
        """Return [R, k] the same probability for each of the sequences."""
        places = self._places_of(sequence_keys)
        scale_r = (self._failed_s[places] + _SAME_FAILURES) / (self._expected_s[places] + _SAME_FAILURES)
        failing_k = 1.0 - np.array(self._probabilities)
        return np.maximum(0.0, 1.0 - scale_r[:, None] * failing_k)

    def observe(self, sequence_keys: Sequence[int], num_proposals: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Count the results of a step, one row each; rows without draft tokens are ignored."""
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
        """Reduce the weight of the data to that of a prior, so that the next results dominate."""
        scales = [_ENOUGH_TRIALS / max(trials, _ENOUGH_TRIALS) for trials in self._trials]
        self._trials = [trials * scale for trials, scale in zip(self._trials, scales, strict=True)]
        self._accepted = [accepted * scale for accepted, scale in zip(self._accepted, scales, strict=True)]
        self._failed_s[:] = self._expected_s[:] = 0.0
        self._estimate()

    def forget(self, sequence_key: int) -> None:
        """Drop a sequence that has ended; no-op if it is unknown."""
        place = self._places.pop(sequence_key, None)
        if place is not None:
            self._free.append(place)

    def _count(self, counts: list[float], reached_r: NDArray[np.int64]) -> None:
        """Decay the counts, and add the rows that reached beyond each position."""
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
        """Return the array index of each sequence; new sequences are assigned one."""
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
