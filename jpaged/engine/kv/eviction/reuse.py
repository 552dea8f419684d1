"""How likely blocks are needed again, learnt from those that were: by class and by how long nobody has held them.

    lives      from being freed to being found again, or to the time when the key is no longer remembered
    p(c, b)    of the blocks of class c that reached age b, the share that was found within it
    rate(c, a) max over how long they are kept of      found until then / places * time until then

The last is the index by which Gittins ranks what pays out once, and may be given up at any time: blocks that are found
at any age alike, and those that are found after a while alone, are compared by what a place brings in a unit of time.
Ages count what was freed meanwhile, so that an idle server forgets nothing. Evicted blocks are remembered by their keys
for a while (`worth.py`), else only what is kept could prove to be worth it. Beckmann et al., "LHD", NSDI 2018, ranks by
hits for each place and time as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

NUM_AGES = 24
_STEPS_PER_OCTAVE = 2
_FADE = 0.95
"""What counts so far is worth less each time that the rates are made anew."""


class Reuse:
    """Counts the ends of lives, and makes rates of them.

    Attributes:
        rates: [C][A] blocks found for each place and unit of age that they are kept on, from that age on.

    Args:
        priors: of each class, the share that is taken to be found at any age, before anything is known.
        unit: blocks freed, which the first age takes; each two ages last twice as long.
        prior_blocks: as many of each class count as seen before the first.
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
        """The age of a block since whose last use so many were freed."""
        # 2 log2(1 + x) by the exponent of a number: no more than a step away from it
        scaled = int((1 + num_freed / self._unit) ** _STEPS_PER_OCTAVE)
        return min(scaled.bit_length() - 1, NUM_AGES - 1)

    def found(self, kind: int, age: int) -> None:
        self._found_ca[kind, age] += 1

    def ended(self, kind: int, age: int) -> None:
        self._ended_ca[kind, age] += 1

    def learn(self, alive_ca: F64) -> None:
        """Makes the rates anew.

        Args:
            alive_ca: [C, A] blocks that are free, by class and age: their lives may go on.
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
