"""Whether there are rounds of a draft model, and how many, by what was measured.

    ON ──── tokens a round / what a round takes in plain steps is below 1 - MARGIN, twice ──> OFF: plain steps
     ^                                                                                         │  for some dispatches,
     └─ 1 + COMEBACK, in PROBE_DISPATCHES ── PROBING: a few rounds each <──────────────────────┘  doubled each time

Both times are measured, for each number of rows that a program is for. They are known before anything is decided: the
first dispatches of a size are plain ones, and some between the rounds are, so that what a plain step takes stays known.
Where rounds do not pay both are timed again: a machine that others use may have become slower since.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from jpaged.engine.executor import MAX_NUM_ROUNDS
from jpaged.engine.speculation.adaptation import COMEBACK, LEAST_OFF_STEPS, MARGIN, MOST_OFF_STEPS, State

PROBE_DISPATCHES = 3
"""Dispatches by which a probe has to convince."""
FEW_ROUNDS = 4
"""Rounds of a dispatch of which it is not known what they take, or whether they pay."""
_NUM_PLAIN_FIRST = 2
"""Plain dispatches before the first rounds."""
_PLAIN_EVERY = 512
"""Dispatches of rounds after which as many plain ones come again."""
_NUM_KEPT = 5
_NEW = 1 / 8
"""Weight of a dispatch in the mean number of tokens of a round."""


@dataclass(slots=True)
class _Size:
    """What is known of one number of rows, padded.

    Attributes:
        plain_s, round_s: seconds of the last plain steps and rounds.
        tokens: of a row in a round, on average.
        num_plain_due: plain dispatches that are to be timed.
        num_left: dispatches until the state may change.
        off_for: dispatches of the next time off.
        is_doubted: rounds did not pay beside plain steps of earlier, and both are timed again before there are none.
    """

    state: State = State.ON
    plain_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    round_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    tokens: float = 0.0
    num_plain_due: int = _NUM_PLAIN_FIRST
    num_left: int = _PLAIN_EVERY
    off_for: int = LEAST_OFF_STEPS
    is_doubted: bool = False

    @property
    def gain(self) -> float | None:
        """Tokens in the time of a round, of those that plain steps make in it; None is not known."""
        if not self.plain_s or not self.round_s:
            return None
        return self.tokens * median(self.plain_s) / median(self.round_s)


class RoundRule:
    """Decides how many rounds the next dispatch has, by what was measured. It has no clock, and counts dispatches.

    Args:
        disable_by_batch_size: rows above which there are none; None leaves it to time.
    """

    def __init__(self, disable_by_batch_size: int | None = None) -> None:
        self._most_rows = disable_by_batch_size
        self._sizes: dict[int, _Size] = {}

    def state(self, size: int) -> State:
        """Whether there are rounds of so many rows, padded."""
        return self._of(size).state

    def num_rounds(self, num_rows: int, size: int, longest_s: float) -> int:
        """Rounds of the next dispatch of so many rows; 0 is none, and a plain dispatch is told of by `took_plain`.

        Args:
            size: what the rows are padded to.
            longest_s: seconds that a dispatch may take.
        """
        if self._most_rows is not None and num_rows > self._most_rows:
            return 0
        one = self._of(size)
        if one.num_plain_due > 0:
            return 0
        if one.state is State.OFF:
            if one.num_left > 0:
                return 0
            one.state, one.num_left, one.tokens = State.PROBING, PROBE_DISPATCHES, 0.0
            one.round_s.clear()
        if one.state is State.PROBING or not one.round_s:
            return FEW_ROUNDS
        return min(MAX_NUM_ROUNDS, max(1, int(longest_s / median(one.round_s))))

    def took_plain(self, size: int, seconds: float) -> None:
        """Notes what a plain step of a dispatch took; 0 is not known."""
        one = self._of(size)
        if seconds > 0:
            one.plain_s.append(seconds)
        one.num_plain_due = max(0, one.num_plain_due - 1)
        if one.state is State.OFF and one.num_left > 0:
            one.num_left -= 1

    def took(self, size: int, tokens: float, seconds: float) -> None:
        """Notes what a round of a dispatch took, and the tokens that a row had of it; 0 seconds are not known."""
        one = self._of(size)
        one.tokens = tokens if not one.tokens else one.tokens + _NEW * (tokens - one.tokens)
        if seconds > 0:
            one.round_s.append(seconds)
        one.num_left -= 1
        gain = one.gain
        if one.state is State.PROBING:
            if one.num_left <= 0:
                self._judge(one, gain is None or gain >= 1 + COMEBACK)
        elif len(one.round_s) == _NUM_KEPT and gain is not None and gain < 1 - MARGIN:
            if one.is_doubted:
                self._judge(one, pays=False)
            else:
                one.num_plain_due, one.is_doubted = _NUM_PLAIN_FIRST, True
                one.plain_s.clear()
                one.round_s.clear()
        else:
            one.is_doubted = one.is_doubted and len(one.round_s) < _NUM_KEPT
            if one.num_left <= 0:
                one.num_left, one.num_plain_due, one.off_for = _PLAIN_EVERY, _NUM_PLAIN_FIRST, LEAST_OFF_STEPS

    def _of(self, size: int) -> _Size:
        return self._sizes.setdefault(size, _Size())

    def _judge(self, one: _Size, pays: bool) -> None:
        one.is_doubted = False
        if pays:
            one.state, one.num_left = State.ON, _PLAIN_EVERY
        else:
            one.state, one.num_left = State.OFF, one.off_for
            one.off_for = min(2 * one.off_for, MOST_OFF_STEPS)
