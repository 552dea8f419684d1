"""Servers on the processors of one machine: which of them are at work beside one that has a step.

    processor 0   server 0  ####      ######          what server 0 does at t is beside another processor's work alone
    processor 1   server 1    ####                    server 2 has at t both: server 0 on its own processor and server 1
    processor 0   server 2     ###                    on the other
                               t

Replicas are simulated a window at a time, one after the other, so that one knows of the others what they did up to the
window's begin. Each therefore sees what was the window's length before: late by as much at begins as at ends.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum


class Beside(IntEnum):
    """Who is at work beside a server."""

    NOBODY = 0
    OTHER_PROCESSOR = 1
    SAME_PROCESSOR = 2
    BOTH = 3


class Processors:
    """What each server has been at, for all that run on one machine; server i runs on processor i, counted around.

    Args:
        late_s: the length of a window.
    """

    def __init__(self, num_servers: int, num_processors: int, late_s: float) -> None:
        self._num_processors = num_processors
        self._late_s = late_s
        self._spans: list[deque[tuple[float, float]]] = [deque() for _ in range(num_servers)]

    def beside(self, place: int, now_s: float) -> Beside:
        """Who was at work beside a server a window ago."""
        at_s = now_s - self._late_s
        busy = [other for other, spans in enumerate(self._spans) if other != place and _is_within(spans, at_s)]
        same = any(self._processor(other) == self._processor(place) for other in busy)
        elsewhere = any(self._processor(other) != self._processor(place) for other in busy)
        return Beside(Beside.SAME_PROCESSOR * same + Beside.OTHER_PROCESSOR * elsewhere)

    def works(self, place: int, begin_s: float, seconds: float) -> None:
        """A server begins a step."""
        spans, end_s = self._spans[place], begin_s + seconds
        while spans and spans[0][1] < begin_s - 2 * self._late_s:
            spans.popleft()  # nobody is so late
        if spans and begin_s <= spans[-1][1]:
            spans[-1] = (spans[-1][0], end_s)
        else:
            spans.append((begin_s, end_s))

    def _processor(self, place: int) -> int:
        return place % self._num_processors


def _is_within(spans: deque[tuple[float, float]], at_s: float) -> bool:
    """Whether one of them has a time."""
    return any(begin_s <= at_s < end_s for begin_s, end_s in spans)
