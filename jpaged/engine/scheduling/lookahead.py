"""How many decode steps the next dispatch has.

    one step a dispatch       | host | step | host | step | host | step |       what the host does for a dispatch
    several of them           | host | step   step   step |                     is paid once

Who arrives waits for what is dispatched: unless a number is asked for, a dispatch is no longer than that may take. So
steps of a large model, beside which the host's part is nothing, go one by one. Longer may be one in which no row may
end, for what that computes behind its end is in vain: where all rows are taken, so that who arrives has to wait for one
of them anyhow, and where nobody arrives (`NO_NEWCOMERS`).
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

import numpy as np

from jpaged.engine.executor import DeviceRates, Geometry

NO_NEWCOMERS = -1
"""A number of steps that is left to time, where rows may end, and to what there can be, where none does."""
_LONGEST_S = 0.02
"""Seconds of a dispatch of several steps; tokens that come that close together are read as one."""
_LONGEST_WITHOUT_ROOM_S = 0.05
"""The same where who arrives finds no row: tokens come so close together that they are read as a flow."""
_NUM_KEPT = 5
_JUMPING_SHARE, _JUMPING_SHARE_OF_FED = 0.125, 0.5
"""Rows without a choice, of those that follow grammars, from which jumps save more than several steps at once do; and
where those are fed, for they cost less (`python -m benchmarks.structured.jumps`)."""
_NEWEST_SHARE = 0.02
"""What the newest step counts in that share."""
_SPARE_SHARE = 0.65
"""The part of a dispatch in which the next one is not decided yet; in the rest of it that is got ready."""


class _UnderWay(NamedTuple):
    num_rows: int
    num_steps: int
    begin_s: float
    is_masked: bool


class Lookahead:
    """Chooses the number of steps, by what the device was timed at and what dispatches of that size have taken since.

    Args:
        num_steps: as many as there can be, whatever they take; 0 leaves it to time, and so may NO_NEWCOMERS.
        bound_s: of the time between two tokens of a stream; 0 is none.
    """

    def __init__(self, num_steps: int, bound_s: float, rates: DeviceRates, geometry: Geometry) -> None:
        self._chosen = num_steps
        longest_s = _LONGEST_S, _LONGEST_WITHOUT_ROOM_S
        self._longest_s, self._longest_without_room_s = (min(s, bound_s or s) for s in longest_s)
        self.has_programs(geometry)
        self._forward_s = rates.forward_s
        self._seen_s: dict[int, deque[float]] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._last_end_s = 0.0
        self._forced_share = 0.0
        self._jumping_share = _JUMPING_SHARE_OF_FED if geometry.has_fed_steps else _JUMPING_SHARE

    def has_programs(self, geometry: Geometry) -> None:
        """Notes which sizes there are by now, and of how many steps."""
        chosen, most = self._chosen, geometry.max_num_steps
        self._most = min(chosen, most) if chosen > 0 else most
        self._buckets = geometry.buckets

    def num_steps(
        self,
        num_rows: int,
        least_left: int,
        *,
        may_end: bool = True,
        has_room: bool = True,
        are_bound: bool = False,
    ) -> int:
        """Steps of a dispatch of so many rows, each of which may make least_left at least, or end before if it may.

        Args:
            has_room: there are rows for others.
            are_bound: some follow grammars: the dispatch is over where a row ends, and has no jumps.
        """
        if are_bound:
            if self._forced_share > self._jumping_share:
                return 1
            may_end = False
        most = min(self._most, least_left)
        size = self._buckets.num_decode_rows(num_rows) if most > 1 else None
        if size is None:
            return 1
        if self._chosen > 0 or (self._chosen == NO_NEWCOMERS and not may_end):
            return most
        seen_s = self._seen_s.get(size)
        step_s = median(seen_s) if seen_s else self._timed_s(size)
        longest_s = self.longest_s(may_end=may_end, has_room=has_room)
        return most if step_s * most <= longest_s else max(1, int(longest_s / step_s))

    def longest_s(self, *, may_end: bool, has_room: bool) -> float:
        """Seconds that a dispatch may take which is left to time."""
        return self._longest_s if has_room or may_end else self._longest_without_room_s

    def began(self, num_rows: int, num_steps: int, begin_s: float, *, is_masked: bool = False) -> None:
        """A dispatch is on its way, for which the first thing was done at begin_s; num_rows is 0 unless all decode.

        Args:
            is_masked: masks come between its steps, and what comes next is decided with the last.
        """
        self._under_way.append(_UnderWay(num_rows, num_steps, begin_s, is_masked))

    def cut_short(self, num_steps: int) -> None:
        """The newest dispatch that is on its way has no more than so many steps."""
        self._under_way[-1] = self._under_way[-1]._replace(num_steps=num_steps)

    def saw_choices(self, num_rows: int, num_forced: int) -> None:
        """In a step so many rows followed grammars, and so many of them had no choice."""
        self._forced_share += _NEWEST_SHARE * (num_forced / num_rows - self._forced_share)

    def ended(self, now_s: float) -> None:
        """The oldest dispatch that is on its way is here."""
        num_rows, num_steps, begin_s, _ = self._under_way.popleft()
        seconds, self._last_end_s = now_s - max(begin_s, self._last_end_s), now_s
        size = self._buckets.num_decode_rows(num_rows) if num_rows else None
        if size is not None:
            self._seen_s.setdefault(size, deque(maxlen=_NUM_KEPT)).append(seconds / num_steps)

    def spare_s(self, now_s: float) -> float:
        """Seconds for which the host need not decide what follows the dispatch under way; 0 and less is none.

        Who arrives in them runs right behind it, and not behind another one.
        """
        if len(self._under_way) != 1:
            return 0.0
        num_rows, num_steps, begin_s, is_masked = self._under_way[0]
        size = self._buckets.num_decode_rows(num_rows) if num_steps > 1 and not is_masked else None
        seen_s = self._seen_s.get(size) if size is not None else None
        if not seen_s:
            return 0.0
        return max(begin_s, self._last_end_s) + _SPARE_SHARE * num_steps * median(seen_s) - now_s

    def _timed_s(self, size: int) -> float:
        """A step as the device was timed at its start; below the least size in proportion."""
        sizes, seconds = zip(*self._forward_s, strict=True)
        return float(np.interp(size, sizes, seconds)) * min(1.0, size / sizes[0])
