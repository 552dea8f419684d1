"""Deadline heap of groups in flight, and attribution of cancellations to deadlines."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from jpaged.engine.sequence import Group
from jpaged.types import Request

_EARLY_SHARE, _EARLY_S = 0.02, 0.25
"""Tolerance for a client's timer that expires before the server's deadline.

gRPC rounds the timeout up on the wire, by at most a hundredth, and transmission takes time.
"""


class Deadlines:
    """Deadlines of groups in flight, as a heap.

        heap   [ 3.0 | 4.5 | 7.2 | 9.9 ]     finished groups stay in it until they are half of it
        open   { 4.5, 9.9 }

    Its size is bounded by the number of groups in flight, no matter how late the deadlines of finished groups are.

    Attributes:
        next_s: earliest time at which a deadline may have passed; cheap to read in every step.
    """

    def __init__(self) -> None:
        self.next_s = math.inf
        self._heap: list[tuple[float, int]] = []
        self._open: dict[int, tuple[float, Group]] = {}

    def add(self, group: Group, deadline_s: float) -> None:
        """Watch a group until it is discarded."""
        self._open[group.arrival] = deadline_s, group
        heapq.heappush(self._heap, (deadline_s, group.arrival))
        self.next_s = self._heap[0][0]

    def discard(self, group: Group) -> None:
        """Stop watching a group; no-op if it is not watched."""
        self._open.pop(group.arrival, None)
        if len(self._heap) > 2 * len(self._open):
            self._heap = [(deadline_s, arrival) for arrival, (deadline_s, _) in self._open.items()]
            heapq.heapify(self._heap)
            self.next_s = self._heap[0][0] if self._heap else math.inf

    def passed(self, now_s: float) -> Iterator[Group]:
        """Yield groups whose deadline has passed; discard each before advancing the iterator."""
        while self._heap and self._heap[0][0] <= now_s:
            _, arrival = heapq.heappop(self._heap)
            if arrival in self._open:
                yield self._open[arrival][1]
        self.next_s = self._heap[0][0] if self._heap else math.inf


def is_over(request: Request, arrival_s: float, now_s: float) -> bool:
    """Return True if a client that disconnects now did so because of the deadline.

    gRPC cancels a call in the same way for a deadline and for a disconnect. A cancellation in the last fiftieth of the
    time, or in the last quarter of a second, but not in the first half, counts as past the deadline.
    """
    if request.deadline_s is None:
        return False
    total_s = request.deadline_s - arrival_s
    return request.deadline_s - now_s <= min(total_s / 2, max(_EARLY_S, _EARLY_SHARE * total_s))
