"""Number of draft tokens for each row of a step: the number that maximizes tokens per second, possibly none.

    limit(rows) ──> proposers run ──> choose(rows, available drafts) ──> the step ──> observe(results)

In a row with acceptance probabilities a0, a1, ... the draft token at position i adds a0 * ... * ai tokens to a step,
less with each position. So the best n draft tokens of a step are the n largest of these numbers over all rows. The best
n maximizes (rows + the sum of the n) / seconds of a step of that many tokens. Padding is filled, because it is free; if
the rows saturate the device every token costs time, and n is 0.

    ON ──── the gain was below 1 - MARGIN for a while ───> OFF: no proposals
     ^                                                      │  for a number of steps, doubled each time
     └─ 1 + COMEBACK is expected ── PROBING: two tokens <───┘
                                       └──── no ──────────> OFF

The gain is the token rate relative to plain steps: measured if draft tokens ran, else the cost of asking. Between the
two thresholds the state does not change. After a return to ON the off time stays long for TRUSTED_STEPS, so that the
state does not flap. A load under which even perfect drafts would not pay is no evidence, and changes no state.

Decisions are deterministic: they depend on the inputs and on step counts, not on a clock. They never change which
tokens are sampled.

Acceptance rates of draft tokens: of a method by position, and of each sequence relative to it.

    position            0      1      2          trials of position i are drafts that had a token there and whose
    trials          100.0   62.0   41.0          tokens before it were accepted
    accepted         62.0   41.0   30.0          older ones have less weight
    probability       .62    .66    .73          given that the tokens before were accepted

    one sequence        .81    .83    .87        its drafts fail half as often as the method predicts

A sequence starts with the rates of the method and diverges with data. Its failures and the failures expected from its
trials are counted; their ratio scales the failure probability of each position. Old data fades, so a sequence without
drafts returns to the rates of the method.

Time of a step with draft tokens, from device timings at startup.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.executor import BucketTable, DeviceRates

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
_MIN_SLOTS = 8


class Acceptance:
    """Estimator of acceptance probabilities from trials and failures.

    Args:
        num_positions: maximum number of draft tokens per row (k).
    """

    def __init__(self, num_positions: int) -> None:
        self._trials = [0.0] * num_positions
        self._accepted = [0.0] * num_positions
        self._probabilities = [_FIRST_GUESS] * num_positions
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._failed_s = np.zeros(0)
        self._expected_s = np.zeros(0)  # failures

    @property
    def num_sequences(self) -> int:
        return len(self._slots)

    def of_method(self) -> list[float]:
        """Return [k] the probability that a draft token is accepted if those before it are, over all sequences.

        A position with few trials takes over the probability of the one before it.
        """
        return list(self._probabilities)

    def probabilities(self, sequence_keys: Sequence[int]) -> F64:
        """Return [R, k] the same probability for each of the sequences."""
        slots = self._get_slots(sequence_keys)
        scale_r = (self._failed_s[slots] + _SAME_FAILURES) / (self._expected_s[slots] + _SAME_FAILURES)
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
        slots = self._get_slots(sequence_keys)
        self._failed_s[slots] = self._failed_s[slots] * kept_r + (accepted_r < proposed_r)
        self._expected_s[slots] = self._expected_s[slots] * kept_r + expected[trials_r]
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

    def remove(self, sequence_key: int) -> None:
        """Drop a sequence that has ended; no-op if it is unknown."""
        slot = self._slots.pop(sequence_key, None)
        if slot is not None:
            self._free.append(slot)

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

    def _get_slots(self, sequence_keys: Sequence[int]) -> NDArray[np.int64]:
        """Return the array index of each sequence; new sequences are assigned one."""
        known = self._slots
        return np.array([known[key] if key in known else self._begin(key) for key in sequence_keys], np.int64)

    def _begin(self, sequence_key: int) -> int:
        if not self._free:
            num_slots = len(self._failed_s)
            more = np.zeros(max(_MIN_SLOTS, num_slots))
            self._failed_s = np.concatenate([self._failed_s, more])
            self._expected_s = np.concatenate([self._expected_s, more])
            self._free = list(reversed(range(num_slots, len(self._failed_s))))
        slot = self._slots[sequence_key] = self._free.pop()
        self._failed_s[slot] = self._expected_s[slot] = 0.0
        return slot


StepSeconds = Callable[[int, int], float]
"""(tokens, padded; decode rows) -> seconds on the device."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Time of a step and of proposing for it.

    Attributes:
        step_s: time on the device.
        sizes: padded step sizes in tokens, ascending; the last is the maximum.
        host_s: host overhead of a step.
        row_s: asking a proposer for one row, with or without a result.
        token_s: each draft token.
        round_s: the k-th tokens of all rows together, for a draft model that runs once for each k.
    """

    step_s: StepSeconds
    sizes: tuple[int, ...]
    host_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0
    round_s: float = 0.0

    @classmethod
    def of(
        cls,
        rates: DeviceRates,
        buckets: BucketTable,
        *,
        host_s: float = 0.0,
        row_s: float = 0.0,
        token_s: float = 0.0,
        round_s: float = 0.0,
    ) -> StepCosts:
        """Return the costs from device timings at startup."""
        sizes, seconds = zip(*rates.forward_s, strict=True)

        def step_s(num_tokens: int, num_rows: int) -> float:
            nearest = min(max(num_tokens, sizes[0]), sizes[-1])
            return float(np.interp(nearest, sizes, seconds)) * max(1.0, num_tokens / nearest)

        return cls(step_s, buckets.tokens, host_s, row_s, token_s, round_s)

    def size(self, num_tokens: int) -> int:
        """Return the padded size of num_tokens; a number above the largest size is returned unchanged."""
        index = bisect_left(self.sizes, num_tokens)
        return self.sizes[index] if index < len(self.sizes) else num_tokens

    def plain_s(self, num_rows: int, num_other_tokens: int) -> float:
        """Return the time of a step without proposals."""
        return self.step_s(self.size(num_rows + num_other_tokens), num_rows) + self.host_s


MARGIN = 0.02
"""Drafts are turned off if the mean gain falls below 1 less this."""
COMEBACK = 0.05
"""Drafts are turned on again if the expected gain exceeds 1 plus this."""
PROBE_TOKENS = 2
PROBE_STEPS = 8
"""Steps with drafts after which a probe is judged; a probe lasts at most four times this."""
LEAST_OFF_STEPS = 32
MOST_OFF_STEPS = 4096
TRUSTED_STEPS = 1024
"""Steps in state ON after which the next off time is short again."""
_NEW = 1 / 16
"""Weight of a step in the mean gain: older data has half the weight after 11 steps."""
_NEW_SHARE = 1 / 32
_MOST_SHARE = 4.0
"""Cap on measured / expected time of a step: beyond it other processes used the processor."""
_SHORTEST_S = 1e-9
_START_GAIN, _MOST_GAIN = 1.1, 1.5
"""Initial mean gain, and its maximum, so that a long good phase does not delay turning off."""


class AdaptationState(enum.Enum):
    """State of the adaptation."""

    ON = "on"
    OFF = "off"
    PROBING = "probing"


class AdaptiveSpeculation:
    """Controller of the number of draft tokens. Called only by the engine thread.

    Args:
        num_speculative_tokens: maximum number of draft tokens per row (k).
        costs: step times.
        disable_by_batch_size: number of rows above which there are no drafts; None decides by time only.
    """

    def __init__(self, num_speculative_tokens: int, costs: StepCosts, disable_by_batch_size: int | None = None) -> None:
        self.state = AdaptationState.ON
        self.acceptance = Acceptance(num_speculative_tokens)
        self._most = num_speculative_tokens
        self._costs = costs
        self._most_rows = disable_by_batch_size
        self._mean_gain = _START_GAIN
        self._off_steps = LEAST_OFF_STEPS
        self._num_steps_left = 0  # until the state may change
        self._off_rows = 0  # rows of the step that turned it off
        self._num_probed = 0
        self._probed_gain = 0.0
        self._num_steps_on = 0
        self._plain_share = self._proposing_share = 1.0  # measured / expected

    @property
    def mean_gain(self) -> float:
        """Return the mean token rate of recent steps relative to plain steps."""
        return self._mean_gain

    def limit(self, num_rows: int, num_other_tokens: int = 0) -> int:
        """Return the number of draft tokens to request for each row of the next step; 0 skips the proposer.

        Args:
            num_rows: decode rows.
            num_other_tokens: prefill tokens in the step.
        """
        if not num_rows or (self._most_rows is not None and num_rows > self._most_rows):
            return 0
        if self._gain_at_best(num_rows, num_other_tokens) < 1 + MARGIN:
            return 0
        if self.state is AdaptationState.ON:
            self._num_steps_on += 1
            if self._num_steps_on == TRUSTED_STEPS:
                self._off_steps = LEAST_OFF_STEPS
            return self._most
        if self.state is AdaptationState.OFF and 2 * num_rows <= self._off_rows:
            self._num_steps_left, self._off_steps = 0, LEAST_OFF_STEPS  # a different load: try again
        if self._num_steps_left > 0:
            self._num_steps_left -= 1
            return 0 if self.state is AdaptationState.OFF else min(PROBE_TOKENS, self._most)
        if self.state is AdaptationState.PROBING:
            self._turn_off(num_rows)
            return 0
        self.state, self._num_steps_left = AdaptationState.PROBING, 4 * PROBE_STEPS - 1
        self._num_probed, self._probed_gain = 0, 0.0
        self._proposing_share = self._plain_share
        self.acceptance.doubt()
        return min(PROBE_TOKENS, self._most)

    def choose(
        self, sequence_keys: Sequence[int], num_available: Sequence[int], num_other_tokens: int = 0
    ) -> list[int]:
        """Return how many draft tokens of each row to run.

        Args:
            sequence_keys: decode rows.
            num_available: draft tokens of each row, or how many could be generated if generating costs time.
            num_other_tokens: same value as for `limit`.
        """
        num_rows = len(sequence_keys)
        available_r = np.minimum(np.asarray(num_available, np.int64), self._most)
        if not available_r.any():
            if num_rows:
                plain_s = self._plain_s(num_rows, num_other_tokens)
                self._gained(plain_s / (plain_s + self._costs.row_s * num_rows), num_rows)
            return [0] * num_rows
        gains_rk: NDArray[np.float64] = np.multiply.accumulate(self.acceptance.probabilities(sequence_keys), axis=1)
        chosen, gain = self._best(gains_rk, available_r, num_other_tokens)
        if self.state is AdaptationState.PROBING:
            return self._probe(available_r, num_other_tokens, gain)
        if not chosen.any():
            self._gained(1 - 2 * MARGIN, num_rows)  # there were drafts, but none is worth running
        return chosen.tolist()

    def observe(
        self,
        sequence_keys: Sequence[int],
        num_proposals: Sequence[int],
        num_accepted: Sequence[int],
        seconds: float,
        num_other_tokens: int = 0,
    ) -> None:
        """Record the results of a step.

        Args:
            sequence_keys: decode rows of the step.
            num_proposals: number of draft tokens run in each row.
            num_accepted: number of accepted ones of each row.
            seconds: duration of the step, proposing included; 0 if not measured, which assumes the expected time.
            num_other_tokens: prefill tokens in the step.
        """
        num_rows, num_run = len(sequence_keys), sum(num_proposals)
        if not num_rows:
            return
        self.acceptance.observe(sequence_keys, num_proposals, num_accepted)
        if not num_run:
            self.took_plain(num_rows, num_other_tokens, seconds)
            return
        expected_s = self._proposing_s(num_rows, num_other_tokens, num_run, max(num_proposals))
        share = seconds / expected_s if expected_s > 0 else 0.0
        self._proposing_share = _mixed(self._proposing_share, share)
        took_s = expected_s * (min(share, _MOST_SHARE) if share > 0 else self._proposing_share)
        if took_s > 0:
            num_tokens = num_rows + sum(num_accepted)
            self._gained(num_tokens / num_rows * self._plain_s(num_rows, num_other_tokens) / took_s, num_rows)

    def took_plain(self, num_rows: int, num_other_tokens: int, seconds: float) -> None:
        """Record the duration of a step without drafts; 0 is unknown."""
        expected_s = self._costs.plain_s(num_rows, num_other_tokens)
        self._plain_share = _mixed(self._plain_share, seconds / expected_s if expected_s > 0 else 0.0)

    def remove(self, sequence_key: int) -> None:
        """Drop a sequence that has ended."""
        self.acceptance.remove(sequence_key)

    def _gained(self, gain: float, num_rows: int) -> None:
        if self.state is not AdaptationState.ON:  # it was turned off after the step was dispatched
            return
        self._mean_gain = min(_MOST_GAIN, self._mean_gain + _NEW * (gain - self._mean_gain))
        if self._mean_gain < 1 - MARGIN:
            self._turn_off(num_rows)

    def _turn_off(self, num_rows: int) -> None:
        """Turn drafts off for a while, which doubles the next off time."""
        self.state, self._num_steps_left, self._num_steps_on = AdaptationState.OFF, self._off_steps, 0
        self._off_steps, self._off_rows = min(2 * self._off_steps, MOST_OFF_STEPS), num_rows

    def _probe(self, available_r: NDArray[np.int64], num_other_tokens: int, gain: float) -> list[int]:
        """Return the draft lengths of a probe's step; after enough steps, the later ones' expected gain decides."""
        num_rows = len(available_r)
        if self._num_probed == PROBE_STEPS:
            if self._probed_gain / (PROBE_STEPS // 2) < 1 + COMEBACK:
                self._turn_off(num_rows)
                return [0] * num_rows
            self.state, self._mean_gain, self._num_steps_on = AdaptationState.ON, _START_GAIN, 0
        elif self._num_probed >= PROBE_STEPS // 2:
            self._probed_gain += gain
        self._num_probed += 1
        room = self._costs.sizes[-1] - num_rows - num_other_tokens
        wanted_r = np.minimum(available_r, PROBE_TOKENS)
        before_r = np.cumsum(wanted_r) - wanted_r
        return np.clip(room - before_r, 0, wanted_r).tolist()

    def _best(
        self, gains_rk: NDArray[np.float64], available_r: NDArray[np.int64], num_other_tokens: int
    ) -> tuple[NDArray[np.int64], float]:
        """Return the draft length of each row that maximizes the token rate, and that rate relative to a plain step."""
        num_rows, width = gains_rk.shape
        plain_rate = num_rows / self._plain_s(num_rows, num_other_tokens)
        most = int(available_r.max())
        best_rate, best_r = 0.0, np.zeros(num_rows, np.int64)
        # If each position costs time by itself, as with a draft model, fewer of them may be better.
        for depth in range(1, most + 1) if self._costs.round_s else (most,):
            counted = np.where(np.arange(width) < np.minimum(available_r, depth)[:, None], gains_rk, -1.0).ravel()
            order = np.argsort(-counted, kind="stable")
            num_tokens = min(
                int(np.minimum(available_r, depth).sum()), max(0, self._costs.sizes[-1] - num_rows - num_other_tokens)
            )
            order = order[:num_tokens]
            tokens_n = num_rows + np.concatenate([[0.0], np.cumsum(counted[order])])
            rates_n = tokens_n / self._seconds_n(num_rows, num_other_tokens, num_tokens, depth)
            count = int(rates_n.argmax())
            if rates_n[count] > best_rate:
                best_rate = float(rates_n[count])
                best_r = np.bincount(order[:count] // width, minlength=num_rows)
        if best_rate <= plain_rate:
            return np.zeros(num_rows, np.int64), best_rate / plain_rate
        return best_r, best_rate / plain_rate

    def _seconds_n(self, num_rows: int, num_other_tokens: int, num_tokens: int, depth: int) -> NDArray[np.float64]:
        """Return [n + 1] the time of a step with 0, 1, ... draft tokens."""
        costs, base = self._costs, num_rows + num_other_tokens
        first, last = bisect_left(costs.sizes, base), bisect_left(costs.sizes, base + num_tokens)
        sizes = costs.sizes[first : last + 1] or (base,)  # all counts up to each size take the same time
        ends = [min(size - base, num_tokens) for size in sizes[:-1]] + [num_tokens]
        lens = [end - before for before, end in zip([-1, *ends], ends, strict=False)]
        seconds_n = np.repeat([costs.step_s(size, num_rows) for size in sizes], lens)
        asking_s = costs.row_s * num_rows
        seconds_n += costs.host_s + asking_s + costs.round_s * depth
        seconds_n += costs.token_s * np.arange(num_tokens + 1)
        seconds_n *= self._proposing_share
        seconds_n[0] = self._plain_s(num_rows, num_other_tokens) + asking_s
        return seconds_n

    def _gain_at_best(self, num_rows: int, num_other_tokens: int) -> float:
        """Return the relative token rate if all drafts were accepted: in full steps, and with the longest drafts.

        Uses only the times measured at startup. Step times may include other processes' load, and are measured again
        only if drafts run.
        """
        costs, base = self._costs, num_rows + num_other_tokens
        most = num_rows * self._most
        fillings = [size - base for size in costs.sizes if 0 < size - base < most]
        if costs.sizes[-1] - base >= most:
            fillings.append(most)
        plain_s, best = costs.plain_s(num_rows, num_other_tokens), 0.0
        for count in fillings:
            seconds = self._proposing_s(num_rows, num_other_tokens, count, -(-count // num_rows))
            best = max(best, (1 + count / num_rows) * plain_s / max(seconds, _SHORTEST_S))
        return best

    def _plain_s(self, num_rows: int, num_other_tokens: int) -> float:
        return self._costs.plain_s(num_rows, num_other_tokens) * self._plain_share

    def _proposing_s(self, num_rows: int, num_other_tokens: int, num_run: int, depth: int) -> float:
        """Return the time of a step with num_run draft tokens, at most `depth` per row, by startup timings."""
        costs = self._costs
        size = costs.size(num_rows + num_other_tokens + num_run)
        proposing_s = costs.row_s * num_rows + costs.token_s * num_run + costs.round_s * depth
        return costs.step_s(size, num_rows) + costs.host_s + proposing_s


def _mixed(share: float, new: float) -> float:
    """Return the running average after one more measurement; 0 is no measurement."""
    return share + _NEW_SHARE * (min(new, _MOST_SHARE) - share) if new > 0 else share
