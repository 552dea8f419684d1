"""Number of rounds of a draft model per dispatch, if any, from measured times.

    ON ──── tokens a round / duration of a round in plain steps is below 1 - MARGIN, twice ──> OFF: plain steps
     ^                                                                                         │  for some dispatches,
     └─ 1 + COMEBACK, in PROBE_DISPATCHES ── PROBING: a few rounds each <──────────────────────┘  doubled each time

Round and plain step times are measured for each padded number of rows. The first dispatches of a size are plain, and so
are some between the rounds, to keep the plain step time current. If rounds do not pay, both times are measured again
before rounds are turned off, because the load of other processes may have changed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from jpaged.engine.executor import MAX_NUM_ROUNDS
from jpaged.engine.speculation.adaptation import COMEBACK, LEAST_OFF_STEPS, MARGIN, MOST_OFF_STEPS, State

PROBE_DISPATCHES = 3
"""Dispatches after which a probe is judged."""
FEW_ROUNDS = 4
"""Rounds of a dispatch if round times are unknown, or during a probe."""
_NUM_PLAIN_FIRST = 2
"""Plain dispatches before the first rounds."""
_PLAIN_EVERY = 512
"""Dispatches with rounds after which plain ones are measured again."""
_NUM_KEPT = 5
_NEW = 1 / 8
"""Weight of a dispatch in the mean number of tokens per round."""


@dataclass(slots=True)
class _Size:
    """Measurements for one padded number of rows.

    Attributes:
        plain_s, round_s: seconds of the last plain steps and rounds.
        tokens: mean number of tokens of a row per round.
        num_plain_due: plain dispatches still to measure.
        num_left: dispatches until the state may change.
        off_for: dispatches of the next off time.
        is_doubted: rounds did not pay relative to older plain steps, and both are measured again before turning off.
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
        """Return the token rate of rounds relative to plain steps, or None if unknown."""
        if not self.plain_s or not self.round_s:
            return None
        return self.tokens * median(self.plain_s) / median(self.round_s)


class RoundRule:
    """Controller of the number of rounds, from measurements. Deterministic: counts dispatches instead of using a clock.

    Args:
        disable_by_batch_size: number of rows above which there are no rounds; None decides by time only.
    """

    def __init__(self, disable_by_batch_size: int | None = None) -> None:
        self._most_rows = disable_by_batch_size
        self._sizes: dict[int, _Size] = {}

    def state(self, size: int) -> State:
        """Return the state for a padded number of rows."""
        return self._of(size).state

    def num_rounds(self, num_rows: int, size: int, longest_s: float) -> int:
        """Return the number of rounds of the next dispatch; after 0, the plain dispatch is reported by `took_plain`.

        Args:
            size: padded number of rows.
            longest_s: maximum duration of a dispatch in seconds.
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
        """Record the duration of a plain step of a dispatch; 0 is unknown."""
        one = self._of(size)
        if seconds > 0:
            one.plain_s.append(seconds)
        one.num_plain_due = max(0, one.num_plain_due - 1)
        if one.state is State.OFF and one.num_left > 0:
            one.num_left -= 1

    def took(self, size: int, tokens: float, seconds: float) -> None:
        """Record the duration of a round of a dispatch and its tokens per row; 0 seconds are unknown."""
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
