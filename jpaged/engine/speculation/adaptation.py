"""How many tokens to propose for each row of a step: as many as make tokens come fastest, and none where none do.

    limit(rows) ──> proposers are asked ──> choose(rows, what they have) ──> the step ──> observe(what came of it)

Of a row with acceptance probabilities a0, a1, ... the proposal at position i adds a0 * ... * ai tokens to a step, less
the further it is behind. So the best n proposals of a step are the n largest of those numbers over all rows, and what n
is best is found by trying each: (rows + the sum of the n) / seconds of a step of that many tokens. Padding is used up,
for it costs nothing; where rows fill the device every token costs, and n is 0.

    ON ──── the gain was below 1 - MARGIN for a while ───> OFF: nobody is asked
     ^                                                      │  for a number of steps, doubled each time
     └─ 1 + COMEBACK is expected ── PROBING: two tokens <───┘
                                       └──── no ──────────> OFF

The gain is what steps made of their time, beside what plain steps would have: measured where proposals were run, and
where they were not, what asking cost. Between the two marks nothing changes, and who comes back is trusted with a short
time off again only after a long while, so that the state does not flap. A load under which not even perfect proposals
would pay says nothing about them, and changes no state.

Given what it is told it decides always the same: it has no clock, and counts steps. Which tokens come is not its
affair.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jpaged.engine.speculation.acceptance import Acceptance
from jpaged.engine.speculation.costs import StepCosts

MARGIN = 0.02
"""Below 1 less this the mean gain turns proposals off."""
COMEBACK = 0.05
"""Above 1 and this the expected gain turns them on again."""
PROBE_TOKENS = 2
PROBE_STEPS = 8
"""Steps with proposals by which a probe has to convince; it lasts four times as many at most."""
LEAST_OFF_STEPS = 32
MOST_OFF_STEPS = 4096
TRUSTED_STEPS = 1024
"""Steps on, after which the next time off is a short one again."""
_NEW = 1 / 16
"""Weight of a step in the mean gain: what was before counts half after 11 steps."""
_NEW_SHARE = 1 / 32
_MOST_SHARE = 4.0
"""What a step may have taken of what was expected and still count: beyond it somebody else had the processor."""
_SHORTEST_S = 1e-9
_START_GAIN, _MOST_GAIN = 1.1, 1.5
"""The mean gain at first, and its bound: a long good time does not hold up the end of it."""


class State(enum.Enum):
    """Whether proposals are asked for."""

    ON = "on"
    OFF = "off"
    PROBING = "probing"


class Adaptation:
    """Decides how many tokens are proposed. Called by the engine thread alone.

    Args:
        num_speculative_tokens: proposals of a row at most (k).
        costs: what steps take.
        disable_by_batch_size: rows above which nothing is proposed; None leaves it to time.
    """

    def __init__(self, num_speculative_tokens: int, costs: StepCosts, disable_by_batch_size: int | None = None) -> None:
        self.state = State.ON
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
        self._plain_share = self._proposing_share = 1.0  # took / expected

    @property
    def mean_gain(self) -> float:
        """Tokens in the time of recent steps, of those that plain steps would have made in it."""
        return self._mean_gain

    def limit(self, num_rows: int, num_other_tokens: int = 0) -> int:
        """How many tokens a proposer is to be asked for, for each row of the next step; 0 asks nobody.

        Args:
            num_rows: rows that decode.
            num_other_tokens: tokens of prompts in the step.
        """
        if not num_rows or (self._most_rows is not None and num_rows > self._most_rows):
            return 0
        if self._gain_at_best(num_rows, num_other_tokens) < 1 + MARGIN:
            return 0
        if self.state is State.ON:
            self._num_steps_on += 1
            if self._num_steps_on == TRUSTED_STEPS:
                self._off_steps = LEAST_OFF_STEPS
            return self._most
        if self.state is State.OFF and 2 * num_rows <= self._off_rows:
            self._num_steps_left, self._off_steps = 0, LEAST_OFF_STEPS  # what did not pay under that load may pay now
        if self._num_steps_left > 0:
            self._num_steps_left -= 1
            return 0 if self.state is State.OFF else min(PROBE_TOKENS, self._most)
        if self.state is State.PROBING:
            self._turn_off(num_rows)
            return 0
        self.state, self._num_steps_left = State.PROBING, 4 * PROBE_STEPS - 1
        self._num_probed, self._probed_gain = 0, 0.0
        self._proposing_share = self._plain_share
        self.acceptance.doubt()
        return min(PROBE_TOKENS, self._most)

    def choose(
        self, sequence_keys: Sequence[int], num_available: Sequence[int], num_other_tokens: int = 0
    ) -> list[int]:
        """How many of its proposals each row is run with.

        Args:
            sequence_keys: rows that decode.
            num_available: what the proposer has for each, or could make where making is what costs.
            num_other_tokens: as `limit` was told.
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
        if self.state is State.PROBING:
            return self._probe(available_r, num_other_tokens, gain)
        if not chosen.any():
            self._gained(1 - 2 * MARGIN, num_rows)  # there was something, and it is not worth a run
        return chosen.tolist()

    def observe(
        self,
        sequence_keys: Sequence[int],
        num_proposals: Sequence[int],
        num_accepted: Sequence[int],
        seconds: float,
        num_other_tokens: int = 0,
    ) -> None:
        """Notes what came of a step.

        Args:
            sequence_keys: its rows that decode.
            num_proposals: of each row, as they were run.
            num_accepted: of each row.
            seconds: what the step took, proposing included; 0 where no clock runs, and then it took what was expected.
            num_other_tokens: tokens of prompts in it.
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
        """Notes what a step without proposals took; 0 is not known."""
        expected_s = self._costs.plain_s(num_rows, num_other_tokens)
        self._plain_share = _mixed(self._plain_share, seconds / expected_s if expected_s > 0 else 0.0)

    def forget(self, sequence_key: int) -> None:
        """The sequence has ended."""
        self.acceptance.forget(sequence_key)

    def _gained(self, gain: float, num_rows: int) -> None:
        if self.state is not State.ON:  # it was turned off since the step was begun
            return
        self._mean_gain = min(_MOST_GAIN, self._mean_gain + _NEW * (gain - self._mean_gain))
        if self._mean_gain < 1 - MARGIN:
            self._turn_off(num_rows)

    def _turn_off(self, num_rows: int) -> None:
        """No proposals for a while, which is twice as long the next time."""
        self.state, self._num_steps_left, self._num_steps_on = State.OFF, self._off_steps, 0
        self._off_steps, self._off_rows = min(2 * self._off_steps, MOST_OFF_STEPS), num_rows

    def _probe(self, available_r: NDArray[np.int64], num_other_tokens: int, gain: float) -> list[int]:
        """The proposals of a step of a probe; when there were enough, what later ones promised decides."""
        num_rows = len(available_r)
        if self._num_probed == PROBE_STEPS:
            if self._probed_gain / (PROBE_STEPS // 2) < 1 + COMEBACK:
                self._turn_off(num_rows)
                return [0] * num_rows
            self.state, self._mean_gain, self._num_steps_on = State.ON, _START_GAIN, 0
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
        """The proposals of each row with which tokens come fastest, and how much faster than in a plain step."""
        num_rows, width = gains_rk.shape
        plain_rate = num_rows / self._plain_s(num_rows, num_other_tokens)
        most = int(available_r.max())
        best_rate, best_r = 0.0, np.zeros(num_rows, np.int64)
        # Where each position costs by itself, as a draft model's runs do, fewer of them may be better.
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
        """[n + 1] what a step takes with none, one, ... proposals."""
        costs, base = self._costs, num_rows + num_other_tokens
        first, last = bisect_left(costs.sizes, base), bisect_left(costs.sizes, base + num_tokens)
        sizes = costs.sizes[first : last + 1] or (base,)  # the counts up to each take as long
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
        """How much faster tokens would come if all were accepted: in full steps, and with the longest drafts.

        By what the device was timed at alone: what steps were seen to take may have been somebody else's doing, and is
        only seen again where something is proposed.
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
        """What a step with so many proposals was timed at, the longest of `depth`."""
        costs = self._costs
        size = costs.size(num_rows + num_other_tokens + num_run)
        proposing_s = costs.row_s * num_rows + costs.token_s * num_run + costs.round_s * depth
        return costs.step_s(size, num_rows) + costs.host_s + proposing_s


def _mixed(share: float, new: float) -> float:
    """A share after one more was seen; 0 is none."""
    return share + _NEW_SHARE * (min(new, _MOST_SHARE) - share) if new > 0 else share
