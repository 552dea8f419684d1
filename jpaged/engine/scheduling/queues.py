"""Where groups are before they end: waiting, running, swapped out."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

from jpaged.engine.scheduling.policies import SchedulingPolicy
from jpaged.engine.sequence import Group, Status


class Queues:
    """Every group that has not been forgotten, by its status. Each verb moves a group and sets its status.

    Attributes:
        fetched_for: groups that wait outside the queue while their prefix comes from disk; others go ahead of them.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.waiting: dict[Group, None] = {}  # in order of arrival
        self.fetched_for: dict[Group, None] = {}
        self.running: list[Group] = []  # in the policy's order
        self.swapped: list[Group] = []
        # Running groups that have ended; in a static batch they keep rows and blocks until all of it has.
        self.ended: list[Group] = []
        self.num_rows = 0
        self._policy = policy

    @property
    def num_waiting(self) -> int:
        """Groups that wait for rows or blocks, wherever they are."""
        return len(self.waiting) + len(self.swapped)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    @property
    def holders(self) -> Iterable[Group]:
        """Every group that holds blocks on the device."""
        return [*self.running, *self.ended]

    def groups(self) -> Iterator[Group]:
        yield from self.holders
        yield from self.swapped
        yield from self.waiting
        yield from self.fetched_for

    def next_group(self) -> Group | None:
        """The next group: a swapped one, or a waiting one that was preempted and comes earlier or that it yields to."""
        waiting = self._policy.first_waiting(self.waiting) if self.waiting else None
        if not self.swapped:
            return waiting
        swapped = min(self.swapped, key=self._policy.running_key)
        if waiting is None:
            return swapped
        is_earlier = waiting.num_preemptions and self._policy.running_key(waiting) < self._policy.running_key(swapped)
        return waiting if is_earlier or self._policy.yields_to(swapped, waiting) else swapped

    def has_next_within(self, max_num_rows: int) -> bool:
        """The next group, if there is one, finds so many rows enough; whether it finds blocks is not asked."""
        if self.num_rows >= max_num_rows:  # a full queue is not looked through
            return False
        group = self.next_group()
        return group is not None and self.num_rows + group.num_rows <= max_num_rows

    def add(self, group: Group) -> None:
        self._policy.arrived(group, self.waiting)
        self.waiting[group] = None

    def hold(self, group: Group) -> None:
        """Keeps a group that has just arrived out of the queue until `let_in`."""
        self.fetched_for[group] = None

    def let_in(self, groups: Iterable[Group]) -> None:
        """Groups that were held wait from now on, each in its place by arrival."""
        for group in groups:
            del self.fetched_for[group]
            self._policy.arrived(group, self.waiting)
            self._insert(group)

    def run(self, group: Group) -> None:
        """A waiting or swapped group gets its rows."""
        if group.status is Status.SWAPPED:
            self.swapped.remove(group)
        else:
            del self.waiting[group]
        group.move_to(Status.RUNNING)
        insort(self.running, group, key=self._policy.running_key)
        self.num_rows += group.num_rows

    def stop_running(self, group: Group) -> None:
        """A running group loses its rows; `put_back` or `put_aside` follows."""
        self.running.remove(group)
        self.num_rows -= group.num_rows

    def put_aside(self, group: Group) -> None:
        """A group that ran is in host memory now."""
        group.move_to(Status.SWAPPED)
        self.swapped.append(group)

    def put_back(self, group: Group) -> None:
        """A group that ran waits again, in its place by arrival."""
        group.move_to(Status.WAITING)
        self._insert(group)

    def _insert(self, group: Group) -> None:
        later = [other for other in self.waiting if other.arrival > group.arrival]
        self.waiting[group] = None
        for other in later:
            del self.waiting[other]
            self.waiting[other] = None

    def end(self, group: Group) -> bool:
        """Ends a group in whatever state it is; True when it ran, and is kept until `forget_ended`."""
        was_running = group.status is Status.RUNNING
        if was_running:
            self.running.remove(group)
            self.ended.append(group)
        elif group.status is Status.SWAPPED:
            self.swapped.remove(group)
        elif group in self.fetched_for:
            del self.fetched_for[group]
        else:
            del self.waiting[group]
        group.move_to(Status.FINISHED)
        return was_running

    def forget_ended(self) -> list[Group]:
        """Running groups that have ended lose their rows."""
        ended, self.ended = self.ended, []
        self.num_rows -= sum(group.num_rows for group in ended)
        return ended
