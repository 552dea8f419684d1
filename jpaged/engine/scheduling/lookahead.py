"""Number of decode steps in the next dispatch (`--num-scheduler-steps`).

    one step a dispatch       | host | step | host | step | host | step |       the host's overhead of a dispatch
    several of them           | host | step   step   step |                     is paid once

A new request waits for the steps already dispatched. Unless a number of steps is configured, the duration of a dispatch
is bounded, so steps of a large model, for which the host's overhead is negligible, are dispatched one by one. The bound
is higher if no row may end within the dispatch, because no step is wasted, and all rows are taken, so that a new
request must wait for a row anyway. There is no bound if no row may end and no request arrives (`NO_NEWCOMERS`).
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

import numpy as np

from jpaged.engine.executor import DeviceRates, Geometry

NO_NEWCOMERS = -1
"""Number of steps: chosen by time if rows may end early, the maximum if none may."""
_LONGEST_S = 0.02
"""Maximum seconds of a dispatch of several steps; tokens that arrive this close together are read as one."""
_LONGEST_WITHOUT_ROOM_S = 0.05
"""The same if no row is free for a new request: tokens arrive close enough to be read as a flow."""
_NUM_KEPT = 5
_JUMPING_SHARE, _JUMPING_SHARE_OF_FED = 0.125, 0.5
"""Share of grammar rows with one allowed token above which jumps save more than multi-step dispatches.

The second is for fed steps, which cost less (`python -m benchmarks.structured.jumps`).
"""
_NEWEST_SHARE = 0.02
"""Weight of the newest step in that share."""
_SPARE_SHARE = 0.65
"""Share of a dispatch during which the next one is not decided yet; the rest is for preparing it."""


class _UnderWay(NamedTuple):
    num_rows: int
    num_steps: int
    begin_s: float
    is_masked: bool


class Lookahead:
    """Chooses the number of steps, from the times measured at start-up and the recent durations of dispatches.

    Args:
        num_steps: fixed maximum, independent of time; 0 chooses by time, and NO_NEWCOMERS may.
        bound_s: bound of the inter-token latency of streams; 0 for no bound.
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
        """Update the available sizes and step counts of compiled programs."""
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
        """Return the steps of a dispatch of `num_rows` rows, each of which can make at least least_left steps.

        Args:
            may_end: some row may end earlier.
            has_room: rows are free for other requests.
            are_bound: some rows follow grammars: the dispatch stops when a row ends, and has no jumps.
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
        """Return the maximum seconds of a dispatch whose number of steps is chosen by time."""
        return self._longest_s if has_room or may_end else self._longest_without_room_s

    def began(self, num_rows: int, num_steps: int, begin_s: float, *, is_masked: bool = False) -> None:
        """Record a dispatch that the host started to prepare at begin_s; num_rows is 0 unless all rows decode.

        Args:
            is_masked: masks are made between its steps, and the next step is decided with the last one.
        """
        self._under_way.append(_UnderWay(num_rows, num_steps, begin_s, is_masked))

    def cut_short(self, num_steps: int) -> None:
        """Reduce the newest pending dispatch to num_steps steps."""
        self._under_way[-1] = self._under_way[-1]._replace(num_steps=num_steps)

    def saw_choices(self, num_rows: int, num_forced: int) -> None:
        """Record the number of rows with grammars in a step, and how many of them had one allowed token."""
        self._forced_share += _NEWEST_SHARE * (num_forced / num_rows - self._forced_share)

    def ended(self, now_s: float) -> None:
        """Record the end of the oldest pending dispatch."""
        num_rows, num_steps, begin_s, _ = self._under_way.popleft()
        seconds, self._last_end_s = now_s - max(begin_s, self._last_end_s), now_s
        size = self._buckets.num_decode_rows(num_rows) if num_rows else None
        if size is not None:
            self._seen_s.setdefault(size, deque(maxlen=_NUM_KEPT)).append(seconds / num_steps)

    def spare_s(self, now_s: float) -> float:
        """Return the seconds until the host must decide the step after the dispatch in flight; 0 or less is now.

        A request that arrives in this time runs right after that dispatch.
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
        """Return the step time measured at start-up; below the least size in proportion."""
        sizes, seconds = zip(*self._forward_s, strict=True)
        return float(np.interp(size, sizes, seconds)) * min(1.0, size / sizes[0])
