"""Reuse probability of blocks, learned by class and by time since their last reference.

    lives      from being freed to being hit again, or to the time when the key is no longer remembered
    p(c, b)    of the blocks of class c that reached age b, the share that was hit within it
    rate(c, a) max over how long they are kept of      hits until then / slots * time until then

The rate is the Gittins index of an item that pays out once and may be given up at any time. It ranks blocks by the hits
that a slot yields per unit of time, whether they are hit at any age or only after a while. Ages count freed blocks, so
an idle server forgets nothing. Evicted blocks are remembered by their keys for a while (`worth.py`); otherwise only
cached blocks could prove their worth. Beckmann et al., "LHD", NSDI 2018, also ranks by hits per slot and time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

NUM_AGES = 24
_STEPS_PER_OCTAVE = 2
_FADE = 0.95
"""Factor by which older counts are discounted each time the rates are recomputed."""


class Reuse:
    """Statistics of the ends of lives, and the reuse rates computed from them.

    Attributes:
        rates: [C][A] hits per slot and unit of further age, from each age on.

    Args:
        priors: of each class, the share assumed to be hit at any age before there is data.
        unit: number of freed blocks in the first age; every second age doubles the length.
        prior_blocks: weight of the prior of each class, in blocks.
    """

    def __init__(self, priors: Sequence[float], unit: float, prior_blocks: float) -> None:
        num_classes = len(priors)
        self._unit = unit
        self._prior_blocks = prior_blocks
        self._prior_found_c1: F64 = prior_blocks * np.array(priors)[:, None]
        self._found_ca: F64 = np.zeros((num_classes, NUM_AGES))
        self._ended_ca: F64 = np.zeros((num_classes, NUM_AGES))
        edges = 2.0 ** (np.arange(NUM_AGES + 1) / _STEPS_PER_OCTAVE) - 1
        self._widths_a: F64 = np.diff(edges)
        self.rates: list[list[float]] = []
        self.learn(np.zeros((num_classes, NUM_AGES)))

    def age(self, num_freed: int) -> int:
        """Return the age of a block after num_freed other blocks were freed."""
        # 2 log2(1 + x) from the exponent of a number: off by at most one step
        scaled = int((1 + num_freed / self._unit) ** _STEPS_PER_OCTAVE)
        return min(scaled.bit_length() - 1, NUM_AGES - 1)

    def found(self, kind: int, age: int) -> None:
        self._found_ca[kind, age] += 1

    def ended(self, kind: int, age: int) -> None:
        self._ended_ca[kind, age] += 1

    def learn(self, alive_ca: F64) -> None:
        """Recompute the rates.

        Args:
            alive_ca: [C, A] free blocks by class and age, whose lives have not ended.
        """
        ends_ca = self._found_ca + self._ended_ca + alive_ca
        later_ca = np.cumsum(ends_ca[:, ::-1], axis=1)[:, ::-1] - ends_ca
        at_risk_ca = later_ca + self._found_ca + 0.5 * (self._ended_ca + alive_ca)
        p_ca = (self._found_ca + self._prior_found_c1) / (at_risk_ca + self._prior_blocks)
        rates_ca = np.zeros_like(p_ca)
        for age in range(NUM_AGES):
            missed = np.cumprod(1 - p_ca[:, age:], axis=1)
            reached = np.concatenate([np.ones((len(missed), 1)), missed[:, :-1]], axis=1)
            kept = np.cumsum(self._widths_a[age:] * (reached + missed) / 2, axis=1)
            rates_ca[:, age] = np.max((1 - missed) / kept, axis=1)
        self.rates = rates_ca.tolist()
        self._found_ca *= _FADE
        self._ended_ca *= _FADE
