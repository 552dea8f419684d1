"""When groups in flight have to end, and who ended them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from jpaged.engine.sequence import Group
from jpaged.types import Request

_EARLY_SHARE, _EARLY_S = 0.02, 0.25
"""A caller's own timer is ahead of ours: its timeout is rounded up on the wire, by a hundredth at most, and travels."""


class Deadlines:
    """When groups in flight have to end, the next one first.

        heap   [ 3.0 | 4.5 | 7.2 | 9.9 ]     those that ended early stay in it until they are the half of it
        open   { 4.5, 9.9 }

    So what is kept is bounded by what is in flight, however far away the deadlines of those are that have ended.

    Attributes:
        next_s: when there may be one to look at, which costs a step nothing to ask.
    """

    def __init__(self) -> None:
        self.next_s = math.inf
        self._heap: list[tuple[float, int]] = []
        self._open: dict[int, tuple[float, Group]] = {}

    def add(self, group: Group, deadline_s: float) -> None:
        """Watches a group until it is discarded."""
        self._open[group.arrival] = deadline_s, group
        heapq.heappush(self._heap, (deadline_s, group.arrival))
        self.next_s = self._heap[0][0]

    def discard(self, group: Group) -> None:
        """Watches a group no longer; nothing happens where it was not watched."""
        self._open.pop(group.arrival, None)
        if len(self._heap) > 2 * len(self._open):
            self._heap = [(deadline_s, arrival) for arrival, (deadline_s, _) in self._open.items()]
            heapq.heapify(self._heap)
            self.next_s = self._heap[0][0] if self._heap else math.inf

    def passed(self, now_s: float) -> Iterator[Group]:
        """Groups whose deadline has passed; each must be discarded before the next is asked for."""
        while self._heap and self._heap[0][0] <= now_s:
            _, arrival = heapq.heappop(self._heap)
            if arrival in self._open:
                yield self._open[arrival][1]
        self.next_s = self._heap[0][0] if self._heap else math.inf


def is_over(request: Request, arrival_s: float, now_s: float) -> bool:
    """A caller who leaves now does so for the deadline: it has passed, or is so near that the caller saw it pass.

    gRPC cancels a call in one way for both causes. So one that is cancelled in the last fiftieth of its time, or the
    last quarter of a second, but not in the first half of it, counts as past its deadline.
    """
    if request.deadline_s is None:
        return False
    total_s = request.deadline_s - arrival_s
    return request.deadline_s - now_s <= min(total_s / 2, max(_EARLY_S, _EARLY_SHARE * total_s))
